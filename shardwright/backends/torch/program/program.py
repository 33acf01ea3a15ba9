"""The body of a training step as a program: unit calls, the operations between them, and the values that flow.

A program is recorded once for each signature (`step_recorder`), divided into stages (`stages`) and then run for every
microbatch (`pipeline.actions`). It holds shapes and names, no data.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.held_tensors import keep_modules, tensors_in
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.program.python_numbers import Expression
from shardwright.backends.torch.program.python_values import PythonValues

Context = tuple[str, int, int]
"""The place where a random number is drawn: (module path, occurrence of its call, number of calls that it has made
before the draw)."""


@dataclass(frozen=True, slots=True)
class ValueRef:
    """A tensor that a step makes, or an input."""

    value: int


@dataclass(frozen=True, slots=True)
class ParameterRef:
    """A parameter of the model, by its first name."""

    name: str


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A buffer of the model, by its first name."""

    name: str


@dataclass(frozen=True, slots=True)
class ConstantRef:
    """A tensor from outside the step, used as it is."""

    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class ObjectRef:
    """A Python object that is neither tensor nor plain value, such as a cache that units write to."""

    index: int


@dataclass(frozen=True, slots=True)
class NumberRef:
    """The result of an expression of Python values at every step: number ``index`` of those of the program."""

    index: int
    expression: Expression


@dataclass(frozen=True, slots=True)
class Literal:
    """Any other leaf: numbers, strings, None, dtypes, functions, modules."""

    value: Any


Leaf = ValueRef | ParameterRef | BufferRef | ConstantRef | ObjectRef | NumberRef | Literal


@dataclass(frozen=True, slots=True)
class Tree:
    """Arguments or results: nested containers with leaves."""

    leaves: tuple[Leaf, ...]
    spec: pytree.TreeSpec

    def build(self, resolve: Callable[[Leaf], Any]) -> Any:
        return pytree.tree_unflatten([resolve(leaf) for leaf in self.leaves], self.spec)


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program: ``step`` made it, or it is input number ``input``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    step: int | None
    input: int | None = None
    memory: int = 0
    """The number of the value's memory: values with the same number share memory."""
    strides: tuple[int, ...] = ()
    """The strides in memory, in elements: dropout draws its mask in this order."""

    @property
    def carries_gradient(self) -> bool:
        return self.requires_grad and (self.dtype.is_floating_point or self.dtype.is_complex)


@dataclass(frozen=True, slots=True)
class Template:
    """An object as it was when a stage first met it. Tensors inside are markers that stand for values."""

    value: Any
    markers: tuple[tuple[torch.Tensor, ValueRef | ParameterRef | BufferRef | ConstantRef | None], ...]

    def build(self, resolve: Callable[[Leaf], Any]) -> Any:
        """A fresh copy. Tensors that nobody here reads (``resolve`` gives None) stay markers, on the meta device."""
        memo: dict[int, Any] = {}
        for marker, ref in self.markers:
            tensor = None if ref is None else resolve(ref)
            memo[id(marker)] = marker if tensor is None else tensor
        keep_modules(self.value, memo)
        return copy.deepcopy(self.value, memo)


