"""The session that `init` sets up for this process: its place among the ranks, the plan or the configuration, and the
models."""

import atexit
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch import CAPABILITIES
from shardwright.backends.torch.compat import Store
from shardwright.backends.torch.machine.agreement import Agreement
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.machine.handshake import shake_hands
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.messages import Messages
from shardwright.backends.torch.machine.process import choose_device, start, this_launch, watch_over
from shardwright.backends.torch.machine.watchdog import Fault, Watchdog, watch_for_stop
from shardwright.core.checkpoint.other_writers import KnownSaves
from shardwright.core.errors import CheckpointError, ShardwrightError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import AUTO
from shardwright.torch.config import Config, configuration_of_environment, read_config
from shardwright.torch.config_checks import OF_DIVIDED_PARAMETERS
from shardwright.torch.model_run import ModelRun, labels, read_plan, require_apart, require_fits_run
from shardwright.torch.start_agreement import said_at_start
from shardwright.torch.step_mode import require_carried_out


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
        self.owns_group = owns_group
        self.seed = config.seed
        """The seed of the run, for models that are wrapped from now on."""
        self.models: list[ModelRun] = []
        """The models that were wrapped, in that order."""
        self.steps_begun = 0
        """The number of steps that were called, evaluation among them."""
        self.loaded = "nothing"
        """The state dicts that were loaded, in words."""
        self.folders: dict[Path, ModelRun] = {}
        """The model whose checkpoints this run has written to each folder."""
        self.saves: KnownSaves = {}
        self.has_copied_weights = False
        """Whether a model was copied: then steps may be given copies."""
        self.joint_steps: dict[Any, Any] = {}
        """The steps of functions that are given several models."""
        self.pending: PendingSave | None = None
        """The checkpoint that is being written in the background."""

    # Its models --------------------------------------------------------------------------------------------------

    def begin_model(self, module: torch.nn.Module, plan: Plan | str | Path | None) -> ModelRun:
        """Make the place of a model that is wrapped. It is one of `models` once its runtime is there.

        Raises:
            ShardwrightError: it shares tensors with a model that was wrapped before, or has no plan where `init` was
                given one, which another model has.
            PlanError: the plan is for other degrees than this run's.
        """
        require_apart(module, self.models)
        chosen = read_plan(plan)
        if chosen is not None:
            require_fits_run(chosen, self.bound)
            _require_fits_settings(chosen, self.config, "DistributedModel was given ")
        elif self._given_plan is not None:
            chosen = self._given_plan
            having = [run for run in self.models if run.plan is chosen]
            if having:
                raise ShardwrightError(
                    f"init was given a plan, and {having[0].label} runs under it: give {type(module).__name__} one of "
                    f"its own, sw.DistributedModel(module, plan=...), or give init a configuration, under which each "
                    f"model is planned at its first step"
                )
        return ModelRun(
            len(self.models), type(module).__name__, self.config, self.bound, chosen, self.seed,
            lambda: len(self.models) <= 1,
        )  # fmt: skip

    def of(self, model: Any) -> ModelRun:
        """The place of a DistributedModel. Raises ShardwrightError where it is of a session that has ended."""
        found: ModelRun | None = next((run for run in self.models if run is getattr(model, "model_run", None)), None)
        if found is not None:
            return found
        raise ShardwrightError(
            f"the DistributedModel of {type(getattr(model, 'module', model)).__name__} was wrapped before sw.shutdown: "
            f"wrap the module again after sw.init"
        )

    def only(self, what: str, fix: str) -> ModelRun:
        """The place of the only model. Raises ShardwrightError, for what is being done, where there is none, or where
        there are several, with the way to say which."""
        if not self.models:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model)")
        if len(self.models) > 1:
            raise ShardwrightError(f"{what}, and this run has {labels(self.models)}: {fix}")
        return self.models[0]

    def of_parameters(self, parameters: Iterable[torch.Tensor], whose: str) -> ModelRun:
        """The place of the model that has these parameters. Raises ShardwrightError, for the owner of the parameters,
        where they are of several models, or where there are several models and they are of none."""
        found: dict[int, ModelRun] = {}
        for parameter in parameters:
            for run in self.models:
                if run.runtime.ownership.name_of(parameter) is not None:
                    found[run.number] = run
        if len(found) > 1:
            raise ShardwrightError(
                f"{whose} has parameters of {labels([found[number] for number in sorted(found)])}: make one for each "
                f"model"
            )
        if found:
            return next(iter(found.values()))
        return self.only(f"{whose} has parameters of no model", "make it from the parameters of one of them")

    def running(self) -> ModelRun | None:
        """The model whose step body runs now."""
        return next((run for run in self.models if run.runtime.in_step_body), None)

    @property
    def plan(self) -> Plan | None:
        """The plan of the only model, or before there is one that which `init` was given. Raises ShardwrightError where
        there are several models."""
        if not self.models:
            return self._given_plan
        return self.only("session.plan is the plan of the only model", "ask model.model_run.plan").plan

    def note_loaded(self, what: str) -> None:
        """Remember that this rank loaded its share of a whole state dict."""
        self.loaded = f"{what}, after {digest_of(self.loaded) & 0xFFFFFF:06x}"

    @property
    def compares_in_full(self) -> bool:
        """Whether the next step is one of those that compare everything."""
        return self.steps_begun % self.config.compare_in_full_every == 0


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
    chosen = read_plan(plan)
    level = settings.shard_level if chosen is None else chosen.decision.shard
    for name in OF_DIVIDED_PARAMETERS if level < 3 else ():
        if getattr(settings, name) is not None:
            warnings.warn(f"{name} has no effect under shard={level}, where parameters stay whole", stacklevel=4)
    if chosen is not None:
        _require_fits_settings(chosen, settings)
        chosen.require_world(world_size)
        CAPABILITIES.require_axes({"tp": chosen.decision.tp})
        return _Asked(settings, chosen, chosen.mesh)
    mesh = settings.mesh(world_size)
    CAPABILITIES.require_axes({"tp": settings.tensor_parallel_degree})
    if settings.pipeline != AUTO:  # which is built from costs, at the first step
        settings.schedule(None)
    return _Asked(settings, None, mesh)


