"""Shardwright plans model-parallel training once and runs the plan in PyTorch or in JAX.

Importing this package imports neither framework. `shardwright.torch` and `shardwright.jax` are the training interfaces.
"""

from shardwright.api import capture, plan, simulate
from shardwright.core.cluster import Cluster
from shardwright.core.compare import Comparison, compare
from shardwright.core.errors import ShardwrightError
from shardwright.core.explain import explain
from shardwright.core.graph import Graph
from shardwright.core.layout import Layout, Partial, Replicate, Split
from shardwright.core.mesh import Mesh
from shardwright.core.plan import Plan
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.core.timeline import Timeline

__all__ = [
    "Cluster",
    "Comparison",
    "Graph",
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
    "simulate",
]
