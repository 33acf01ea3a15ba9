"""The choice between recorded pipelines and message passing, and the steps under either."""

import contextlib
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.messages.owner_search import count_flops, divide_modules, with_containers
from shardwright.backends.torch.messages.owners import Owners
from shardwright.backends.torch.pipeline.step_results import Returned, Shares
from shardwright.backends.torch.program.program import Tree
from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.runtime import Runtime, StepBody
from shardwright.core.errors import CaptureError, PlanError, UnrecordableError
from shardwright.core.model.graph import Graph
from shardwright.torch.message_options import require_possible, unheeded
from shardwright.torch.planning import capture_at_first_step, plan_at_first_step
from shardwright.torch.session import Session


def run_step(
    session: Session,
    runtime: Runtime,
    signature: Hashable,
    body: StepBody,
    microbatches: Sequence[Sequence[torch.Tensor]],
    shares: Shares,
    axes: Sequence[int | None] | None = None,
) -> tuple[Tree, dict[int, Returned]]:
    """Run a step, recorded or by messages; see `Runtime.step`. Planning comes first, at the first step.

    Raises UnrecordableError: the step cannot be recorded, and ``pipeline_mode`` is "recorded".
    """
    mode = session.config.pipeline_mode
    if mode == "messages" and runtime.messages is None:
        left_out = unheeded(session.config, runtime.stage_map)
        if left_out and session.bound.rank == 0:
            warnings.warn(f"the plan is for a recorded pipeline.{left_out}", stacklevel=3)
        start_messages(session, runtime, body, microbatches[0])
    if runtime.messages is None and runtime.stage_map is None:
        _split(session, runtime, body, microbatches[0])
    prepared = None
    if runtime.messages is None and mode == "auto":
        try:
            prepared = runtime.prepare(signature, body, microbatches, shares, axes)
        except UnrecordableError as error:  # on every rank
            _say(session, error, runtime.stage_map)
            start_messages(session, runtime, body, microbatches[0])
    return runtime.step(signature, body, microbatches, shares, prepared, axes)


def start_messages(session: Session, runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor]) -> None:
    """From now on steps run by messages. A model that is not split yet is divided by its module tree; every rank takes
    the division of rank 0.

    Raises MissingCapabilityError: the configuration or the plan asks for what recorded pipelines alone do.
    """
    config = session.config
    require_possible(config, session.plan)
    if session.bound.size("tp") > 1 and session.bound.rank == 0:
        warnings.warn(
            f"a model that runs by message passing runs whole on each of the {session.bound.size('tp')} ranks of the "
            f"tensor axis, which saves nothing: give these ranks to the pipeline or to replicas instead",
            stacklevel=4,
        )
    stage_map = runtime.stage_map
    if stage_map is not None:
        given: dict[str, int] = {}
        for stage, calls in enumerate(stage_map.calls):
            for path, _ in calls:
                given.setdefault(path, stage_map.schedule.stage_to_rank(stage))
        given = with_containers(given)
    else:
        session.plan = None
        given = _divided(session, runtime, body, microbatch)
    asked = config.pipeline if stage_map is None else stage_map.schedule.name
    pipeline = asked if isinstance(asked, str) else asked.name
    runtime.run_by_messages(
        Owners.of(runtime.model, given),
        active=config.active_microbatches,
        schedule=pipeline,
    )


