"""The relation of a recording's tensors to the values of its program, through writes in place too."""

from collections import defaultdict
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.backends.torch.capture.remembered_results import memory_of
from shardwright.backends.torch.compat import FakeTensor
from shardwright.backends.torch.program.draft_steps import Draft
from shardwright.backends.torch.program.program import (
    BufferRef,
    ConstantRef,
    Leaf,
    ObjectRef,
    ParameterRef,
    Value,
    ValueRef,
)
from shardwright.backends.torch.program.refusals import said, where
from shardwright.core.errors import CaptureError


class Ledger:
    """The tensors of one recording.

    Attributes:
        values: all values so far.
        drafts: all steps so far, which get the reads and renewals that later uses of a tensor turn out to need.
    """

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.drafts: list[Draft] = []
        self._known: dict[int, Leaf] = {}
        self._keep: list[Any] = []
        self._made: dict[int, StorageWeakRef] = {}
        """The memory of this run, by address. An address is not given again while there is a weak reference to its
        storage."""
        self._of_batch: set[int] = set()
        self._drawn: set[int] = set()
        self._mutations: defaultdict[int, list[int]] = defaultdict(list)
        self._renewed: dict[tuple[int, int], int] = {}
        self._held: dict[int, ParameterRef | BufferRef] = {}
        """The parameters and buffers, by their memory."""

    def know(self, tensor: torch.Tensor, ref: Leaf) -> None:
        self._known[id(tensor)] = ref
        self._keep.append(tensor)
        if isinstance(ref, ParameterRef | BufferRef):
            self._held[memory_of(tensor)] = ref
        if not isinstance(tensor, FakeTensor):
            self.note_made(tensor)

    def ref(self, tensor: torch.Tensor) -> Leaf | None:
        """The leaf that a tensor is; None for a tensor that is not known."""
        return self._known.get(id(tensor))

    def note_made(self, tensor: torch.Tensor) -> None:
        """Note that this tensor's memory belongs to the run: a tensor in it is no constant from outside."""
        address = memory_of(tensor)
        if address not in self._made:
            self._made[address] = StorageWeakRef(tensor.untyped_storage())

    def is_made(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in memory of this run."""
        return isinstance(tensor, FakeTensor) or memory_of(tensor) in self._made

    def new_value(self, tensor: torch.Tensor, step: int | None, position: int | None = None) -> int:
        index = len(self.values)
        memory = memory_of(tensor)
        strides = tensor.stride() if tensor.layout is torch.strided else ()
        self.values.append(
            Value(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, step, position, memory, strides)
        )
        self.know(tensor, ValueRef(index))
        self._note_origin(index, None if step is None else self.drafts[step])
        return index

    def depends_on_batch_alone(self, draft: Draft) -> bool:
        """Whether every rank can compute the outputs of a step: from the batch and from constants."""
        return not draft.random and draft.reads <= self._of_batch and _is_of_values(draft)

    def follows_from_draws(self, draft: Draft) -> bool:
        """Whether every rank can compute the outputs of a step once it has drawn the same random numbers."""
        drawn = bool(draft.random) or not draft.reads <= self._of_batch
        return drawn and draft.reads <= self._of_batch | self._drawn and _is_of_values(draft)

    def is_drawn(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor follows from random numbers and, at most, from the batch beside."""
        ref = self._known.get(id(tensor))
        return isinstance(ref, ValueRef) and self.use_value(tensor) in self._drawn

    def _note_origin(self, value: int, draft: Draft | None) -> None:
        if draft is None or self.depends_on_batch_alone(draft):
            self._of_batch.add(value)
        elif self.follows_from_draws(draft):
            self._drawn.add(value)

    def use_value(self, tensor: torch.Tensor) -> int:
        """The value that a known tensor holds now, after the writes to its memory so far."""
        ref = self._known[id(tensor)]
        if not isinstance(ref, ValueRef):
            raise CaptureError(f"{said(tensor)} is not a value of the step")
        return self._version(ref.value, len(self._mutations[self.values[ref.value].memory]))

    def use(self, tensor: torch.Tensor) -> Leaf:
        """The leaf of a tensor that is an argument. Raises CaptureError for a tensor that replay could not give."""
        ref = self._known.get(id(tensor))
        if isinstance(ref, ValueRef):
            return ValueRef(self.use_value(tensor))
        if ref is not None:
            return ref
        if self.is_made(tensor):
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} reached {where()} in a way that cannot be recorded (it was "
                f"made by no torch function that this step called): compute it inside a module, or pass it in the batch"
            )
        if tensor.requires_grad and torch.is_grad_enabled():  # such as a teacher's, read under no_grad
            raise CaptureError(
                f"a tensor of shape {tuple(tensor.shape)} that requires gradients is used at {where()}, and is no "
                f"parameter of the model: register it in the model, so that its gradient is reduced"
            )
        self._keep.append(tensor)
        return ConstantRef(tensor)

    def note_writes(self, draft: Draft, given: list[torch.Tensor], versions: list[int]) -> None:
        """Note the writes of a step to the tensors that it was given, which had these versions before."""
        memories = set()
        for tensor, version in zip(given, versions, strict=True):
            if tensor._version == version:
                continue
            ref = self._known.get(id(tensor))
            held = self._held.get(memory_of(tensor))
            if isinstance(held, ParameterRef):
                raise CaptureError(
                    f"parameter {held.name} is changed in place inside the step ({where()}): do it outside"
                )
            if isinstance(ref, ValueRef):
                # Read as it was before this write: the step itself is the next writer.
                draft.reads.add(self.use_value(tensor))
                draft.written.add(self.use_value(tensor))
                memories.add(self.values[ref.value].memory)
        draft.memories |= memories
        for memory in memories:
            self._mutations[memory].append(draft.index)

    def lost_write(self, given: list[torch.Tensor], versions: list[int], made: list[torch.Tensor]) -> str | None:
        """The buffer that a function wrote to, where replay would lose that: it makes nothing else that a later step
        needs, or it sees the buffer through a view."""
        own = {memory_of(tensor) for tensor in given}
        makes = any(memory_of(tensor) not in own for tensor in made)
        for tensor, version in zip(given, versions, strict=True):
            held = self._held.get(memory_of(tensor))
            is_itself = isinstance(self._known.get(id(tensor)), BufferRef)
            if tensor._version != version and isinstance(held, BufferRef) and not (is_itself and makes):
                return held.name
        return None

    def _version(self, value: int, writes: int) -> int:
        """The value ``value`` after the first ``writes`` writes to its memory."""
        made = self.values[value].step
        for number in reversed(range(writes)):
            writer = self._mutations[self.values[value].memory][number]
            if made is not None and writer <= made:
                break
            key = (value, writer)
            if key not in self._renewed:
                old = self._version(value, number)
                base, draft = self.values[value], self.drafts[writer]
                self._renewed[key] = len(self.values)
                requires_grad = base.requires_grad or draft.function is torch.Tensor.requires_grad_
                if draft.grad_enabled:
                    written = any(self.values[v].requires_grad for v in draft.reads)
                    requires_grad = requires_grad or written or bool(draft.parameters)
                self.values.append(
                    Value(base.shape, base.dtype, requires_grad, writer, None, base.memory, base.strides)
                )
                draft.reads.add(old)
                draft.renewals.append((self._renewed[key], old))
                self._note_origin(self._renewed[key], draft)
            return self._renewed[key]
        return value


def _is_of_values(draft: Draft) -> bool:
    """Whether a step is a function of values of the program and of constants alone."""
    held = any(isinstance(leaf, ObjectRef) for leaf in draft.arguments.leaves)
    return draft.path is None and not (draft.parameters or draft.buffers or held)