def _require_fits_settings(plan: Plan, settings: Config, given: str = "") -> None:
    """Raise ShardwrightError where a plan and the configuration say different things; ``given`` says in an error who
    was given the plan, where that was not `init`."""
    if plan.decision.gathered_stages and settings.sdp_max_live_parameters is not None:
        raise ShardwrightError(
            f"init was given sdp_max_live_parameters={settings.sdp_max_live_parameters} and {given}a plan with "
            f"gathered_stages={plan.decision.gathered_stages}: what is whole follows from the number of stages; "
            f"leave out the limit"
        )
    planned_scope = plan.decision.loss_scope or "replica"
    if settings.loss_scope not in (None, planned_scope):
        raise ShardwrightError(
            f"init was given loss_scope={settings.loss_scope!r} and {given}a plan for {planned_scope!r}: plan "
            f"anew with that loss_scope"
        )


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
    for log in [run.log for run in session.models if run.log is not None]:
        log.settle()
    session.agreement.leave("it called sw.shutdown, or its script ended")
    if session.watchdog.pulse is not None:
        session.watchdog.pulse.stop(Fault(session.bound.rank, "left", f"{session.watchdog.who} left"))
    for number in range(len(session.models)):
        session.models[number].runtime.close()  # without a name for it, which would keep it below
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
        "auto_partition",
        "default_partition",
        "partitioner",
        "memory_weight",
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
    """Set the seed of dropout, of all models. The numbers that are drawn depend on (seed, model, step of the model,
    global microbatch, module call) and on nothing else: not on how a model is split, nor on torch's own generators, nor
    on the steps of other models. The model is its number in the order in which they were wrapped."""
    session = current()
    session.seed = int(seed)
    for run in session.models:
        run.set_seed(session.seed)
