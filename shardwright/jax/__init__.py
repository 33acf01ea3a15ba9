"""The training interface for JAX: ``import shardwright.jax as sw``.

Beside the names of `shardwright` itself (``capture``, ``plan``, ``Cluster`` …): `train_step`, functional as JAX users
write; `weighted`, which a loss function returns for a loss that has a weight; `Rows` and `reduce_gradient`, for
gradients of a few rows of a table; `TrainState`, the pytree that is handed from step to step; `init` and `shutdown`,
for runs of several processes; `run_jobs`, for many models on few devices. Raises MissingFrameworkError, naming the
extra, where JAX cannot be imported.
"""

from shardwright.backends.registry import require_framework

require_framework("jax")

from shardwright import (  # noqa: E402
    Cluster,
    Comparison,
    Graph,
    Layout,
    Mesh,
    Partial,
    Plan,
    Replicate,
    Schedule,
    ShardwrightError,
    Split,
    StageCosts,
    Timeline,
    capture,
    compare,
    explain,
    plan,
    simulate,
)
from shardwright.backends.jax.capture.loss_results import Weighted, weighted  # noqa: E402
from shardwright.backends.jax.data_parallel.row_gradients import Rows, reduce_gradient  # noqa: E402
from shardwright.backends.jax.jobs.planned_training import JobTraining  # noqa: E402
from shardwright.backends.jax.jobs.run_jobs import JobResult, JobsResult, run_jobs  # noqa: E402
from shardwright.backends.jax.machine.rendezvous import init, shutdown  # noqa: E402
from shardwright.backends.jax.state.train_state import TrainState  # noqa: E402
from shardwright.backends.jax.train import TrainStep, train_step  # noqa: E402

__all__ = [
    "Cluster",
    "Comparison",
    "Graph",
    "JobResult",
    "JobTraining",
    "JobsResult",
    "Layout",
    "Mesh",
    "Partial",
    "Plan",
    "Replicate",
    "Rows",
    "Schedule",
    "ShardwrightError",
    "Split",
    "StageCosts",
    "Timeline",
    "TrainState",
    "TrainStep",
    "Weighted",
    "capture",
    "compare",
    "explain",
    "init",
    "plan",
    "reduce_gradient",
    "run_jobs",
    "shutdown",
    "simulate",
    "train_step",
    "weighted",
]
