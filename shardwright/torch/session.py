"""The session that `init` sets up for this process: its place among the ranks, the plan or the configuration, and the
model."""

import atexit
import gc
import json
import os
import sys
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch import CAPABILITIES
from shardwright.backends.torch.capture.precision import COMPUTE
from shardwright.backends.torch.compat import Store
from shardwright.backends.torch.machine.agreement import Agreement
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.machine.handshake import shake_hands
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.messages import Messages
from shardwright.backends.torch.machine.process import choose_device, start, this_launch, watch_over
from shardwright.backends.torch.machine.watchdog import Fault, Watchdog, watch_for_stop
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.training.call import LossOfBatch
from shardwright.core.errors import CheckpointError, ShardwrightError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.decision import LossScope
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import AUTO
from shardwright.torch.config import OF_DIVIDED_PARAMETERS, Config, configuration_of_environment, read_config
from shardwright.torch.planning import device_peaks
from shardwright.torch.start_agreement import said_at_start
from shardwright.torch.step_log import StepLog
from shardwright.torch.step_mode import require_carried_out


class OptimizerSettings(Protocol):
    """An optimizer that gives its settings in words."""

    def said(self, name: str) -> dict[str, str]: ...


class PendingSave(Protocol):
    """A checkpoint that is being written."""

    def settle(self) -> None: ...


class Session:
    """One process's run. There is one per process, as there is one default process group."""

    def __init__(
        self,
        config: Config,
        plan: Plan | None,
        bound: BoundMesh,
        watchdog: Watchdog,
        agreement: Agreement,
        owns_group: bool,
    ) -> None:
        self.agreement = agreement
        self.messages = Messages(bound, watchdog)
        self.groups: dict[str, ProcessGroup] = {}
        """Process groups over two axes, by name, once they were asked for."""
        self.config, self.bound, self.watchdog = config, bound, watchdog
        self._given_plan = plan
        self._told_plan: tuple[Plan | None, Any] | None = None
        self.owns_group = owns_group
        self.seed = config.seed
        self.runtime: Runtime | None = None
        """The runtime of the model that was wrapped."""
        self.steps_begun = 0
        """The number of steps that were called, evaluation among them."""
        self.samples_trained = 0
        """The samples that training steps of all replicas have taken since the session began."""
        self.samples_before = 0
        """Those that steps had taken in the run that a checkpoint is of, less those of this session before it was
        read."""
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        """The gradient scalers that scaled the loss of the last training step."""
        self.loaded = "nothing"
        """The state dicts that were loaded, in words."""
        self.optimizers: list[Callable[[], OptimizerSettings | None]] = []
        """References to the optimizers that were made, which give their settings in words."""
        self.post_partition_hooks: OrderedDict[int, Callable[[Any], Any]] = OrderedDict()
        """Functions of an optimizer that wait for the model to be split."""
        self.is_first_step = True
        """Whether no step has been prepared yet: before the first one runs the hooks of all ranks are called."""
        self.reduction: Literal["mean", "sum"] | None = None
        """The relation of losses to their batch, where `backward` is told none."""
        self.batch_losses: Sequence[LossOfBatch] | None = None
        """The losses of the last training step, of the batch of all replicas; None where the step did not return all
        that it gave to ``model.backward``."""
        self.pending: PendingSave | None = None
        """The checkpoint that is being written in the background."""
        self.log = self._log() if config.log_every and bound.rank == 0 else None
        """The lines of training steps, on rank 0."""

    def _log(self) -> StepLog:
        sharing = self.bound.size("pp") * self.bound.size("tp")
        peaks = partial(device_peaks, self.config, self.plan, self.bound.device)
        return StepLog(self.config.log_every, self.bound.device, sharing, peaks)

    @property
    def plan(self) -> Plan | None:
        """The plan that `init` was given, or the one by which the model was split at the first step."""
        if self._given_plan is not None or self.runtime is None or self.runtime.stage_map is None:
            return self._given_plan
        return self.runtime.stage_map.plan

    def plan_document(self) -> Any:
        """The plan as plain JSON values, made once for each plan; None where there is none."""
        plan = self.plan
        if self._told_plan is None or self._told_plan[0] is not plan:
            self._told_plan = plan, None if plan is None else json.loads(json.dumps(to_document(plan)))
        return self._told_plan[1]

    @property
    def compute(self) -> torch.dtype | None:
        """The dtype in which steps compute; None: that of the parameters."""
        asked = self.config.precision if self._given_plan is None else self._given_plan.decision.precision
        return None if asked is None else COMPUTE[asked]

    @property
    def loss_scope(self) -> LossScope | None:
        """The user's choice for a loss that couples samples; None: the user has not said."""
        planned = None if self.plan is None else self.plan.decision.loss_scope
        return self.config.loss_scope or planned

    @property
    def microbatches(self) -> int:
        return self.config.microbatches if self.plan is None else self.plan.microbatches

    def note_loaded(self, what: str) -> None:
        """Remember that this rank loaded its share of a whole state dict."""
        self.loaded = f"{what}, after {digest_of(self.loaded) & 0xFFFFFF:06x}"

    @property
    def compares_in_full(self) -> bool:
        """Whether the next step is one of those that compare everything."""
        return self.steps_begun % self.config.compare_in_full_every == 0

    def run_post_partition_hooks(self) -> Exception | None:
        """Call the functions that waited for the model to be split, once each; the failure of one."""
        alive = [one for reference in self.optimizers if (one := reference()) is not None]
        failure: Exception | None = None
        try:
            while self.post_partition_hooks:
                number, hook = next(iter(self.post_partition_hooks.items()))
                hook(alive[-1] if alive else None)
                self.post_partition_hooks.pop(number, None)
        except Exception as error:
            failure = error
        return failure

    def optimizers_said(self) -> dict[str, str]:
        """The settings of every optimizer in words."""
        found: dict[str, str] = {}
        for number, reference in enumerate(self.optimizers):
            optimizer = reference()
            if optimizer is not None:
                found |= optimizer.said(f"optimizer {number}")
        return found


