"""The choice between recorded pipelines and message passing, and the steps under either."""

import contextlib
import hashlib
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwright.backends.torch.messages.owners import Owners
from shardwright.backends.torch.messages.planning import count_flops, divide_modules, with_containers
from shardwright.backends.torch.program import Tree
from shardwright.backends.torch.results import Returned
from shardwright.backends.torch.runtime import Runtime, StepBody
from shardwright.backends.torch.stage_map import StageMap
from shardwright.core.errors import CaptureError, MissingCapabilityError, PlanError, UnrecordableError
from shardwright.core.graph import Graph
from shardwright.torch.planning import capture_at_first_step, plan_at_first_step
from shardwright.torch.session import Session


def run_step(
    session: Session,
    runtime: Runtime,
    signature: Hashable,
    body: StepBody,
    microbatches: Sequence[Sequence[torch.Tensor]],
    samples: Sequence[int] | None = None,
) -> tuple[Tree, dict[int, Returned]]:
    """Run a step, recorded or by messages; see `Runtime.step`. Planning comes first, at the first step.

    Raises UnrecordableError: the step cannot be recorded, and ``pipeline_mode`` is "recorded".
    """
    mode = session.config.pipeline_mode
    if mode == "messages" and runtime.messages is None:
        start_messages(session, runtime, body, microbatches[0])
    if runtime.messages is None and runtime.stage_map is None:
        _split(session, runtime, body, microbatches[0])
    prepared = None
    if runtime.messages is None and mode == "auto":
        failed: UnrecordableError | None = None
        try:
            prepared = runtime.prepare(signature, body, microbatches, samples)
        except UnrecordableError as error:
            failed = error
        # Pipeline peers have the same batch and come to the same end; replicas may not.
        if failed is not None if session.bound.size("dp") == 1 else _anywhere(failed is not None, session):
            _say(session, failed)
            start_messages(session, runtime, body, microbatches[0])
    return runtime.step(signature, body, microbatches, samples, prepared)


def start_messages(session: Session, runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor]) -> None:
    """From now on steps run by messages. A model that is not split yet is divided by its module tree; every rank takes
    the division of rank 0.

    Raises MissingCapabilityError: the configuration or the plan asks for what recorded pipelines alone do.
    """
    config = session.config
    _refuse_what_is_recorded_only(session)
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
    pipeline = config.pipeline if isinstance(config.pipeline, str) else config.pipeline.name
    runtime.run_by_messages(
        Owners.of(runtime.model, given),
        microbatches=session.microbatches,
        active=config.active_microbatches,
        schedule=pipeline,
    )


def _refuse_what_is_recorded_only(session: Session) -> None:
    config, plan = session.config, session.plan
    decision = None if plan is None else plan.decision
    asked = {
        "recompute": config.recompute != "none" or (decision is not None and decision.recompute != "none"),
        "loss_scope='global'": config.loss_scope == "global"
        or (decision is not None and decision.loss_scope == "global"),
        "compile": bool(config.compile),
    }
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise MissingCapabilityError(
            f"the step runs by message passing, which does not do {' nor '.join(refused)}: leave that out, or change "
            f"the model so that it can be recorded ('pipeline_mode': 'recorded' says what hinders it)"
        )


def _split(session: Session, runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor]) -> None:
    """Plan and split the model; without a plan, and by messages, where the step cannot be recorded."""
    recorded_only = session.config.pipeline_mode == "recorded"
    graph: Graph | None = None
    failed: CaptureError | None = None
    try:
        graph = capture_at_first_step(runtime, body, list(microbatch))
    except CaptureError as error:
        failed = error if isinstance(error, UnrecordableError) else _why_unrecordable(runtime, body, microbatch)
        if failed is None:
            raise
        if recorded_only:
            raise failed from error
    if not recorded_only and _anywhere(failed is not None, session):
        # Ops that depend on values are captured on real ones, which may differ between ranks that are not in line yet.
        _say(session, failed)
        start_messages(session, runtime, body, microbatch)
        return
    assert graph is not None
    stage_map = plan_at_first_step(session, runtime.model, graph)
    if session.bound.size("dp") > 1:
        failed = _replicas_differ(stage_map, session)
        if failed is not None and recorded_only:
            raise failed
    try:
        runtime.record_ahead(stage_map, body, microbatch)
    except UnrecordableError as error:
        if recorded_only:
            raise
        failed = error
    if not recorded_only and _anywhere(failed is not None, session):
        _say(session, failed)
        start_messages(session, runtime, body, microbatch)
    else:
        runtime.split(stage_map)


def _why_unrecordable(runtime: Runtime, body: StepBody, microbatch: Sequence[torch.Tensor]) -> UnrecordableError | None:
    """Why a step cannot be recorded; None when it is something else that capture did not like."""
    try:
        runtime.try_recording(body, microbatch)
    except UnrecordableError as error:
        return error
    except CaptureError:
        return None
    return None


def _replicas_differ(stage_map: StageMap, session: Session) -> UnrecordableError | None:
    """What the model calls may depend on the batch, of which every replica has another."""
    text = f"{stage_map.calls} {sorted(stage_map.parameter_stages.items())}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
    ends = torch.tensor([number, -number], dtype=torch.int64, device=session.bound.device)
    with session.watch.waiting("all ranks, to compare the plans of the replicas"):
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    if int(ends[0]) == -int(ends[1]):
        return None
    return UnrecordableError(
        "the replicas planned different stages: which modules the model calls depends on the batch, so that no plan "
        "fits all of them; let the model run by message passing, or pass a plan"
    )


def _anywhere(here: bool, session: Session) -> bool:
    flag = torch.tensor([int(here)], dtype=torch.int32, device=session.bound.device)
    with session.watch.waiting("all ranks, to agree on how the step is run"):
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def _say(session: Session, error: CaptureError | None) -> None:
    if session.bound.rank == 0:
        reason = error if error is not None else "another rank could not record the step"
        warnings.warn(
            f"this model runs by message passing from now on, not as a recorded pipeline: {reason}. Set "
            f"'pipeline_mode': 'messages' to say so beforehand, or 'recorded' to make this an error",
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
            with contextlib.suppress(Exception):
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
