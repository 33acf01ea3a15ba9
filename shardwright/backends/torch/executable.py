"""A plan bound to a model and an optimizer, for callers that know no framework: the result of `Backend.compile`."""

import atexit
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.torch.capture.precision import COMPUTE
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.machine.process import choose_device, start, this_launch, watch_over
from shardwright.backends.torch.machine.watchdog import Fault
from shardwright.backends.torch.pipeline.action_times import gather
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.state import checkpoint
from shardwright.backends.torch.state.elementwise import is_elementwise, require_separate
from shardwright.backends.torch.state.weights import Weights
from shardwright.backends.torch.training.call import StepCall
from shardwright.core.errors import LossError, ShardwrightError
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.timeline import Timeline

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TorchExecutable:
    """A plan bound to a model, which trains on one batch at a time."""

    def __init__(
        self, runtime: Runtime, loss: Callable[[Any], torch.Tensor], make_optimizer: MakeOptimizer,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> None:  # fmt: skip
        self._runtime = runtime
        self._reduction = reduction
        self._loss = loss
        self._make_optimizer = make_optimizer
        self._optimizer: torch.optim.Optimizer | None = None
        """The optimizer. It is made after the first step's gradients: only then it is certain which tied parameters
        this rank holds."""
        runtime.split_model.before_sharding.append(self._needs_whole_matrices)

    def step(self, batch: Any) -> float:
        """One training step on this replica's batch: a tensor, or a tuple or dict of them, batch first. Returns the
        loss of the batch of all replicas.

        Raises:
            ShardwrightError: the batch does not divide.
            LossError: that loss does not follow from those of microbatches, and ``reduction`` does not say how.
        """
        runtime = self._runtime
        assert runtime.stage_map is not None
        count = runtime.stage_map.schedule.microbatches
        leaves, spec = pytree.tree_flatten(batch)
        for leaf in leaves:
            if leaf.shape[0] % count:
                raise ShardwrightError(f"a batch of {leaf.shape[0]} does not divide into {count} microbatches")
        pieces = [leaf.to(runtime.bound.device).chunk(count) for leaf in leaves]
        microbatches = [[piece[m] for piece in pieces] for m in range(count)]

        def body(stand_ins: list[torch.Tensor]) -> torch.Tensor:
            given = pytree.tree_unflatten(stand_ins, spec)
            if isinstance(given, Mapping):
                output = runtime.model(**given)
            else:
                output = runtime.model(*given) if isinstance(given, (tuple, list)) else runtime.model(given)
            loss = self._loss(output)
            runtime.backward(loss, None, self._reduction)
            return loss

        if self._optimizer is not None:
            self._optimizer.zero_grad()
        shapes = tuple((tuple(t.shape), t.dtype) for t in microbatches[0])
        with runtime.watchdog.step():
            samples = max((leaf.shape[0] for leaf in leaves), default=count) // count
            shares = runtime.begin("a step", [samples] * count)
            call = StepCall((str(spec), shapes), body, microbatches, shares, [0] * len(leaves))
            try:
                prepared = runtime.prepare(call)
            except LossError as error:
                error.add_note("The executable of a plan takes compile(..., reduction='mean') or 'sum' for that.")
                raise
            trained = prepared.run().trained
        if self._optimizer is None:
            self._optimizer = self._make_optimizer(list(runtime.ownership.local_parameters().values()))
        self._optimizer.step()
        assert trained is not None
        assert trained.losses is not None
        return float(trained.losses[0].total())

    def _needs_whole_matrices(self) -> bool:
        """Whether pieces of parameters will not do for the optimizer. Raises MissingCapabilityError where whole ones do
        not either."""
        tried = self._make_optimizer([nn.Parameter(torch.zeros(1))])
        require_separate(tried)
        return not is_elementwise(tried)

    def timelines(self, batch: Any, steps: int) -> tuple[Timeline, ...]:
        """The times of each action of this replica's pipeline in each of some training steps; every rank calls this."""
        runtime, model = self._runtime, self._runtime.split_model
        model.recorders = []
        try:
            for _ in range(steps):
                self.step(batch)
            return gather(model.recorders, runtime.bound.size("pp"), runtime.bound, runtime.watchdog)
        finally:
            model.recorders = None

    def whole_parameters(self) -> Mapping[str, torch.Tensor]:
        """All parameters, whole, by first name, on every rank."""
        state = checkpoint.gather(
            self._runtime.ownership, self._runtime.bound, self._runtime.watchdog, parts=self._runtime.split_model.parts
        )
        return {name: state[name] for name in sorted(self._runtime.ownership.parameter_names)}


def compile(
    plan: Plan,
    model: nn.Module,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    optimizer: MakeOptimizer | None = None,
    weights: Weights | None = None,
    reduction: Literal["mean", "sum"] | None = None,
    seed: int = 0,
    wait_timeout_s: float = 60.0,
) -> TorchExecutable:
    """Bind a plan to a model on this run's ranks.

    Args:
        loss: called on the model's output; by default its ``.loss``, or the output itself.
        optimizer: makes the optimizer of this rank's parameters; by default AdamW at 1e-3.
        weights: data for a model on the meta device.
        reduction: the relation of the loss to the batch: its "mean" over samples, or the "sum"; None: told from the
            code that computes the loss.

    Raises:
        PlanError: the plan is for another model or number of ranks.
        MissingCapabilityError: the plan asks for something that this runtime does not do.
    """
    if reduction not in (None, "mean", "sum"):
        raise ShardwrightError(f"reduction={reduction!r}: expected 'mean', 'sum', or None to have it told")
    stage_map = StageMap.of_plan(plan)
    launch = this_launch()
    device = choose_device(launch)
    plan.require_world(dist.get_world_size() if dist.is_initialized() else launch.world_size)
    plan.require_model("torch", tuple(name for name, _ in model.named_parameters()), type(model).__name__)
    bound, watchdog = watch_over(start(launch, device, wait_timeout_s), plan.mesh, device, wait_timeout_s)
    if watchdog.pulse is not None:
        atexit.register(watchdog.pulse.stop, Fault(bound.rank, "left", f"{watchdog.who} left"))
    runtime = Runtime(model, bound, watchdog, seed=seed, weights=weights, loss_scope=plan.decision.loss_scope,
        compute=COMPUTE[plan.decision.precision],
    )  # fmt: skip
    runtime.split(stage_map)
    make = optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    return TorchExecutable(runtime, loss or _own_loss, make, reduction)


def _own_loss(output: Any) -> torch.Tensor:
    found = getattr(output, "loss", output)
    if not isinstance(found, torch.Tensor):
        raise ShardwrightError(
            f"the model returns a {type(output).__name__} without .loss: pass loss=, a function of it"
        )
    return found
