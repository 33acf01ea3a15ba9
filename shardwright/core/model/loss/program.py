"""The program from a batch to its loss, as both frameworks hand it to the core: each op with its effect on sums.

A program is traced at two batch sizes. What grows with the batch is a batch dim, and a number that differs between the
two traces (``x.shape[0]`` in ``loss / x.shape[0]``) is a power of the batch size or nothing that is understood.
"""

from dataclasses import dataclass
from typing import Literal

from shardwright.core.errors import CaptureError
from shardwright.core.model.graph import LabelRole, role_of

Shape = tuple[int, ...]

How = Literal[
    "map",  # any function that works on the entries of a label one by one, where the label's role is "map"
    "same",  # linear in its one operand, entry by entry: casts, transpositions, negation, broadcasts
    "reshape",  # the same entries in the same order
    "add",  # a sum or difference of its operands, and of ``number``
    "scale",  # its operand times ``number``
    "multiply",
    "divide",
    "sum",  # over the labels that the output lacks
    "mean",
    "contract",  # a product of two, summed over the labels that the output lacks
    "at_least",  # the larger of its operand and ``number``, or of its two operands
    "select",  # by its first operand, from the two others
    "lookup",  # of its first operand along ``dims``, by one index operand for each of them
    "concat",  # along ``dims[0]``
    "cut",  # parts of its operand along ``dims[0]``, beginning at ``offsets``
    "fill",  # one number everywhere
    "position",  # 0, 1, 2 … along its only dim
    "draw",  # random numbers, each independent of the others
    "detach",
    "unlike",  # it is given other numbers at the two batch sizes, in a way that nothing is known of
    "opaque",  # nothing is known: good for what does not depend on the batch alone
]

SourceKind = Literal["samples", "trained", "fixed"]


@dataclass(frozen=True, slots=True)
class Source:
    """A value that no op makes: a tensor of the batch, a parameter that is trained, or anything else."""

    kind: SourceKind
    number: tuple[float, float] | None = None
    """The value at both batch sizes of a constant of one entry, where it is known."""


@dataclass(frozen=True, slots=True)
class LossOp:
    """One op. ``labels`` and ``special`` are those of `core.model.graph.Op`, at both batch sizes the same."""

    how: How
    name: str
    """The framework's own name of the op, for messages."""
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...] = ()
    """One label per dim for every input and then every output; -1 stands alone. Reshapes and sources need none."""
    special: tuple[tuple[int, LabelRole], ...] = ()
    where: str = ""
    """The module path that the op ran in, for messages."""
    number: tuple[float, float] | None = None
    """The number operand at both batch sizes."""
    dims: tuple[int, ...] = ()
    offsets: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """The beginnings of the outputs of a cut, at both batch sizes."""
    differentiable: bool = True
    """Whether gradients flow from outputs to inputs."""
    is_in_module: bool = False
    """Whether a module of the model runs it, and not the step around the model."""

    def role(self, label: int) -> LabelRole:
        """The effect of splitting a label; see `core.model.graph.LabelRole`."""
        return role_of(label, self.special, self.labels[len(self.inputs) :])


@dataclass(frozen=True, slots=True)
class LossProgram:
    """Ops in the order in which they ran. Values are named by numbers.

    Attributes:
        sizes: the two batch sizes.
        shapes: the shapes of every value at both sizes.
        sources: the values that no op makes. A value that is not named is "fixed".
    """

    sizes: tuple[int, int]
    shapes: dict[int, tuple[Shape, Shape]]
    sources: dict[int, Source]
    ops: tuple[LossOp, ...]

    def __post_init__(self) -> None:
        if not 1 < self.sizes[0] < self.sizes[1]:
            raise CaptureError(f"a loss is read at two batch sizes above 1, the smaller first: given {self.sizes}")
