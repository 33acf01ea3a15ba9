"""The captured model: tensors, ops, module calls and parameters, as both frameworks hand them to the core.

The graph is the forward pass with its loss; what the backward pass costs and keeps follows from the kinds of op
(`core.cost.unit_work`). Every dim of every tensor is linear in the batch, because models are captured at two batch
sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from shardwright.core.capabilities import PLAIN_MEMORY, Capabilities, MemoryTraits
from shardwright.core.errors import CaptureError
from shardwright.core.execution import PLAIN, Execution
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.model.op_memory import OpMemory
from shardwright.core.values.amounts import count_text

OpKind = Literal[
    "contraction",  # matrix products, einsums, convolutions: 2 · (product of all label sizes) FLOPs
    "attention",  # scaled dot-product attention, query · key · value
    "elementwise",
    "dropout",  # elementwise by a random mask
    "reduction",
    "normalization",  # subtracts a mean or divides by a scale taken over the statistic labels
    "softmax",
    "gather",  # looks rows up by index: embeddings, take_along
    "scatter",
    "view",  # reshape, transpose, broadcast, cast to the same memory: moves nothing
    "copy",  # the same with a move: contiguous, concatenate, pad
    "slice",  # parts of a dim
    "concat",
    "create",  # constants, ranges, random values
    "sort",
    "opaque",  # anything else: whole tensors in, whole tensors out
]

LabelRole = Literal["map", "sum", "index", "statistic", "whole"]
"""The effect that splitting a label has on an op: none (map), a partial-sum output (sum: contracted; index: looked up),
a small reduction inside the op (statistic: softmax, normalisation), or not allowed (whole)."""

TensorRole = Literal["parameter", "buffer", "input", "activation", "constant"]

ITEM_BYTES = {
    "float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "complex128": 16,
    "float32": 4, "int32": 4, "uint32": 4,
    "bfloat16": 2, "float16": 2, "int16": 2, "uint16": 2, "complex32": 4,
    "int8": 1, "uint8": 1, "bool": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "key": 8,
}  # fmt: skip
FLOATING = frozenset(name for name in ITEM_BYTES if name.startswith(("float", "bfloat")))
COMPLEX = frozenset(name for name in ITEM_BYTES if name.startswith("complex"))


@dataclass(frozen=True, slots=True)
class Tensor:
    """One value of the model. Dim ``i`` has ``fixed[i] + per_sample[i] · batch`` entries."""

    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: str
    role: TensorRole = "activation"
    name: str = ""
    stays_wide: bool = False
    """Whether a step that computes in 16 bits has it in float32 all the same, because the model itself casts it (scores
    before a softmax, the logits of a loss)."""
    is_left: bool = False
    """Whether a module call leaves it in an object that it was given, such as a cache of keys and values. Recomputed
    units are given the same objects once more, so that it stays until then."""

    def __post_init__(self) -> None:
        if len(self.fixed) != len(self.per_sample):
            raise CaptureError(f"tensor {self.name!r}: {len(self.fixed)} fixed sizes, {len(self.per_sample)} slopes")
        if self.dtype not in ITEM_BYTES:
            raise CaptureError(f"tensor {self.name!r} has dtype {self.dtype!r}: known are {', '.join(ITEM_BYTES)}")

    @classmethod
    def from_two(
        cls,
        shape_at_2: tuple[int, ...],
        shape_at_3: tuple[int, ...],
        dtype: str,
        role: TensorRole = "activation",
        name: str = "",
        *,
        stays_wide: bool = False,
        is_left: bool = False,
    ) -> "Tensor":
        """A tensor seen with batch 2 and with batch 3."""
        slopes = tuple(c - b for b, c in zip(shape_at_2, shape_at_3, strict=True))
        fixed = tuple(b - 2 * slope for b, slope in zip(shape_at_2, slopes, strict=True))
        return cls(fixed, slopes, dtype, role, name, stays_wide, is_left)

    def shape(self, batch: int) -> tuple[int, ...]:
        return tuple(f + s * batch for f, s in zip(self.fixed, self.per_sample, strict=True))

    def elements(self, batch: int) -> int:
        return math.prod(self.shape(batch))

    def size_bytes(self, batch: int) -> int:
        return self.elements(batch) * self.item_bytes

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def is_floating(self) -> bool:
        """Whether the entries are real floating-point numbers, which a precision applies to."""
        return self.dtype in FLOATING

    @property
    def carries_gradients(self) -> bool:
        """Whether gradients can flow through a tensor of this dtype: a real or a complex floating-point one."""
        return self.dtype in FLOATING or self.dtype in COMPLEX

    @property
    def has_batch(self) -> bool:
        return any(self.per_sample)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    ``labels`` gives, for every input and then every output, one label per dim: dims of one op that carry the same
    label are split together; -1 stands alone and is never split. A label that only inputs carry is contracted.
    Dims of a slice or concat that share a label but not a size are a whole and its parts; ``offsets`` says where each
    part (each output of a slice, each input of a concat) starts. Of a pad by a constant it gives the entries in front
    of every dim; of a convolution over one dim the padding, the entries that a window spans, and the stride.
    """

    kind: OpKind
    name: str
    """The framework's own name of the op."""
    inputs: tuple[int, ...]
    """Indices into the graph's tensors. A graph that is a part of a model has inputs of role ``activation``, and
    gradients flow on from them into what comes before it."""
    outputs: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    special: tuple[tuple[int, LabelRole], ...] = ()
    """The labels whose role is not the default: map, or sum for a label that only inputs carry."""
    offsets: tuple[int, ...] = ()
    call: int = 0
    """The index into the graph's calls of the innermost module call that the op ran in."""
    memory: OpMemory | None = None
    """The memory of its passes, where the framework says it; None: it follows from the kind of op."""
    in_checkpoint: bool = False
    """Whether it lies in a checkpoint of the model's own that keeps nothing of what is computed inside."""
    is_run_again: bool = False
    """Whether a checkpoint of the model's own runs it once more in the backward pass."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(OpKind):
            raise CaptureError(f"op {self.name!r} has kind {self.kind!r}: expected one of {get_args(OpKind)}")
        if len(self.labels) != len(self.inputs) + len(self.outputs):
            raise CaptureError(
                f"op {self.name!r} labels {len(self.labels)} of {len(self.inputs) + len(self.outputs)} operands"
            )

    @property
    def input_labels(self) -> tuple[tuple[int, ...], ...]:
        return self.labels[: len(self.inputs)]

    @property
    def output_labels(self) -> tuple[tuple[int, ...], ...]:
        return self.labels[len(self.inputs) :]

    @property
    def base_name(self) -> str:
        """The name without namespace, overload and in-place mark: ``add`` of ``aten.add_.Tensor``, ``addmm/bias`` of
        ``aten.addmm/bias``."""
        name = self.name.removeprefix("aten::").removeprefix("aten.").split(".")[0]
        return name if name.startswith("_") else name.rstrip("_")

    def role(self, label: int) -> LabelRole:
        return role_of(label, self.special, self.output_labels)


def role_of(
    label: int, special: tuple[tuple[int, LabelRole], ...], output_labels: tuple[tuple[int, ...], ...]
) -> LabelRole:
    """The effect of splitting a label of an op: as ``special`` says, or by whether the outputs carry it."""
    if label < 0:
        return "whole"
    default: LabelRole = "map" if any(label in dims for dims in output_labels) else "sum"
    return dict(special).get(label, default)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module. Call 0 is the root: the model itself, with path ``""``; its parent is itself."""

    path: str
    """The framework's own path: a dotted name in torch, pytree keys joined by '.' in JAX."""
    parent: int
    occurrence: int = 0
    """The number of calls of this path before it."""
    is_recomputed: bool = False
    """Whether the model asks for the call to be computed again in the backward pass: it lies in a checkpoint of the
    model's own, or was marked."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A trainable or frozen tensor, once, under its first name; ``aliases`` are the names tied to it."""

    name: str
    tensor: int
    aliases: tuple[str, ...] = ()
    trainable: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one microbatch of a unit as its framework's runtime holds them, in pairs (fixed, for each sample)."""

    kept: tuple[int, int]
    """Bytes kept from forward to backward, including what enters the unit and is read again."""
    kept_selective: tuple[int, int]
    """The same under selective recompute."""
    passing: tuple[tuple[int, int], ...]
    """Bytes that the backward holds beside that, at each of its moments that may be the fullest. The batch decides
    which one is."""
    wide_share: float
    """The share of what is kept that is in fp32, which another precision makes smaller; 0 where nothing is kept."""
    between: tuple[int, int] = (0, 0)
    """Bytes that the input gradient of a split backward makes for the weight gradient, beside what is kept."""
    merged_kept: tuple[int, int] | None = None
    """What is kept where forward and backward are compiled as one program, which makes some of it again; None: as
    ``kept``."""
    merged_passing: tuple[tuple[int, int], ...] = ()
    """What such a program holds beside that, without gradients of parameters."""
    merged_working: tuple[tuple[int, int], ...] = ()
    """The same with those gradients, each from where it is made to where it is added to its sum."""
    gathered_in_loops: tuple[int, int] = (0, 0)
    """What loops of the backward add gradients of parameters up in: it is there from the beginning of a program to its
    end."""
    scales: tuple[int, int] = (0, 0)
    """Arrays of one number each that the backward multiplies with: made once for all units of a stage, from the
    beginning of its program to its end."""
    adding: tuple[tuple[int, int], ...] = ()
    """``passing`` with the gradient of each parameter from where it is made to where it is added to its sum, at once.
    Empty: not known."""
    kept_by_calls: tuple[tuple[int, int], tuple[int, int]] | None = None
    """What is kept under full and under selective recompute where a plan has one stage and the runtime computes calls
    of modules again, but not what stands beside them in the unit; None: as in a unit that is computed again whole."""
    working_again: tuple[tuple[tuple[int, int], ...], ...] = ()
    """What a program of the whole step holds beside what is kept where it computes the unit again, under full and under
    selective recompute, with gradients as in ``merged_working``. Empty: all that it makes again, and ``passing``."""
    of_shards: tuple[tuple[tuple[int, int], ...], ...] = ()
    """``passing``, ``adding``, ``merged_passing`` and ``merged_working`` of a unit that is divided over ranks, added up
    over these: scatters are made by themselves there. Empty: the same as of one rank."""