_session: Session | None = None
_process = 0
"""The process that began the session: forks of it have a copy."""


def current() -> Session:
    """The session of this process. Raises ShardwrightError before `init`."""
    if _session is None:
        raise ShardwrightError("shardwright.torch is not initialised: call sw.init({...}) or sw.init(plan=...) first")
    return _session


def is_initialized() -> bool:
    """Whether `init` was called."""
    return _session is not None


def init(
    config: Mapping[str, Any] | None = None, *, plan: "Plan | str | Path | None" = None, device: Any = None, **keys: Any
) -> None:
    """Join the other processes of this run, and take the plan or the configuration.

    Ranks come from the environment of torchrun, mpirun or Slurm; without one this is a world of one process. With CUDA
    devices NCCL carries the messages, else Gloo.

    Args:
        config: SageMaker's keys (`pipeline_parallel_degree`, `microbatches`, `pipeline`, `ddp` …); `pipeline` takes any
            schedule's name. The degrees are pinned and the rest is planned at the first step. Without any argument the
            keys are those in the environment variable SM_HP_MP_PARAMETERS, as JSON, where it is set.
        plan: a plan, or the path of its file; then `config` may hold `seed`, `wait_timeout_s` and the like.
        device: this rank's device; by default a CUDA device by local rank, else the CPU.
        keys: more keys of the configuration.

    Raises:
        ShardwrightError: an unknown key, a degree that does not divide the number of ranks.
        PlanError: the plan is for another number of ranks.
        MissingCapabilityError: the plan or a key asks for something that this version's runtime does not do.
        DisagreementError: ranks were given different configurations or plans, or another rank has failed.
    """
    global _session, _process
    if _session is not None:
        raise ShardwrightError("init was called twice: call sw.shutdown() in between")
    if config is None and plan is None and not keys:
        config = configuration_of_environment()
    given = {**(config or {}), **keys}
    launch = this_launch()
    place = torch.device(device) if device is not None else choose_device(launch)
    world_size = dist.get_world_size() if dist.is_initialized() else launch.world_size
    asked: _Asked | None = None
    failure: Exception | None = None
    said: dict[str, str] = {}
    try:
        asked = _read(given, plan, world_size)
        if world_size > 1:
            said = said_at_start(asked.settings, asked.plan, asked.mesh, place)
    except Exception as error:
        if world_size == 1:
            raise
        failure = error  # which the other ranks are told
    settings = asked.settings if asked is not None else Config()
    backend = None if settings.ddp_dist_backend == "auto" else settings.ddp_dist_backend
    owns_group = not dist.is_initialized()

    def handshake(store: Store, rank: int, size: int) -> None:
        shake_hands(store, rank, size, said, failure, settings.wait_timeout_s)

    joined = start(launch, place, settings.wait_timeout_s, backend, handshake)
    assert asked is not None
    bound, watchdog = watch_over(joined, asked.mesh, place, settings.wait_timeout_s, backend is None)
    if bound.mesh.size > 1:
        watch_for_stop(watchdog)
        _tell_of_uncaught_errors()
    agreement = Agreement(bound, watchdog)
    _session = Session(settings, asked.plan, bound, watchdog, agreement, owns_group)
    _process = os.getpid()
    atexit.register(_leave_at_exit)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The checked arguments of `init`."""

    settings: Config
    plan: Plan | None
    mesh: Mesh


def _read(given: Mapping[str, Any], plan: "Plan | str | Path | None", world_size: int) -> _Asked:
    if plan is not None:
        _refuse_degrees(given)
    settings = read_config(given)
    require_carried_out(settings)
    chosen = Plan.load(plan) if isinstance(plan, (str, Path)) else plan
    level = settings.shard_level if chosen is None else chosen.decision.shard
    for name in OF_DIVIDED_PARAMETERS if level < 3 else ():
        if getattr(settings, name) is not None:
            warnings.warn(f"{name} has no effect under shard={level}, where parameters stay whole", stacklevel=4)
    if chosen is not None and chosen.decision.gathered_stages and settings.sdp_max_live_parameters is not None:
        raise ShardwrightError(
            f"init was given sdp_max_live_parameters={settings.sdp_max_live_parameters} and a plan with "
            f"gathered_stages={chosen.decision.gathered_stages}: what is whole follows from the number of stages; "
            f"leave out the limit"
        )
    planned_scope = None if chosen is None else chosen.decision.loss_scope or "replica"
    if chosen is not None and settings.loss_scope not in (None, planned_scope):
        raise ShardwrightError(
            f"init was given loss_scope={settings.loss_scope!r} and a plan for {planned_scope!r}: plan "
            f"anew with that loss_scope"
        )
    if chosen is not None:
        chosen.require_world(world_size)
        CAPABILITIES.require_axes({"tp": chosen.decision.tp})
        return _Asked(settings, chosen, chosen.mesh)
    mesh = settings.mesh(world_size)
    CAPABILITIES.require_axes({"tp": settings.tensor_parallel_degree})
    if settings.pipeline != AUTO:  # which is built from costs, at the first step
        settings.schedule(None)
    return _Asked(settings, None, mesh)


def shutdown() -> None:
    """Forget the session, and leave the process group if `init` joined it; the counterpart of `init`."""
    global _session
    session, _session = _session, None
    atexit.unregister(_leave_at_exit)
    if session is None:
        return
    try:
        if session.pending is not None:
            session.pending.settle()
    finally:
        _leave(session)


def _leave(session: Session) -> None:
    """Leave the others: the rest of `shutdown`."""
    if session.log is not None:
        session.log.settle()
    session.agreement.leave("it called sw.shutdown, or its script ended")
    if session.watchdog.pulse is not None:
        session.watchdog.pulse.stop(Fault(session.bound.rank, "left", f"{session.watchdog.who} left"))
    if session.runtime is not None:
        session.runtime.close()
    session.agreement.close()
    owns, handles = session.owns_group, session.bound.handles
    session.groups.clear()
    alone = session.bound.mesh.size == 1
    del session
    # A runtime refers to itself in circles. What is not freed now lives until the interpreter ends, and with it threads
    # of Gloo's: one that then lets go of a tensor takes the process down.
    gc.collect()
    if owns and dist.is_initialized():
        dist.destroy_process_group()
        if not alone:
            handles.clear()  # the last references: the groups' own threads end with them


def _leave_at_exit() -> None:
    """Leave the group of a script that ends without `shutdown`, while the interpreter is still whole.

    A thread of Gloo's that outlives the interpreter can abort the process, and the launcher calls a finished run
    failed. After an uncaught error peers may be gone, and nothing is waited for. A fork of this process leaves nothing:
    it shares the connections to the peers, which would end.
    """
    if os.getpid() != _process:
        return
    error = getattr(sys, "last_value", None)
    if error is None:
        try:
            shutdown()
        except CheckpointError:  # of one that was written in the background: the run did not do what it was asked
            traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
    else:
        _tell(error)


def _tell(error: BaseException) -> None:
    """Tell the other ranks that this one ends, and why; a fork of it is none of theirs."""
    if _session is not None and os.getpid() == _process:
        _session.agreement.leave(f"its script ended with {type(error).__name__}: {error}")
        if _session.watchdog.pulse is not None:
            _session.watchdog.pulse.stop(_session.watchdog.fault_of(error))


_are_told = False


def _tell_of_uncaught_errors() -> None:
    """Tell the other ranks, from now on, of an error that ends this script, and at once: the interpreter may wait for
    threads of the user's before it leaves."""
    global _are_told
    if _are_told:
        return
    _are_told, before = True, sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _tell(error)
        before(kind, error, trace)

    sys.excepthook = hook


