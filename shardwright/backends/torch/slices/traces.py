"""A model traced at the length of its sequence and at those of its slices, and the values that go between its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwright.backends.torch.program.program import Context
from shardwright.backends.torch.tensor_parallel.trace import Traced
from shardwright.core.errors import CaptureError
from shardwright.core.layout.placements import Placement
from shardwright.core.slices.sequence_ops import SequenceOps

Kind = Literal["before", "slice", "behind"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A value on its way between parts: a graph tensor whole, or of one slice, or up to the end of a slice."""

    tensor: int
    slice: int | None = None
    carried: int | None = None
    """The op that needs the tensor of all slices up to this one."""
    unit: int | None = None
    """The unit that makes the tensor, for its parts alone; None: as other units find it. On a tensor axis these may lie
    in two ways."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a unit, ready to run: ``function(*entering, *held)`` gives the tensors in ``leaves``."""

    name: str
    unit: int
    slice: int
    """The slice with which it runs: the first for what comes before all, the last for what comes behind."""
    kind: Kind
    function: Callable[..., tuple[Any, ...]]
    entering: tuple[Piece, ...]
    held: tuple[int, ...]
    leaves: tuple[tuple[Piece, Placement], ...]
    """Each with its placement on the tensor axis."""
    draws: tuple[Context, ...]


@dataclass(frozen=True, slots=True)
class Traces:
    """A model at the length of its sequence, and at those of its slices.

    Attributes:
        lengths: of the slices.
        whole: the trace of the whole sequence.
        sliced: the trace of each length.
    """

    lengths: tuple[int, ...]
    whole: Traced
    sliced: Mapping[int, Traced]
    ops: SequenceOps
    batch: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def of_slice(self, number: int) -> Traced:
        """The trace of a slice, with the keys of all slices up to it among its scores."""
        traced, end = self.sliced[self.lengths[number]], self.start(number + 1)
        if not self.ops.keys:
            return traced
        tensors = list(traced.graph.tensors)
        for tensor, dim in self.ops.keys.items():
            fixed = list(tensors[tensor].fixed)
            fixed[dim] = end + self.ops.more_keys.get(tensor, 0)
            tensors[tensor] = replace(tensors[tensor], fixed=tuple(fixed))
        return replace(traced, graph=replace(traced.graph, tensors=tuple(tensors)))

    def rows(self, tensor: int, dim: int) -> int:
        """The rows of each token, where a dim is of samples and their tokens; else 0."""
        return self.whole.graph.tensors[tensor].per_sample[dim] // self.tokens

    def start(self, number: int) -> int:
        """The tokens before a slice."""
        return sum(self.lengths[:number])


def alike(whole: Traced, other: Traced, length: int) -> Traced:
    """The trace at another length, whose ops are those of the whole sequence one by one.

    Raises CaptureError where they are not.
    """
    name, one, two = whole.graph.model_name, whole.graph, other.graph
    for a, b in zip(one.ops, two.ops, strict=False):
        if (a.name, a.inputs, a.outputs) != (b.name, b.inputs, b.outputs):
            where = one.calls[a.call].path or name
            raise CaptureError(
                f"{name} does otherwise at {length} tokens than at the length of its sequence: {b.name} in place of "
                f"{a.name} in {where}. Slices run the same ops at every length: take other lengths, leave out a cache "
                f"of keys and values (use_cache=False), or leave out slices"
            )
    if len(one.ops) != len(two.ops) or len(one.tensors) != len(two.tensors):
        raise CaptureError(
            f"{name} runs {len(two.ops)} ops at {length} tokens and {len(one.ops)} at the length of its sequence: "
            f"slices run the same ops at every length; take other lengths, or leave out slices"
        )
    return replace(other, constants=whole.constants)


SIZED = frozenset({"view", "copy", "create"})
"""The kinds of ops whose arguments are sizes of what they are given."""


def require_same_numbers(whole: Traced, other: Traced, ops: SequenceOps, length: int) -> None:
    """Raise CaptureError where an op of slices computes with a number that follows from the length, as a product with
    one over it, or repeats something as often: in slices it would be another number."""
    for op, need in zip(whole.graph.ops, ops.needs, strict=True):
        for tensor in op.outputs if need in ("local", "causal") else ():
            along = {ops.dims.get(tensor), ops.keys.get(tensor)}
            one, two = (traced.graph.tensors[tensor] for traced in (whole, other))
            sizes = [list(zip(each.fixed, each.per_sample, strict=True)) for each in (one, two)]
            if tensor in ops.dims and any(
                a != b for d, (a, b) in enumerate(zip(*sizes, strict=True)) if d not in along
            ):
                where = whole.graph.calls[op.call].path or whole.graph.model_name
                raise CaptureError(
                    f"{op.name} in {where} gives a tensor with another dim as long as the sequence, or longer with it: "
                    f"slices would make it shorter; leave out slices, or give it a size"
                )
    for site, shorter in zip(whole.sites, other.sites, strict=True):
        present = [op for op in site.ops if op is not None]
        if not any(ops.needs[op] == "local" for op in present):  # attention has the numbers of the whole sequence
            continue
        if ops.routed.places.issuperset(present) or ops.cuts.issuperset(present):
            continue
        may_differ = all(whole.graph.ops[op].kind in SIZED for op in present)
        given = (site.arguments, site.keywords), (shorter.arguments, shorter.keywords)
        if not may_differ and given[0] != given[1]:
            where = site.context[0] or whole.graph.model_name
            raise CaptureError(
                f"{site.name} in {where} computes with numbers that follow from the length of the sequence (other ones "
                f"at {length} tokens): slices would compute something else; leave out slices, or give it the number"
            )
