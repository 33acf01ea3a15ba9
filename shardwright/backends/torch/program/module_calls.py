"""Calls of modules while a step body is recorded: units become steps; other modules are looked into."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.fake_state import VALUE_DEPENDENT
from shardwright.backends.torch.capture.held_tensors import is_plain, tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.program.draft_steps import CallStack, Frame
from shardwright.backends.torch.program.program import (
    ObjectRef,
    ParameterRef,
    SetAttribute,
    ValueRef,
)
from shardwright.backends.torch.program.python_reads import Reads
from shardwright.backends.torch.program.refusals import sets_an_attribute, wraps_units
from shardwright.backends.torch.program.step_drafts import StepDrafts


class ModuleCalls:
    """The module calls of one recording.

    Args:
        stage_of_call: the stage of every module call that is to be kept whole: (path, occurrence) → stage.
        units_run_again: whether units are replayed by calling their modules, which read Python values anew.
        function_call: called with a function, its arguments and its keyword arguments; gives its result.
        note_host_draws: called where modules begin and end.

    Attributes:
        counts: the number of calls of each module so far.
        children: the modules that each module calls.
        seen: the units that were called.
        failed_path: the innermost module call that an error left first; None when none was under way.
    """

    def __init__(
        self, model: nn.Module, stage_of_call: Mapping[tuple[str, int], int], stack: CallStack, drafts: StepDrafts,
        reads: Reads, *, units_run_again: bool, function_call: Callable[[Callable[..., Any], Any, Any], Any],
        note_host_draws: Callable[[], None],
    ) -> None:  # fmt: skip
        self.stack, self.drafts = stack, drafts
        self._model, self._stage_of_call, self._reads = model, stage_of_call, reads
        self._units_run_again = units_run_again
        self._function_call, self._note_host_draws = function_call, note_host_draws
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._units_called = 0
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.children: dict[str, dict[str, None]] = {}
        self.seen: set[tuple[str, int]] = set()
        self.failed_path: str | None = None

    def module_call(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of a module: a step where the module is a unit of the plan."""
        path = self._paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        self._note_host_draws()
        occurrence = self.counts[path]
        self.counts[path] += 1
        if self.stack.frames:
            self.children.setdefault(self.stack.frames[-1].path, {})[path] = None
        self.stack.frames.append(Frame(path, occurrence))
        try:
            stage = self._stage_of_call.get((path, occurrence))
            self._units_called += stage is not None
            if self.stack.unit_depth:
                stage = None
            if stage is None:
                result = original(module, *args, **kwargs)
            else:
                result = self._unit(original, module, path, occurrence, stage, args, kwargs)
            self._note_host_draws()
            return result
        except VALUE_DEPENDENT:
            if self.failed_path is None:
                self.failed_path = path
            raise
        finally:
            self.stack.frames.pop()
            if self.stack.frames:
                self.stack.frames[-1].segment += 1

    def _unit(
        self, original: Callable[..., Any], module: nn.Module, path: str, occurrence: int, stage: int, args: Any,
        kwargs: Any,
    ) -> Any:  # fmt: skip
        self.seen.add((path, occurrence))
        if not self._units_run_again:
            # What the module does with a number is seen below torch's functions, as a constant.
            args, kwargs = self.drafts.tape.plain((args, kwargs), fix=True)
        draft = self.drafts.make(path, occurrence, None, (args, kwargs), stage)
        draft.counts = dict(self.counts)
        draft.counts[path] -= 1
        objects = {
            leaf.index: item
            for leaf, item in zip(draft.arguments.leaves, pytree.tree_leaves((args, kwargs)), strict=True)
            if isinstance(leaf, ObjectRef)
        }
        args, kwargs = self.drafts.tape.plain((args, kwargs))
        given = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in given]
        with self.stack.inside(draft):
            with self._reads.unit() if self._units_run_again else nullcontext():
                result = original(module, *args, **kwargs)
                if self._units_run_again:
                    result = self._outputs_of_their_own(result)
            self._note_host_draws()
        for parameter in module.parameters():
            ref = self.drafts.ledger.ref(parameter)
            if isinstance(ref, ParameterRef):
                draft.parameters.add(ref.name)
        self.drafts.ledger.note_writes(draft, given, versions)
        draft.outputs = self.drafts.outputs_of(draft, result)
        draft.object_outputs = [(index, tuple(self.drafts.outputs_of(draft, item))) for index, item in objects.items()]
        return result

    def _outputs_of_their_own(self, result: Any) -> Any:
        """A unit's result with another tensor in place of each that it only hands on, as dropout of nothing does: when
        it runs again it may not."""

        def own(tensor: torch.Tensor) -> torch.Tensor:
            passed = isinstance(self.drafts.ledger.ref(tensor), ValueRef) and tensor.is_floating_point()
            return tensor.view_as(tensor) if passed else tensor

        return pytree.tree_map_only(torch.Tensor, own, result)

    def assignment(self, module: nn.Module, name: str, value: Any) -> None:
        """Note that an attribute of a module is about to be set. Between units, on a module that replay runs as part of
        one, the assignment is a step. Raises CaptureError where it cannot be: the value is no tensor of the step and no
        plain value, the module's unit is on several stages, or the step's own body sets it."""
        path = self._paths.get(id(module))
        if self.stack.unit_depth or path is None:
            return
        stages = {stage for (unit, _), stage in self._stage_of_call.items() if _lies_in(path, unit)}
        old, constant = getattr(module, name, None), _is_constant(value)
        if not stages or (old is value and not constant) or (not self.stack.frames and constant and old == value):
            return
        known = isinstance(value, torch.Tensor) and isinstance(self.drafts.ledger.ref(value), ValueRef)
        if len(stages) > 1 or not self.stack.frames or not (known or constant):
            raise sets_an_attribute(self._model, self.stack.path, path, name)
        self._reads.set_on_replay(module, name)
        draft = self.drafts.make(None, 0, SetAttribute(module, path, name), ((value,), {}), None)
        (draft.stage,) = stages

    def autograd_function(self, apply: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of a custom ``torch.autograd.Function``: one step, with the backward that it defines.

        Raises UnrecordableError where it calls a unit.
        """
        if self.stack.unit_depth:
            return apply(*args, **kwargs)
        frame, called = self.stack.path, self._units_called
        try:
            return self._function_call(apply, args, kwargs)
        finally:
            if self._units_called != called:
                raise wraps_units(self._model, frame, apply)


def _is_constant(value: Any) -> bool:
    return is_plain(value) and not isinstance(value, nn.Module)


def _lies_in(path: str, unit: str) -> bool:
    return not unit or path == unit or path.startswith(unit + ".")