@dataclass(frozen=True, slots=True)
class KeptTwice:
    """The bytes that two neighbouring units keep less together than apart, as the second reads what the first makes;
    negative where they keep more."""

    first: int
    second: int
    """The classes of the two units."""
    size: tuple[int, int]
    """Bytes of one microbatch: (fixed, for each sample)."""
    merged_size: tuple[int, int] = (0, 0)
    """The same of ``Footprint.merged_kept``."""


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """The memory of a model's units in steps of one precision; empty where it is not known."""

    footprints: tuple[Footprint, ...] = ()
    """The footprint of every class of units, in the order of `core.model.fold`."""
    kept_twice: tuple[KeptTwice, ...] = ()
    """The neighbouring units that keep less or more together."""


@dataclass(frozen=True, slots=True, repr=False)
class Graph:
    """A captured model. Ops stand in the order in which they ran; tensors are named by their index."""

    capabilities: Capabilities
    model_name: str
    tensors: tuple[Tensor, ...]
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    parameters: tuple[Parameter, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    """The loss, or what the model returns when no loss is known."""
    sample_batch: int
    """The batch size of the sample that was given."""
    pins: tuple[Pin, ...] = ()
    """Layouts that the model itself asks for, by marks on its modules."""
    logical_axes: tuple[tuple[str, tuple[str | None, ...]], ...] = ()
    """(parameter, a name for every dim) for each parameter that names its dims."""
    unit_memory: Callable[[bool], UnitMemory] | None = field(default=None, repr=False, compare=False)
    """A function that finds the memory of the units in steps that compute in 16 bits beside float32 parameters (True),
    or in the model's own precision (False). It is called when a plan first asks, as it takes longer than the capture.
    None where the framework does not say: the bytes are then counted by kinds of op."""
    memory_traits: MemoryTraits = PLAIN_MEMORY
    execution: Execution = PLAIN
    """What the framework's runtime overlaps, and how it makes kernels."""
    in_16_bits: "Graph | None" = None
    """The graph of steps that compute in 16 bits beside float32 parameters, with the model's own casts, which a step in
    float32 does not have. None: the same."""
    producer: dict[int, int] = field(init=False, repr=False, compare=False, hash=False)
    """Tensor → the op that makes it; parameters and inputs have none."""

    @property
    def footprints(self) -> tuple[Footprint, ...]:
        """The footprint of every class of units, in the order of `core.model.fold`. Empty where it is not known."""
        return self._memory_in(in_16_bits=False).footprints

    @property
    def kept_twice(self) -> tuple[KeptTwice, ...]:
        """The neighbouring units that keep less or more together, where there are footprints."""
        return self._memory_in(in_16_bits=False).kept_twice

    def _memory_in(self, *, in_16_bits: bool) -> UnitMemory:
        return UnitMemory() if self.unit_memory is None else self.unit_memory(in_16_bits)

    def knows_footprints_of(self, precision: str) -> bool:
        """Whether the footprints are those of steps of that precision, and not of the model's own."""
        return precision == "fp32" or bool(self._memory_in(in_16_bits=True).footprints)

    def footprints_of(self, precision: str) -> tuple[Footprint, ...]:
        """The footprints of steps of a precision, as far as they are known."""
        return self._memory_of(precision).footprints

    def kept_twice_of(self, precision: str) -> tuple[KeptTwice, ...]:
        """The neighbouring units that keep less or more together in steps of a precision."""
        return self._memory_of(precision).kept_twice

    def _memory_of(self, precision: str) -> UnitMemory:
        return self._memory_in(in_16_bits=precision != "fp32" and self.knows_footprints_of(precision))

    def for_precision(self, precision: str) -> "Graph":
        """The graph of steps of a precision."""
        return self if precision == "fp32" or self.in_16_bits is None else self.in_16_bits

    def __post_init__(self) -> None:
        made: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            for tensor, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True):
                if not 0 <= tensor < len(self.tensors):
                    raise CaptureError(f"op {index} ({op.name}) names tensor {tensor}, which the graph does not hold")
                if len(labels) != len(self.tensors[tensor].fixed):
                    raise CaptureError(
                        f"op {index} ({op.name}) labels {len(labels)} dims of a tensor that has "
                        f"{len(self.tensors[tensor].fixed)}"
                    )
            for tensor in op.outputs:
                if tensor in made:
                    raise CaptureError(f"tensor {tensor} is made by op {made[tensor]} and again by op {index}")
                made[tensor] = index
            for tensor in op.inputs:
                if tensor not in made and tensor not in self.inputs and self.tensors[tensor].role == "activation":
                    raise CaptureError(f"op {index} ({op.name}) uses activation {tensor} before it is made")
        if not self.calls or self.calls[0].path != "":
            raise CaptureError("call 0 of a graph is its root, with path ''")
        object.__setattr__(self, "producer", made)

    @property
    def framework(self) -> str:
        return self.capabilities.framework

    def label_sizes(self, op: Op, batch: int) -> dict[int, int]:
        """The size of every label of an op; for a whole and its parts, that of the whole."""
        sizes: dict[int, int] = {}
        for tensor, labels in zip((*op.inputs, *op.outputs), op.labels, strict=True):
            for label, size in zip(labels, self.tensors[tensor].shape(batch), strict=True):
                if label >= 0:
                    sizes[label] = max(size, sizes.get(label, 1))
        return sizes

    def __repr__(self) -> str:
        return (
            f"<Graph of {self.model_name} from {self.framework}: {count_text(self.parameter_count())} parameters, "
            f"{len(self.ops)} ops, sample of {self.sample_batch}>"
        )

    def parameter_count(self, *, trainable_only: bool = False) -> int:
        """Entries of all parameters, each counted once however often it is tied."""
        return sum(self.tensors[p.tensor].elements(1) for p in self.parameters if p.trainable or not trainable_only)
