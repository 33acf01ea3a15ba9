"""Shardwright plans model-parallel training once and runs the plan in PyTorch or in JAX.

Importing this package imports neither framework. `shardwright.torch` and `shardwright.jax` are the training interfaces.
"""

from shardwright.api import capture, plan, simulate
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import ShardwrightError
from shardwright.core.jobs.job import Job
from shardwright.core.jobs.jobs_plan import JobsPlan
from shardwright.core.jobs.planning import plan_jobs
from shardwright.core.jobs.simulate import simulate_jobs
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Replicate, Split
from shardwright.core.model.graph import Graph
from shardwright.core.plan.compare import Comparison, compare
from shardwright.core.plan.explain import explain
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.schedule.timeline import Timeline
from shardwright.core.search.rescore import rescore
from shardwright.core.slices.lengths import slice_lengths

__all__ = [
    "Cluster",
    "Comparison",
    "Graph",
    "Job",
    "JobsPlan",
    "Layout",
    "Mesh",
    "Partial",
    "Plan",
    "Replicate",
    "Schedule",
    "ShardwrightError",
    "Split",
    "StageCosts",
    "Timeline",
    "capture",
    "compare",
    "explain",
    "plan",
    "plan_jobs",
    "rescore",
    "simulate",
    "simulate_jobs",
    "slice_lengths",
]
