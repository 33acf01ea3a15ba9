"""The plan that is made at the first step: the model is captured as the step calls it, planned, and recorded ahead."""

from collections.abc import Callable, Sequence

import torch

from shardwright.backends.torch import CAPABILITIES
from shardwright.backends.torch.capture.model import capture
from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.training.call import StepBody, StepCall
from shardwright.backends.torch.training.microbatches import RecordedAhead
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.errors import CaptureError, UnrecordableError
from shardwright.core.model.graph import Graph


def plan_first_step(
    split_model: SplitModel, plan: Callable[[Graph], StageMap], call: StepCall, *, must_record: bool
) -> tuple[StageMap, RecordedAhead] | UnrecordableError:
    """The stages of the model and a recording for them, or the reason why the step cannot be recorded. Every rank plans
    by itself, and then all compare their plans.

    Args:
        must_record: raise the error that hinders the recording, on the ranks that it hinders.
    """
    body, microbatch = call.body, call.microbatches[0]
    stage_map: StageMap | None = None
    ahead: RecordedAhead | None = None
    unrecordable: UnrecordableError | None = None
    failure: Exception | None = None
    try:
        stage_map = plan(captured(split_model, body, microbatch))
        ahead = RecordedAhead.of(split_model, stage_map, body, microbatch)
    except UnrecordableError as error:
        unrecordable, failure = error, error if must_record else None
    except Exception as error:
        failure = error
    said = _text_of(stage_map)
    notes = (int(unrecordable is not None), digest_of(said))
    agreement = split_model.agreement
    told = agreement.meet("planning at the first step", failure=failure, notes=notes).values()
    if any(could_not for could_not, *_ in told):
        # Ops that depend on values are captured on real ones, which may differ between ranks that are not in line yet.
        return unrecordable or UnrecordableError("another rank could not record the step")
    if len({planned for _, planned, *_ in told}) > 1:
        fix = "Make a plan file, and pass it to sw.init on every rank."
        agreement.meet("planning", [Claim.of("the stages that were planned", said, fix, "replica")])
        return UnrecordableError(
            "the replicas planned different stages: which modules the model calls depends on the batch, so that no "
            "plan fits all of them; let the model run by message passing, or pass a plan"
        )
    assert stage_map is not None
    assert ahead is not None
    return stage_map, ahead


def captured(split_model: SplitModel, body: StepBody, microbatch: Sequence[torch.Tensor]) -> Graph:
    """The graph of the model as the step calls it. Raises UnrecordableError where the step cannot be recorded, else
    CaptureError."""
    model = split_model.model
    try:
        with left_as_it_is(model, getattr(body, "python_roots", ())), split_model.parts.in_own_dtypes():
            sample = split_model.bodies.sample_of(body, microbatch)
            return capture(model, sample, require_loss=False, capabilities=CAPABILITIES)
    except UnrecordableError:
        raise
    except CaptureError as error:
        reason = _why_unrecordable(split_model, body, microbatch, error)
        if reason is None:
            raise
        raise reason from error


def _why_unrecordable(
    split_model: SplitModel, body: StepBody, microbatch: Sequence[torch.Tensor], hindered: CaptureError
) -> UnrecordableError | None:
    """The reason why no recorded pipeline can be made of a step that could not be captured. None where the step would
    fail by messages too: it asks for something that no step may do, or fails by itself."""
    try:
        called = split_model.bodies.calls_modules(body, microbatch)
    except UnrecordableError as error:
        return error
    except Exception:
        return None
    if not called:
        return None
    return UnrecordableError(f"no plan can be made for it, because {hindered}")


def _text_of(stage_map: StageMap | None) -> str:
    if stage_map is None:
        return "none"
    stages = sorted(stage_map.parameter_stages.items())
    layouts = "" if stage_map.plan is None else stage_map.plan.decision.layouts
    digest = digest_of(stage_map.calls, stages, stage_map.schedule.digest, sorted(stage_map.policies.items()), layouts)
    return f"{len(stage_map.calls)} stages ({digest & 0xFFFFFFFF:08x})"
