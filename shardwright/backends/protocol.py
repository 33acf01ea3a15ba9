"""The boundary between the core and a framework: few, coarse operations in the core's own value types."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.hardware.measurements import Measurements, MeasureProgress
from shardwright.core.errors import MissingFrameworkError, ShardwrightError, nearest
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.timeline import Timeline


class Executable(Protocol):
    """A plan bound to a model, ready to train. What `compile` returns."""

    def step(self, batch: Any) -> float:
        """Run one training step on this process's share of the batch; the loss of the whole batch."""
        ...

    def timelines(self, batch: Any, steps: int) -> Sequence[Timeline]:
        """When each action of the pipeline ran in each of some training steps."""
        ...

    def whole_parameters(self) -> Mapping[str, Any]:
        """Every parameter, whole, by its original name."""
        ...


class Backend(Protocol):
    """What a framework must offer. Backends translate and decide nothing."""

    name: str
    capabilities: Capabilities

    def capture(
        self,
        model: Any,
        sample: Any,
        loss: Callable[..., Any] | None = None,
        *,
        batch_dims: Any = None,
        require_loss: bool = True,
    ) -> Graph:
        """Read the model without running it on real data. Raises CaptureError; also when no loss is found and one is
        required (a runtime that sees the loss elsewhere does not require it here)."""
        ...

    def bind(self, mesh: Mesh) -> Any:
        """The framework's own mesh over the devices of this run. Raises ClusterError when their number differs."""
        ...

    def lower_layout(self, layout: Layout, bound_mesh: Any) -> Any:
        """A layout in the framework's own terms."""
        ...

    def compile(self, plan: Plan, model: Any, **options: Any) -> Executable:
        """Bind the plan to the model. Raises PlanError when they do not match, MissingCapabilityError when this
        runtime cannot do what the plan asks."""
        ...

    def profile(self, *, name: str, budget_s: float, progress: MeasureProgress | None = None) -> Measurements:
        """Measure the machine that this runs on, as the framework uses it, in about ``budget_s`` seconds. Where a
        launcher started several processes, all of them call this together."""
        ...

    def longest_s(self, seconds: float) -> float:
        """The largest that any process of this run gives; all of them call this together."""
        ...


BACKENDS = {"torch": "shardwright.backends.torch", "jax": "shardwright.backends.jax"}


def load(name: str) -> Backend:
    """The backend of a framework, imported on first use. Raises MissingFrameworkError naming the extra."""
    if name not in BACKENDS:
        raise ShardwrightError(f"no backend is called {name!r}: {nearest(name, BACKENDS)}")
    require_framework(name)
    backend: Backend = importlib.import_module(BACKENDS[name]).BACKEND
    return backend


def require_framework(name: str) -> None:
    """Raise MissingFrameworkError unless the framework can be imported."""
    needed = {"torch": ("torch",), "jax": ("jax", "flax", "optax")}[name]
    missing = [module for module in needed if not is_installed(module)]
    if missing:
        raise MissingFrameworkError(
            f"shardwright.{name} needs {' and '.join(missing)}, which cannot be imported: "
            f"pip install 'shardwright[{name}]'"
        )


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
