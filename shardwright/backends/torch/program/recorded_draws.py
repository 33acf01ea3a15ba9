"""Random numbers that a model draws between its units, as a recording has them.

A draw by torch is a step that is run again, with the same numbers, wherever its result is needed. Where such a number
decides what the model does next, as that of a layer that is dropped (arXiv 1909.11556), the decision is that of the
moment for which the recording is made, and a guard of it: other moments have recordings of their own. Functions that
draw arrays from NumPy's generator are steps too (`host_draws`).
"""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.capture.host_draws import CONSTRUCTORS, FROM_NUMPY, DrawnArray, HostFunction, of_array
from shardwright.backends.torch.compat import DisableTorchFunction, pytree, without_dispatch_modes
from shardwright.backends.torch.program.draft_steps import CallStack, Draft
from shardwright.backends.torch.program.program import Context, Guard
from shardwright.backends.torch.program.python_numbers import Tape
from shardwright.backends.torch.program.randomness import Moment, kept_generators
from shardwright.backends.torch.program.refusals import draws_on_the_host, reads_what_it_computed
from shardwright.backends.torch.program.step_drafts import StepDrafts
from shardwright.backends.torch.program.value_guards import decide, what_was_read
from shardwright.backends.torch.program.value_ledger import Ledger


class Recording(Protocol):
    """The recorder of a step, as far as draws concern it."""

    model: nn.Module
    device: torch.device
    real: bool
    ledger: Ledger
    tape: Tape
    stack: CallStack
    drafts: StepDrafts
    guards: list[Guard]


class RecordedDraws:
    """The draws between the units of one recording.

    Args:
        moment: the moment by which numbers are drawn where they decide what the model does.
        inputs: the tensors of the microbatch, with their values.
    """

    def __init__(self, recording: Recording, moment: Moment, inputs: list[torch.Tensor]) -> None:
        self.recording, self.moment, self.inputs = recording, moment, inputs
        self.arrays: dict[int, torch.Tensor] = {}
        """The tensor that stands for an array that was drawn, by the array's id."""
        self._order: dict[Context, list[int]] = {}
        self._keep: list[Any] = []

    def note_order(self, draft: Draft) -> None:
        """Note that a function draws: the draws of other functions in the same stretch come first."""
        earlier = self._order.setdefault(next(iter(draft.random)), [])
        draft.drawn_before = tuple(earlier)
        earlier.append(draft.index)

    def decides(self, read: Draft) -> bool:
        """Whether the value that a function reads follows from random numbers, and at most from the batch beside."""
        return self.recording.ledger.follows_from_draws(read)

    def decide(self, read: Draft) -> Any:
        """The result, at this moment, of a function that reads such a value. It becomes a guard.

        Raises CaptureError where it is the step's own body that reads.
        """
        recording = self.recording
        if not recording.stack.frames:
            raise reads_what_it_computed(recording.model, None, read.function)
        with without_dispatch_modes():
            result = decide(recording.ledger.values, recording.ledger.drafts, self.inputs, self.moment, read)
        self._guard(read, result)
        return result

    def _guard(self, read: Draft, result: Any) -> None:
        assert read.function is not None
        found = what_was_read(result)
        self.recording.guards.append(Guard(read.function, read.arguments, frozenset(read.reads), found, True))

    def host_function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a function that may draw from Python's or NumPy's generator. It is one step where its arguments are
        only numbers and values of the batch; elsewhere it is recorded like other code.

        Raises UnrecordableError when it returns anything but arrays.
        """
        recording = self.recording
        if recording.stack.unit_depth or not recording.stack.frames:
            return function(*args, **kwargs)
        args, kwargs = recording.tape.plain((args, kwargs), fix=True)
        with DisableTorchFunction(), without_dispatch_modes():
            draft = recording.drafts.make(None, 0, HostFunction(function), (args, kwargs), None, kept=False)
            recording.stack.note_draw(draft)
            draft.draws_on_host = True
            without_values = bool(tensors_in((args, kwargs))) and not recording.real
            if not without_values and recording.ledger.follows_from_draws(draft):
                return self._host_step(draft, function, args, kwargs)
        return function(*args, **kwargs)

    def _host_step(self, draft: Draft, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        recording = self.recording
        self.note_order(draft)
        recording.ledger.drafts.append(draft)
        recording.stack.unit_depth += 1
        try:
            with kept_generators(True, recording.device):
                self.moment.draw_like(recording.ledger.values, recording.ledger.drafts, draft, recording.device)
                result = function(*args, **kwargs)
        finally:
            recording.stack.unit_depth -= 1
        leaves, spec = pytree.tree_flatten(result)
        if not leaves or not all(isinstance(leaf, np.ndarray) for leaf in leaves):
            raise draws_on_the_host(recording.model, recording.stack.path)
        leaves = [np.ascontiguousarray(leaf) for leaf in leaves]
        arrays, made = [leaf.view(DrawnArray) for leaf in leaves], [FROM_NUMPY(leaf) for leaf in leaves]
        for array, tensor in zip(arrays, made, strict=True):
            recording.ledger.note_made(tensor)
            self.arrays[id(array)] = tensor
        self._keep += arrays
        draft.outputs = recording.drafts.outputs_of(draft, made)
        for tensor in made:
            read = recording.drafts.make(None, 0, _shape_of, ((tensor,), {}), None, kept=False)
            self._guard(read, _shape_of(tensor))
        return pytree.tree_unflatten(arrays, spec)

    def on_arrays(self, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
        """A call that makes a tensor of an array from `host_function`, as a function of the tensor that stands for the
        array."""
        if not self.arrays or not args or function not in CONSTRUCTORS or id(args[0]) not in self.arrays:
            return function, args, kwargs
        return of_array, (self.arrays[id(args[0])], *args[1:]), kwargs

    def require_known(self, item: Any) -> None:
        """Raise UnrecordableError for an array that is used and may have been computed from one that was drawn."""
        if isinstance(item, np.ndarray) and self.arrays:
            raise draws_on_the_host(self.recording.model, self.recording.stack.path)


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
