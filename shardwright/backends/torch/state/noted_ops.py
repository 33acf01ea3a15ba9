"""Ops that made or wrote to memory, noted as they ran, and run again where what they made is wanted once more."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardwright.backends.torch.compat import DisableTorchFunction, pytree, storage_of, without_dispatch_modes

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
"""(args, kwargs)."""
_OVERWRITE = frozenset({
    "fill_", "zero_", "normal_", "uniform_", "log_normal_", "exponential_", "cauchy_", "geometric_", "random_",
})  # fmt: skip
"""Ops in place that read nothing of the tensor that they write to."""


@dataclass(eq=False, slots=True)
class Memory:
    """The memory of some tensors.

    Attributes:
        base: what it held before the first of ``history``; None where the first op made it.
        history: the ops that made it or wrote to it, the first one first.
    """

    reference: StorageWeakRef
    size_bytes: int
    device: torch.device
    base: torch.UntypedStorage | None
    history: "list[NotedOp]" = field(default_factory=list)

    @classmethod
    def of(cls, storage: torch.UntypedStorage, base: torch.UntypedStorage | None) -> "Memory":
        return cls(StorageWeakRef(storage), storage.nbytes(), storage.device, base)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, while somebody holds it."""
        return storage_of(self.reference)

    def since_overwritten(self, end: int) -> "list[NotedOp]":
        """The ops before number ``end`` from the last one on that wrote all of it without reading it."""
        before = [op for op in self.history if op.number < end]
        for place in reversed(range(len(before))):
            if before[place].overwrites is self:
                return before[place:]
        return before

    def needs_base(self, end: int) -> bool:
        """Whether its contents before op ``end`` follow from what it held at first."""
        ops = self.since_overwritten(end)
        return self.base is not None and not (ops and ops[0].overwrites is self)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor in a memory."""

    memory: Memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor, memory: Memory) -> "View":
        return cls(memory, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor on another storage."""
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        return made.set_(storage, self.offset, self.shape, self.strides)

    @property
    def is_all(self) -> bool:
        """Whether the tensor has every entry of its memory."""
        entries = 1
        for size in self.shape:
            entries *= size
        return entries * self.dtype.itemsize == self.memory.size_bytes


@dataclass(eq=False, slots=True)
class NotedOp:
    """One op that ran.

    Attributes:
        arguments: (args, kwargs) with a `View` in place of every tensor.
        writes: the memories that it wrote to.
        overwrites: the one of them of which it wrote everything and read nothing.
        draws: the generator that it drew from, and the state of that before.
        made: the memory of each tensor of its result that is new, by its place among the leaves.
    """

    number: int
    function: Any
    arguments: Arguments
    writes: tuple[Memory, ...] = ()
    overwrites: Memory | None = None
    draws: tuple[torch.Generator, torch.Tensor] | None = None
    made: dict[int, Memory] = field(default_factory=dict)

    @property
    def reads(self) -> Iterator[Memory]:
        """The memories whose contents it needs."""
        for leaf in pytree.tree_leaves(self.arguments, is_leaf=_is_view):
            if isinstance(leaf, View) and leaf.memory is not self.overwrites:
                yield leaf.memory


def _is_view(item: Any) -> bool:
    return isinstance(item, View)


def viewed(arguments: Any, memory_of: Any) -> Any:
    """Arguments with views in place of tensors."""
    return pytree.tree_map_only(torch.Tensor, lambda t: View.of(t, memory_of(t)), arguments)


def with_dtype(function: Any, arguments: Arguments, result: Any) -> Arguments:
    """Arguments with the dtype of the result, where an op would take torch's default dtype of the moment."""
    args, kwargs = arguments
    if isinstance(result, torch.Tensor) and kwargs.get("dtype") is None:
        known = [argument for argument in function._schema.arguments if argument.name == "dtype"]
        if known and known[0].kwarg_only:
            return args, {**kwargs, "dtype": result.dtype}
    return arguments


def written_views(function: Any, arguments: Arguments) -> list[View]:
    """The arguments, as views, that an op writes to."""
    args, kwargs = arguments
    found: list[View] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[place] if place < len(args) else kwargs.get(argument.name)
        found += [leaf for leaf in pytree.tree_leaves(given, is_leaf=_is_view) if isinstance(leaf, View)]
    return found


def overwritten(function: Any, writes: Sequence[View], arguments: Arguments) -> Memory | None:
    """The memory of which an op writes everything and reads nothing."""
    if len(writes) != 1 or not writes[0].is_all:
        return None
    name, memory = function._schema.name.split("::")[-1], writes[0].memory
    if name in _OVERWRITE:
        return memory
    if name == "copy_" and isinstance(arguments[0][1], View) and arguments[0][1].memory is not memory:
        return memory
    return None


def generator_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator | None:
    """The generator that an op draws from; None for an op that draws nothing."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return None
    given = [leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Generator)]
    if given:
        return given[0]
    tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        found: torch.Generator = torch.cuda.default_generators[index]
        return found
    return torch.default_generator


def ops_behind(memory: Memory, end: int) -> list[NotedOp]:
    """The ops that the contents of a memory before op number ``end`` follow from, in order."""
    found: dict[int, NotedOp] = {}
    pending = [(memory, end)]
    while pending:
        wanted, before = pending.pop()
        for op in wanted.since_overwritten(before):
            if op.number in found:
                continue
            found[op.number] = op
            pending += [(read, op.number) for read in op.reads]
            pending += [(other, op.number) for other in op.writes if other is not op.overwrites and other is not wanted]
    return [found[number] for number in sorted(found)]


def run_again(memory: Memory, end: int) -> torch.UntypedStorage:
    """The contents of a memory before op number ``end``, made anew. Generators are left as they are."""
    contents: dict[Memory, torch.UntypedStorage] = {}
    ops = ops_behind(memory, end)
    changed = {written for op in ops for written in op.writes}

    def content_of(held: Memory) -> torch.UntypedStorage:
        if held not in contents:
            if held.base is None:
                contents[held] = torch.UntypedStorage(held.size_bytes, device=held.device)
            else:
                contents[held] = held.base.clone() if held in changed else held.base
        return contents[held]

    with torch.no_grad(), without_dispatch_modes(), DisableTorchFunction():
        for op in ops:
            args, kwargs = pytree.tree_map_only(
                View, lambda v: v.on(content_of(v.memory)), op.arguments, is_leaf=_is_view
            )
            if op.draws is None:
                result = op.function(*args, **kwargs)
            else:
                generator, state = op.draws
                now = generator.get_state()
                generator.set_state(state)
                try:
                    result = op.function(*args, **kwargs)
                finally:
                    generator.set_state(now)
            leaves = pytree.tree_leaves(result)
            for place, made in op.made.items():
                contents[made] = leaves[place].untyped_storage()
        return content_of(memory)
