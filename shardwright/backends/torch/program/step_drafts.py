"""Steps under construction: their arguments as leaves of the program, and the values that they give."""

from collections.abc import Callable
from typing import Any

import torch

from shardwright.backends.torch.capture.held_tensors import is_plain, tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.program.draft_steps import Draft
from shardwright.backends.torch.program.program import (
    BufferRef,
    ConstantRef,
    Leaf,
    Literal,
    NumberRef,
    ObjectRef,
    ParameterRef,
    Template,
    Tree,
    ValueRef,
    make_template,
)
from shardwright.backends.torch.program.python_numbers import Tape
from shardwright.backends.torch.program.refusals import where
from shardwright.backends.torch.program.value_ledger import Ledger
from shardwright.core.errors import CaptureError


class StepDrafts:
    """The steps of one recording, as they are made.

    Args:
        require_known: raises for an object that no recording can have.

    Attributes:
        templates: of the objects among the arguments, by their number and the stage that gets a copy.
    """

    def __init__(self, ledger: Ledger, tape: Tape, device: torch.device, require_known: Callable[[Any], None]) -> None:
        self.ledger, self.tape, self.device, self._require_known = ledger, tape, device, require_known
        self.templates: dict[tuple[int, int], Template] = {}
        self._objects: dict[int, int] = {}
        self._keep: list[Any] = []

    def leaf(self, item: Any, stage: int | None) -> Leaf:
        """An argument of a step of this stage, as a leaf.

        Raises CaptureError for an object that holds tensors and cannot be copied for each stage and microbatch.
        """
        expression = self.tape.expression_of(item)
        if expression is not None:
            return NumberRef(self.tape.use(expression), expression)
        if isinstance(item, torch.Tensor):
            return self.ledger.use(item)
        if is_plain(item):
            return Literal(item)
        self._require_known(item)
        if id(item) not in self._objects:
            self._objects[id(item)] = len(self._objects)
            self._keep.append(item)
        index = self._objects[id(item)]
        key = (index, -1 if stage is None else stage)
        if key not in self.templates:
            try:
                self.templates[key] = make_template(item, self._name_or_none)
            except CaptureError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"an object of type {type(item).__name__} is passed to a unit at {where()}, and cannot be copied "
                    f"for each stage and microbatch: {error}"
                ) from error
        return ObjectRef(index)

    def _name_or_none(self, tensor: torch.Tensor) -> Any:
        expression = self.tape.expression_of(tensor)
        if expression is not None:  # inside an object, which keeps it
            self.tape.conditions.append((expression, tensor))
        if self.ledger.ref(tensor) is None:
            return None if self.ledger.is_made(tensor) else ConstantRef(tensor)
        return self.ledger.use(tensor)

    def make(
        self, path: str | None, occurrence: int, function: Callable[..., Any] | None, arguments: Any,
        stage: int | None, kept: bool = True,
    ) -> Draft:  # fmt: skip
        """A step under construction; a step that is not ``kept`` is no step of the program."""
        items, spec = pytree.tree_flatten(arguments)
        leaves = tuple(self.leaf(item, stage) for item in items)
        draft = Draft(len(self.ledger.drafts), path, occurrence, function, Tree(leaves, spec), set())
        held: list[Leaf | None] = [*leaves]
        for leaf, item in zip(leaves, items, strict=True):
            if path is None and isinstance(leaf, ObjectRef):  # such as a slice; units read of objects what they need
                held += [self._name_or_none(tensor) for tensor in tensors_in(item)]
        draft.reads |= {leaf.value for leaf in held if isinstance(leaf, ValueRef)}
        draft.parameters |= {leaf.name for leaf in held if isinstance(leaf, ParameterRef)}
        draft.buffers |= {leaf.name for leaf in held if isinstance(leaf, BufferRef)}
        draft.grad_enabled = torch.is_grad_enabled()
        kind = self.device.type
        draft.autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if kept:
            self.ledger.drafts.append(draft)
        return draft

    def outputs_of(self, draft: Draft, result: Any) -> list[int | None]:
        """The new values among the tensors that a step gives; None for a tensor that was there before."""
        found: list[int | None] = []
        for tensor in tensors_in(result):
            known = self.ledger.ref(tensor) is not None or not self.ledger.is_made(tensor)
            found.append(None if known else self.ledger.new_value(tensor, draft.index))
        return found