@dataclass(frozen=True, slots=True)
class SetAttribute:
    """A function that sets an attribute of a module that one stage runs as part of a unit."""

    module: nn.Module
    path: str
    name: str

    @property
    def __name__(self) -> str:
        return f"setting {self.path}.{self.name}"

    def __call__(self, value: Any) -> None:
        setattr(self.module, self.name, value)


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a unit (``path`` is given) or of a function.

    ``outputs`` are the tensors found in the result, in `tensors_in` order; ``object_outputs`` are those found in the
    objects that a unit was given; None where a tensor is known already. ``renewals`` are pairs (new, old) of values
    that share memory with what the step wrote: after it the same tensors, with new content.
    """

    index: int
    path: str | None
    occurrence: int
    function: Callable[..., Any] | None
    arguments: Tree
    reads: frozenset[int]
    outputs: tuple[int | None, ...]
    object_outputs: tuple[tuple[int, tuple[int | None, ...]], ...]
    renewals: tuple[tuple[int, int], ...]
    written: frozenset[int]
    memories: frozenset[int]
    """The memory that the step writes to."""
    parameters: frozenset[str]
    buffers: frozenset[str]
    grad_enabled: bool
    autocast: torch.dtype | None
    random: tuple[Context, ...] = ()
    counts: tuple[tuple[str, int], ...] = ()
    views_parameter: bool = False
    """Whether this is a function of parameters alone whose result shares their memory, such as a transposition."""
    drawn_before: tuple[int, ...] = ()
    """The functions that drew in the same stretch before: their numbers come first from its generator."""
    draws_on_host: bool = False
    """Whether the step draws from Python's or NumPy's generator."""
    stage: int | None = None
    """The stage where a function must run, for its effect on a module there."""

    @property
    def name(self) -> str:
        if self.path is not None:
            return f"{self.path or 'the model'} (call {self.occurrence})"
        return name_of(self.function)


@dataclass(frozen=True, slots=True)
class Loss:
    """A value given to ``model.backward``.

    Attributes:
        weight: that of its microbatch, a value or a number, if the step gives one.
        reduction: "mean" or "sum", if the step states the relation of the loss to the batch.
    """

    value: int
    weight: Leaf | None
    reduction: str | None = None


@dataclass(frozen=True, slots=True)
class Guard:
    """A value that the model read and that every rank can compute: the program holds where it is the same."""

    function: Callable[..., Any]
    arguments: Tree
    reads: frozenset[int]
    found: Any
    drawn: bool = False
    """Whether the value follows from random numbers too, not from the batch alone."""


@dataclass(frozen=True, slots=True)
class Program:
    """A whole step body. ``templates`` belong to (object, stage)."""

    values: tuple[Value, ...]
    steps: tuple[Step, ...]
    losses: tuple[Loss, ...]
    result: Tree
    templates: dict[tuple[int, int], Template] = field(repr=False)
    guards: tuple[Guard, ...] = ()
    children: dict[str, tuple[str, ...]] = field(repr=False, default_factory=dict)
    """The modules that a module calls, for modules that draw random numbers after calling others."""
    call_totals: dict[str, int] = field(repr=False, default_factory=dict)
    """The number of calls in one microbatch of each module that draws random numbers."""
    unsteady: tuple[str, ...] = ()
    """Units that draw random numbers and may do so elsewhere next time, since their course depends on values."""
    draws_on_host: bool = False
    """Whether units draw from Python's or NumPy's generator too."""
    python: PythonValues = field(repr=False, default_factory=PythonValues)
    flops: Mapping[str, int] | None = field(repr=False, default=None)
    """FLOPs of the products of one microbatch, forward and backward, by precision; None where they are not known."""
    unknown_flops: str = field(repr=False, default="")
    """An op whose FLOPs are not known."""
    numbers: frozenset[int] = frozenset()
    """The leaves of the result that the step returns as numbers of Python, read when it has run."""
    summed: frozenset[str] = frozenset()
    """The parameters, whole on every rank of the tensor axis, of whose gradients each of these has a term."""

    @property
    def rests_on_clocks(self) -> bool:
        """Whether what is computed, and not only what is returned or left in Python, depends on the readings of
        clocks."""
        leaves = [leaf for step in self.steps for leaf in step.arguments.leaves]
        leaves += [loss.weight for loss in self.losses if loss.weight is not None]
        expressions = [leaf.expression for leaf in leaves if isinstance(leaf, NumberRef)]
        expressions += [expression for expression, _ in self.python.conditions]
        return any(expression.is_of_clock for expression in expressions)

    def given_away(self, losses: Iterable[int] | None = None, results: Iterable[int] | None = None) -> set[int]:
        """The values that are losses, their weights, and leaves of the result: all, or those of these positions."""
        given = self.losses if losses is None else [self.losses[i] for i in losses]
        leaves = self.result.leaves if results is None else [self.result.leaves[i] for i in results]
        held = (*(loss.weight for loss in given), *leaves)
        return {loss.value for loss in given} | {leaf.value for leaf in held if isinstance(leaf, ValueRef)}

    @property
    def is_one_of_many(self) -> bool:
        """Whether random numbers decide which modules are called."""
        return any(guard.drawn for guard in self.guards)


def steps_behind(values: Sequence[Value], steps: Sequence[Any], wanted: Iterable[int]) -> set[int]:
    """The indices of the steps that values follow from. ``steps`` are those of a program, or drafts of them."""
    found: set[int] = set()
    pending = list(wanted)
    while pending:
        made = values[pending.pop()].step
        if made is not None and made not in found:
            found.add(made)
            pending.extend(steps[made].reads)
    return found


def name_of(function: Any) -> str:
    """The name of a function, the same in every process."""
    if isinstance(function, functools.partial):
        return f"{name_of(function.func)} of {', '.join(map(name_of, function.args))}"
    return getattr(function, "__name__", type(function).__name__)


def make_template(item: Any, name: Callable[[torch.Tensor], Any]) -> Template:
    """A copy of an object, with a marker in place of each tensor; ``name`` gives the value that a tensor is, or
    None."""
    memo: dict[int, Any] = {}
    markers = []
    for tensor in tensors_in(item):
        marker = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        memo[id(tensor)] = marker
        markers.append((marker, name(tensor)))
    keep_modules(item, memo)
    return Template(copy.deepcopy(item, memo), tuple(markers))