def _refuse_degrees(given: Mapping[str, Any]) -> None:
    decided = [
        "pipeline_parallel_degree",
        "partitions",
        "tensor_parallel_degree",
        "microbatches",
        "pipeline",
        "virtual_stages",
        "recompute",
        "offload_activations",
        "activation_loading_horizon",
        "offload_states",
        "placement_strategy",
        "cluster",
        "layouts",
        "optimize",
        "shard",
        "shard_group",
        "gathered_stages",
        "look_ahead",
        "reduce_after",
        "hierarchical_gathers",
        "sdp_hierarchical_allgather",
        "sdp_param_persistence_threshold",
        "shard_optimizer_state",
        "sharded_data_parallel_degree",
        "bf16",
        "fp8",
        "fp16",
    ]
    if given.get("pipeline_mode") != "messages":  # which takes no schedule of a plan
        decided.append("active_microbatches")
    for key in decided:
        if key in given:
            raise ShardwrightError(f"init was given a plan and {key}: the plan decides that; leave {key} out")


def set_seed(seed: int) -> None:
    """Set the seed of dropout. The numbers that are drawn depend on (seed, step, global microbatch, module call) and on
    nothing else: not on how the model is split, nor on torch's own generators."""
    session = current()
    session.seed = int(seed)
    if session.runtime is not None:
        session.runtime.split_model.seed = session.seed
