"""Recording of a step body for one microbatch, and its division into stages: whole units, or units on shards."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardwright.backends.torch.capture.model_call import growth_of
from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.program.program import Program, name_of
from shardwright.backends.torch.program.python_places import Holder
from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.backends.torch.program.randomness import Moment
from shardwright.backends.torch.program.recording_check import Varying, record_varying
from shardwright.backends.torch.program.refusals import computes_with_a_clock
from shardwright.backends.torch.program.stage_map import StageMap, recomputed
from shardwright.backends.torch.program.stages import Division, divide
from shardwright.backends.torch.program.step_recorder import StepRecorder
from shardwright.backends.torch.program.value_names import text_of
from shardwright.backends.torch.slices.engine import TokenSlices
from shardwright.backends.torch.tensor_parallel.engine import TensorParallel
from shardwright.backends.torch.tensor_parallel.expanded_step import MODEL_CALL
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError
from shardwright.backends.torch.training.call import StepBody
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.backends.torch.training.step_body import Unheard
from shardwright.core.errors import CaptureError, UnrecordableError


class Recording:
    """One recording of a step body, at one moment of training.

    Args:
        inputs: the tensors of the microbatch.
    """

    def __init__(
        self, split_model: SplitModel, stage_map: StageMap, body: StepBody, inputs: Sequence[torch.Tensor],
        moment: Moment,
    ) -> None:  # fmt: skip
        self._split_model, self._stage_map = split_model, stage_map
        self._body, self._inputs, self._moment = body, inputs, moment

    def divided(self, varying: Varying) -> Division:
        """Record the body and divide it into stages. The ranks of a tensor axis call this together.

        Args:
            varying: the Python values that changed between recordings of this kind of microbatch.

        Raises:
            UnrecordableError: no recording fits the plan.
            CaptureError: the body cannot be recorded.
        """
        split_model, stage_map = self._split_model, self._stage_map
        split_model.watchdog.doing("recording the step")
        tensor = split_model.tensor
        if split_model.slices is not None:
            return self._divided_in_slices(split_model.slices, varying)
        if tensor is not None and not tensor.by_calls_because:
            try:
                return self._divided_on_shards(tensor, varying)
            except NotReplayableError as reason:
                tensor.by_calls_because = str(reason)
        stage_of_call = stage_map.stage_of_call
        with split_model.parts.as_whole():
            program, recorder = self._recorded(stage_of_call, varying)
        self._require_plan_fits(program, recorder)
        if tensor is not None:
            with self._before_the_cut(tensor), split_model.parts.as_whole(), left_as_it_is(split_model.model):
                program = tensor.by_calls(program, stage_of_call, split_model.bound.device)
            tensor.cut()
            stage_of_call = tensor.stage_of_call
        return divide(program, stage_of_call, stage_map.parameter_stages, stage_map.schedule.stages)

    def _require_plan_fits(self, program: Program, recorder: StepRecorder) -> None:
        stage_map, name = self._stage_map, type(self._split_model.model).__name__
        written = next((step.function for step in program.steps if step.stage is not None), None)
        if written is not None and recomputed(stage_map.policies):
            raise UnrecordableError(
                f"{name} is recomputed in the backward pass, and {name_of(written)} is done for "
                f"each microbatch anew, so that it would be that of another one then: take recompute='none'"
            )
        missing = [call for held in stage_map.calls for call in held if call not in recorder.modules.seen]
        if missing and program.losses and not program.is_one_of_many:
            path, occurrence = missing[0]
            if program.guards:
                raise UnrecordableError(
                    f"{name} does not call {path!r} (call {occurrence}) for this batch: which "
                    f"modules it calls depends on the batch, so that no recording fits the plan; let the model run by "
                    f"message passing"
                )
            raise UnrecordableError(
                f"the plan has {len(missing)} module calls that the step does not make, {path!r} (call {occurrence}) "
                f"first: plan from a capture with the arguments that the step passes to the model, or let steps that "
                f"train different parts of the model run by message passing"
            )

    def _recorded(self, stage_of_call: Mapping[tuple[str, int], int], varying: Varying) -> tuple[Program, StepRecorder]:
        split_model = self._split_model
        tensor, ranks = split_model.tensor, split_model.bound.mesh.size

        def once(places: Sequence[tuple[Holder, Any]], readings: Sequence[Any] | None) -> tuple[Program, StepRecorder]:
            return split_model.bodies.record(
                stage_of_call, self._body, self._inputs, moment=self._moment, units_run_again=tensor is None,
                places=places, readings=readings,
            )  # fmt: skip

        found: tuple[Program, StepRecorder] | None = None
        failure: Exception | None = None
        try:
            found = record_varying(once, varying)
            if ranks > 1 and found[0].rests_on_clocks:
                hindered = computes_with_a_clock(split_model.model, found[0].python.clocks, ranks=ranks)
                raise hindered if tensor is None else CaptureError(str(hindered))
        except Exception as error:
            failure = error
        if tensor is not None:  # what follows takes collectives of the tensor axis
            digest = 0 if found is None else digest_of(text_of(found[0]))
            fix = "The step body, and the code of the model, must do the same on all peers."
            said = f"recording {digest & 0xFFFFFF:06x}"
            claim = Claim("what the step does", digest, lambda: said, fix, "replica")
            split_model.agreement.meet("recording the step", [claim], failure=failure, in_replica=True)
        elif failure is not None:
            raise failure
        assert found is not None
        return found

    def _divided_on_shards(self, tensor: TensorParallel, varying: Varying) -> Division:
        """The division, as by `divided`, with the model's units in place of the model. Raises NotReplayableError."""
        split_model, stage_map = self._split_model, self._stage_map
        device = split_model.bound.device
        with split_model.parts.as_whole():
            program, _ = self._recorded({MODEL_CALL: 0}, varying)
            roots = getattr(self._body, "python_roots", ())
            with self._before_the_cut(tensor), left_as_it_is(split_model.model, roots):
                with split_model.bodies.heard_by(Unheard()):
                    growth = growth_of(split_model.model, self._body, self._inputs, device)
                expanded = tensor.expand(program, self._inputs, device, growth)
        tensor.cut()
        return divide(expanded, tensor.stage_of_call, stage_map.parameter_stages, stage_map.schedule.stages)

    def _divided_in_slices(self, slices: TokenSlices, varying: Varying) -> Division:
        """The division, as by `divided`, into slices of each stage. Raises CaptureError where the model has none."""
        split_model, stage_map, tensor = self._split_model, self._stage_map, self._split_model.tensor
        device = split_model.bound.device
        with split_model.parts.as_whole():
            program, _ = self._recorded({MODEL_CALL: 0}, varying)
            roots = getattr(self._body, "python_roots", ())
            agreed = nullcontext() if tensor is None else self._before_the_cut(tensor)
            with agreed, left_as_it_is(split_model.model, roots), split_model.bodies.heard_by(Unheard()):
                growth = growth_of(split_model.model, self._body, self._inputs, device)
                expanded = slices.expand(program, self._inputs, device, growth)
        if tensor is not None:
            tensor.cut()
        return divide(expanded, slices.stage_of_call, stage_map.parameter_stages, stage_map.steps_schedule.stages)

    @contextmanager
    def _before_the_cut(self, tensor: TensorParallel) -> Iterator[None]:
        """A context in which the units' runs on shards are read. The cut that follows is a collective of the tensor
        axis: a failure on one rank alone, or another result there, is told on all of them first."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        unreplayable = isinstance(failure, NotReplayableError)
        because = str(failure) if unreplayable else tensor.by_calls_because
        how = tensor.how(by_calls=bool(because))
        said = f"{how}, as {because}" if because else how
        fix = "Hooks, and what else is done to the model between steps, must be the same on all peers."
        claim = Claim("how the model runs on the tensor axis", digest_of(how), lambda: said, fix, "replica")
        call = "laying the step over the tensor axis"
        refused = None if unreplayable else failure
        self._split_model.agreement.meet(call, [claim], failure=refused, in_replica=True)
        if failure is not None:
            raise failure