def _split(session: Session, runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor]) -> None:
    """Plan and split the model; without a plan, and by messages, where the step cannot be recorded.

    Every rank plans by itself, and then all compare what they found.
    """
    recorded_only = session.config.pipeline_mode == "recorded"
    stage_map: StageMap | None = None
    unrecordable: UnrecordableError | None = None
    failure: Exception | None = None
    try:
        graph = _captured(runtime, body, microbatch)
        stage_map = plan_at_first_step(session, runtime.model, graph)
        runtime.record_ahead(stage_map, body, microbatch)
    except UnrecordableError as error:
        unrecordable, failure = error, error if recorded_only else None
    except Exception as error:
        failure = error
    said = _text_of(stage_map)
    notes = (int(unrecordable is not None), digest_of(said))
    told = session.agreement.meet("planning at the first step", failure=failure, notes=notes).values()
    if any(could_not for could_not, *_ in told):
        # Ops that depend on values are captured on real ones, which may differ between ranks that are not in line yet.
        unrecordable = unrecordable or UnrecordableError("another rank could not record the step")
    elif len({planned for _, planned, *_ in told}) > 1:
        fix = "Make a plan file, and pass it to sw.init on every rank."
        session.agreement.meet("planning", [Claim.of("the stages that were planned", said, fix, "replica")])
        unrecordable = UnrecordableError(
            "the replicas planned different stages: which modules the model calls depends on the batch, so that no "
            "plan fits all of them; let the model run by message passing, or pass a plan"
        )
    if unrecordable is None:
        assert stage_map is not None
        runtime.split(stage_map)
    elif recorded_only:
        raise unrecordable
    else:
        _say(session, unrecordable, None)
        start_messages(session, runtime, body, microbatch)


def _captured(runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor]) -> Graph:
    """The model as the step calls it. Raises UnrecordableError where that is what hinders it, else CaptureError."""
    try:
        return capture_at_first_step(runtime, body, list(microbatch))
    except UnrecordableError:
        raise
    except CaptureError as error:
        reason = _why_unrecordable(runtime, body, microbatch, error)
        if reason is None:
            raise
        raise reason from error


def _text_of(stage_map: StageMap | None) -> str:
    if stage_map is None:
        return "none"
    stages = sorted(stage_map.parameter_stages.items())
    layouts = "" if stage_map.plan is None else stage_map.plan.decision.layouts
    digest = digest_of(stage_map.calls, stages, stage_map.schedule.digest, sorted(stage_map.recompute), layouts)
    return f"{len(stage_map.calls)} stages ({digest & 0xFFFFFFFF:08x})"


def _why_unrecordable(
    runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor], hindered: CaptureError
) -> UnrecordableError | None:
    """Why no recorded pipeline can be made of a step that could not be captured; None where it would fail by messages
    too: it asks for what no step may do, or fails by itself."""
    try:
        called = runtime.try_recording(body, microbatch)
    except UnrecordableError as error:
        return error
    except Exception:
        return None
    if not called:
        return None
    return UnrecordableError(f"no plan can be made for it, because {hindered}")


def _say(session: Session, reason: CaptureError, stage_map: StageMap | None) -> None:
    if session.bound.rank == 0:
        warnings.warn(
            f"this model runs by message passing from now on, not as a recorded pipeline: {reason}. Set "
            f"'pipeline_mode': 'messages' to say so beforehand, or 'recorded' to make this an error."
            f"{unheeded(session.config, stage_map)}",
            stacklevel=4,
        )


def _divided(session: Session, runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor]) -> dict[str, int]:
    found: list[Any] = [None]
    session.watch.doing("dividing the model")
    if session.bound.rank == 0:
        flops: dict[str, int] = {}
        if not any(tensor.is_meta for tensor in (*runtime.model.parameters(), *runtime.model.buffers())):
            place = next((p.device for p in runtime.model.parameters()), session.bound.device)
            inputs = [tensor.detach().to(place).clone() for tensor in microbatch]
            # What fails here fails in the step, on every rank.
            with contextlib.suppress(Exception), left_as_it_is(runtime.model, getattr(body, "python_roots", ())):
                flops = count_flops(runtime.model, lambda: runtime.try_running(body, inputs))
        try:
            found = [dict(divide_modules(runtime.model, session.bound.size("pp"), flops).owners)]
        except PlanError as error:
            found = [str(error)]
    if session.bound.mesh.size > 1:
        with session.watch.waiting("rank 0, which divides the model"):
            dist.broadcast_object_list(found, 0)
    if isinstance(found[0], str):
        raise PlanError(found[0])
    given: dict[str, int] = found[0]
    return given
