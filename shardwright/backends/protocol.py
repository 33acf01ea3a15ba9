"""The boundary between the core and a framework: few, coarse operations in the core's own value types."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.hardware.measurements import Measurements, MeasureProgress
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.timeline import Timeline


class Executable(Protocol):
    """A plan bound to a model, ready to train: the result of `compile`."""

    def step(self, batch: Any) -> float:
        """Run one training step on this process's share of the batch, and return the loss of the whole batch."""
        ...

    def timelines(self, batch: Any, steps: int) -> Sequence[Timeline]:
        """The times at which each action of the pipeline ran, in each of some training steps."""
        ...

    def whole_parameters(self) -> Mapping[str, Any]:
        """Every parameter, whole, by its original name."""
        ...


class Backend(Protocol):
    """The operations that a framework must offer. Backends translate and decide nothing."""

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

    def compile(self, plan: Plan, model: Any, **options: Any) -> Executable:
        """Bind the plan to the model. Raises PlanError when they do not match, MissingCapabilityError when this
        runtime cannot do what the plan asks."""
        ...

    def profile(self, *, name: str, budget_s: float, progress: MeasureProgress | None = None) -> Measurements:
        """Measure the machine that this runs on, as the framework uses it, in about ``budget_s`` seconds. Where a
        launcher started several processes, all of them call this together."""
        ...

    def longest_s(self, seconds: float) -> float:
        """The largest ``seconds`` that any process of this run gives. All of them call this together."""
        ...
