"""The recordings by which a step is run: for each of its microbatches one that holds, the same on all pipeline
peers."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.program.program import ParameterRef
from shardwright.backends.torch.program.python_places import Holder
from shardwright.backends.torch.program.randomness import Moment
from shardwright.backends.torch.program.recording_cache import Recordings
from shardwright.backends.torch.program.recording_check import Varying
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.program.stages import Division
from shardwright.backends.torch.program.value_names import text_of
from shardwright.backends.torch.state.flat_shards import GRADIENTS
from shardwright.backends.torch.training.call import StepBody, StepCall, shapes_of
from shardwright.backends.torch.training.recording import Recording
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.errors import DisagreementError

DIGESTS = 1024
"""The number of recordings whose digests are kept."""


@dataclass(frozen=True, slots=True)
class RecordedAhead:
    """A recording of the first microbatch, made before the model is split."""

    shapes: Hashable
    division: Division
    varying: Varying

    @classmethod
    def of(
        cls, split_model: SplitModel, stage_map: StageMap, body: StepBody, inputs: Sequence[torch.Tensor]
    ) -> "RecordedAhead":
        """Record a body for the step that comes next. Raises as `Recording.divided`."""
        moment, varying = Moment(split_model.seed, split_model.steps_run, 0), Varying()
        division = Recording(split_model, stage_map, body, inputs, moment).divided(varying)
        return cls(shapes_of(inputs), division, varying)


@dataclass(frozen=True, slots=True)
class MicrobatchRecordings:
    """The recording of each microbatch of a step, and the Python values that it is given."""

    divisions: list[Division] = field(default_factory=list)
    numbers: list[tuple[Any, ...]] = field(default_factory=list)
    compared: list[list[Any]] = field(default_factory=list)
    """The numbers, among these, that ranks must have in common."""

    @property
    def compared_text(self) -> str:
        """The numbers of each microbatch, as ranks compare them; for a tensor its shape."""
        return str([[tuple(n.shape) if isinstance(n, torch.Tensor) else n for n in each] for each in self.compared])


class StepRecordings:
    """The recordings of steps: they are found, or made where there are none.

    Args:
        ahead: a recording that exists already.
    """

    def __init__(self, split_model: SplitModel, ahead: RecordedAhead | None) -> None:
        self._split_model, self._ahead = split_model, ahead
        self.cache = Recordings(type(split_model.model).__name__)
        self._digests: dict[int, tuple[Division, tuple[int, int]]] = {}
        """The digests of recordings, and of what they call, by id."""

    def of(
        self, call: StepCall, stage_map: StageMap, is_ready: Callable[[Sequence[Division]], bool]
    ) -> tuple[MicrobatchRecordings, bool]:
        """The recordings that all ranks run a step by; every rank calls this.

        Args:
            is_ready: whether this rank can run them at once.

        Returns:
            the recordings, and whether all ranks are ready.

        Raises:
            UnrecordableError: there is none, on this rank or on another.
            DisagreementError: ranks run different recordings, or only some of a replica record the step anew.
        """
        digest = self._split_model.schedule_digest
        if self._ahead is not None and self._split_model.tensor is None:
            self.cache.add((call.signature, self._ahead.shapes, digest), self._ahead.division, self._ahead.varying)
        self._ahead = None
        find = partial(self._find, call, stage_map)
        found, all_ready = self._agreed(partial(find, anew=False), is_ready, "looking for the recording")
        if found is None:
            found, all_ready = self._agreed(partial(find, anew=True), is_ready, "recording the step")
        assert found is not None
        return found, all_ready

    def _find(self, call: StepCall, stage_map: StageMap, *, anew: bool) -> MicrobatchRecordings | None:
        """The recording that holds for each microbatch; None where one lacks it, unless it is made ``anew``. Effects of
        the step on Python values are in place for the microbatches that follow, and undone at the end."""
        split_model, found = self._split_model, MicrobatchRecordings()
        left: list[tuple[Holder, Any, Any]] = []
        general: dict[Hashable, Division] = {}  # for all microbatches of a shape, whatever is in them
        try:
            for number, (microbatch, shapes) in enumerate(zip(call.microbatches, call.shapes, strict=True)):
                division = general.get(shapes)
                if division is None:
                    moment = Moment(split_model.seed, split_model.steps_run, call.shares.first + number)
                    key = (call.signature, shapes, split_model.schedule_digest)
                    division = self.cache.held(key, microbatch, moment)
                    if division is None and anew:
                        recording = Recording(split_model, stage_map, call.body, microbatch, moment)
                        division = self.cache.make(key, recording.divided)
                    if division is None:
                        return None
                    if not division.program.guards and not division.program.python.effects:
                        general[shapes] = division
                found.divisions.append(division)
                found.numbers.append(division.program.python.numbers())
                found.compared.append(division.program.python.compared(found.numbers[-1]))
                left += division.program.python.leave()
            return found
        finally:
            for holder, key_left, value in reversed(left):
                holder.put(key_left, value)

    def _agreed(
        self, find: Callable[[], MicrobatchRecordings | None], is_ready: Callable[[Sequence[Division]], bool], call: str
    ) -> tuple[MicrobatchRecordings | None, bool]:
        """The result of ``find``, unless one of the ranks finds nothing; and whether all ranks are ready to run it."""
        found: MicrobatchRecordings | None = None
        failure: Exception | None = None
        ready = False
        try:
            found = find()
            ready = found is not None and is_ready(found.divisions)
        except Exception as error:
            failure = error
        digest = 0 if found is None else digest_of(*map(self._digest, found.divisions))
        numbers = "[]" if found is None else found.compared_text
        claims = [
            Claim.of(
                "whether there is a recording of the step", "to be made anew" if found is None else "held",
                "A value that the step or the model reads has changed on some of the ranks only: change it on all.",
                "replica",
            ),
            Claim(
                "what the step does", digest, lambda: f"recording {digest & 0xFFFFFF:06x}",
                "The step body, and the code of the model, must do the same on all pipeline peers.", "pipeline",
            ),
            Claim(
                "numbers that the step reads of Python", 0 if found is None else digest_of(numbers),
                lambda: numbers, "Set attributes, globals and variables that a step reads alike.", "replica",
            ),
        ]  # fmt: skip
        calls = 0
        if found is not None and self._split_model.shard_level >= GRADIENTS:
            calls = digest_of(*map(self._calls, found.divisions))
        notes = (int(found is not None), int(ready), calls)
        told = self._split_model.agreement.meet(call, claims, failure=failure, notes=notes).values()
        all_have = all(has for has, *_ in told)
        if all_have and len({calls for _, _, calls, *_ in told}) > 1:
            raise DisagreementError(
                "the replicas call different modules in this step, or are given different numbers of microbatches; "
                "with shard=2 and 3 they sum gradients, and gather parameters, together, microbatch by microbatch. "
                "Leave out what calls other modules on each, as layers that are dropped at random, give all as many "
                "microbatches, or plan with shard=1"
            )
        return found if all_have else None, all(ready for _, ready, *_ in told)

    def _digest(self, division: Division) -> int:
        """The digest of a recording: the same on all ranks that recorded the same."""
        return self._digests_of(division)[0]

    def _calls(self, division: Division) -> int:
        """The digest of what a microbatch calls on all stages, in order, and of the parameters that are given."""
        return self._digests_of(division)[1]

    def _digests_of(self, division: Division) -> tuple[int, int]:
        known = self._digests.get(id(division))
        if known is None:
            if len(self._digests) >= DIGESTS:
                self._digests.clear()
            steps = [step for part in division.parts for step in part.steps]
            given = [[x.name for x in step.arguments.leaves if isinstance(x, ParameterRef)] for step in steps]
            calls = "; ".join(f"{step.path} {names}" for step, names in zip(steps, given, strict=True))
            both = digest_of(text_of(division.program)), digest_of(calls)
            known = self._digests[id(division)] = (division, both)
        return known[1]
