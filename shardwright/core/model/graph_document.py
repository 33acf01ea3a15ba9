"""A captured graph as plan files hold it: plain tables, in which the ops of repeated blocks stand once.

`GraphDocument.of(graph).graph()` is the graph again, value for value, so that a plan can be scored anew without its
model. The tables come from files: everything that the graph's own classes do not check is checked here.
"""

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from shardwright.core.capabilities import Capabilities, MemoryTraits
from shardwright.core.errors import PlanError
from shardwright.core.execution import Execution
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.model.graph import (
    Call,
    Graph,
    LabelRole,
    Op,
    OpKind,
    Parameter,
    Tensor,
    TensorRole,
    UnitMemory,
)
from shardwright.core.model.op_memory import OpMemory
from shardwright.core.model.repeated_rows import Row, Run, folded, unfolded
from shardwright.core.values.fields import Amount, Count

MOST_DIM = 1 << 40
"""The most entries of a dim, and of a dim for each sample."""

Form = TypeVar("Form", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """A tensor but for the numbers in its name, which are ``{}`` there: ``h.{}.weight``."""

    fixed: tuple[int, ...]
    per_sample: tuple[int, ...]
    dtype: str
    role: TensorRole
    stays_wide: bool
    is_left: bool
    name: str


@dataclass(frozen=True, slots=True)
class OpForm:
    """An op but for the tensors that it reads and makes, and its call."""

    kind: OpKind
    name: str
    inputs: Amount
    outputs: Amount
    labels: tuple[tuple[int, ...], ...]
    special: tuple[tuple[int, LabelRole], ...]
    offsets: tuple[int, ...]
    memory: OpMemory | None
    in_checkpoint: bool = False
    is_run_again: bool = False


@dataclass(frozen=True, slots=True)
class ParameterForm:
    """A parameter but for its tensor and the numbers in its names."""

    names: tuple[str, ...]
    trainable: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """The memory of units that has been found."""

    own: UnitMemory
    in_16_bits: UnitMemory

    def __call__(self, in_16_bits: bool, /) -> UnitMemory:
        return self.in_16_bits if in_16_bits else self.own


@dataclass(frozen=True, slots=True)
class GraphDocument:
    """One graph. A row of a table is the number of its form, then the numbers that the form leaves open."""

    model_name: str
    sample_batch: Count
    capabilities: Capabilities
    memory_traits: MemoryTraits
    execution: Execution
    inputs: tuple[Amount, ...]
    outputs: tuple[Amount, ...]
    tensor_forms: tuple[TensorForm, ...]
    tensors: tuple[Run, ...]
    """The numbers in the name."""
    op_forms: tuple[OpForm, ...]
    ops: tuple[Run, ...]
    """The tensors read, the tensors made, the call."""
    call_forms: tuple[str, ...]
    calls: tuple[Run, ...]
    """The numbers in the path, the parent, the occurrence."""
    parameter_forms: tuple[ParameterForm, ...]
    parameters: tuple[Run, ...]
    """The numbers in the names, the tensor."""
    pins: tuple[Pin, ...]
    logical_axes: tuple[tuple[str, tuple[str | None, ...]], ...]
    unit_memory: UnitMemory | None
    """The memory of units in steps in the model's own precision. None: bytes are counted by kinds of op."""
    unit_memory_in_16_bits: UnitMemory

    @classmethod
    def of(cls, graph: Graph, *, with_unit_memory: bool = True) -> "GraphDocument":
        """The tables of a graph; its graph of 16-bit steps is one of its own."""
        memory_in = graph.unit_memory if with_unit_memory else None
        tensors, tensor_rows = _numbered([_tensor_row(tensor) for tensor in graph.tensors])
        ops, op_rows = _numbered([_op_row(op) for op in graph.ops])
        calls, call_rows = _numbered([_call_row(call) for call in graph.calls])
        parameters, parameter_rows = _numbered([_parameter_row(parameter) for parameter in graph.parameters])
        return cls(
            graph.model_name,
            graph.sample_batch,
            graph.capabilities,
            graph.memory_traits,
            graph.execution,
            graph.inputs,
            graph.outputs,
            tensors,
            folded(tensor_rows),
            ops,
            folded(op_rows),
            calls,
            folded(call_rows),
            parameters,
            folded(parameter_rows),
            graph.pins,
            graph.logical_axes,
            None if memory_in is None else memory_in(False),
            UnitMemory() if memory_in is None else memory_in(True),
        )

    def without_unit_memory(self) -> "GraphDocument":
        """The tables alone."""
        return replace(self, unit_memory=None, unit_memory_in_16_bits=UnitMemory())

    def graph(self, in_16_bits: Graph | None = None) -> Graph:
        """The graph; ``in_16_bits`` is that of its 16-bit steps. Raises PlanError, with the table, for numbers that are
        none of this graph's, CaptureError for ops and tensors that do not go together."""
        tensors = []
        for form, numbers in _forms(self.tensor_forms, unfolded(self.tensors, "tensors"), "tensors"):
            if max((abs(size) for size in (*form.fixed, *form.per_sample)), default=0) > MOST_DIM:
                raise PlanError(f"tensors: {form.name!r} has a dim of more than {MOST_DIM} entries")
            if any(fixed + slope < 0 or slope < 0 for fixed, slope in zip(form.fixed, form.per_sample, strict=False)):
                raise PlanError(f"tensors: {form.name!r} has a dim of fewer than 0 entries for one sample")
            name = _filled((form.name,), numbers, "tensors")[0]
            tensors.append(
                Tensor(form.fixed, form.per_sample, form.dtype, form.role, name, form.stays_wide, form.is_left)
            )
        calls: list[Call] = []
        for path, (*own, parent, occurrence) in _forms(self.call_forms, unfolded(self.calls, "calls"), "calls", 2):
            if parent > len(calls):
                raise PlanError(f"calls: call {len(calls)} is inside call {parent}, which comes later")
            calls.append(Call(_filled((path,), own, "calls")[0], parent, occurrence))
        ops: list[Op] = []
        for op, values in _forms(self.op_forms, unfolded(self.ops, "ops"), "ops"):
            if len(values) != op.inputs + op.outputs + 1:
                raise PlanError(f"ops: op {len(ops)} has {len(values)} numbers, expected {op.inputs + op.outputs + 1}")
            _require_labels(op, len(ops))
            _require_memory(op, len(ops))
            *read, call = values
            if call >= len(calls):
                raise PlanError(f"ops: op {len(ops)} ran in call {call}, and there are {len(calls)}")
            made = tuple(read[op.inputs :])
            rest = op.labels, op.special, op.offsets, call, op.memory, op.in_checkpoint, op.is_run_again
            ops.append(Op(op.kind, op.name, tuple(read[: op.inputs]), made, *rest))
        parameters = []
        table = _forms(self.parameter_forms, unfolded(self.parameters, "parameters"), "parameters", 1)
        for known, (*own, tensor) in table:
            name, *aliases = _filled(known.names, own, "parameters")
            if tensor >= len(tensors) or tensors[tensor].role != "parameter" or tensors[tensor].has_batch:
                raise PlanError(f"parameters: {name!r} is tensor {tensor}, which is no parameter of the graph")
            parameters.append(Parameter(name, tensor, tuple(aliases), known.trainable))
        if missing := [each for each in (*self.inputs, *self.outputs) if each >= len(tensors)]:
            raise PlanError(f"inputs, outputs: name tensor {missing[0]}, and there are {len(tensors)}")
        if len({parameter.tensor for parameter in parameters}) != len(parameters):
            raise PlanError("parameters: two of them are one tensor; expected one with two names")
        found = Graph(
            self.capabilities, self.model_name, tuple(tensors), tuple(ops), tuple(calls), tuple(parameters),
            self.inputs, self.outputs, self.sample_batch, self.pins, self.logical_axes,
            None if self.unit_memory is None else _Known(self.unit_memory, self.unit_memory_in_16_bits),
            self.memory_traits, self.execution,
        )  # fmt: skip
        return replace(found, in_16_bits=in_16_bits)


def documents_of(graph: Graph, *, with_unit_memory: bool = True) -> tuple[GraphDocument, ...]:
    """The tables of a graph and, where it has one, of its graph of 16-bit steps."""
    graphs = (each for each in (graph, graph.in_16_bits) if each is not None)
    return tuple(GraphDocument.of(each, with_unit_memory=with_unit_memory) for each in graphs)


def graph_of(documents: Sequence[GraphDocument]) -> Graph:
    """The graph of `documents_of`. Raises as `GraphDocument.graph`."""
    whole, *rest = documents
    return whole.graph(rest[0].graph() if rest else None)


# Rows ------------------------------------------------------------------------------------------------------------


def _tensor_row(tensor: Tensor) -> tuple[TensorForm, tuple[int, ...]]:
    name, numbers = _opened(tensor.name)
    form = TensorForm(
        tensor.fixed, tensor.per_sample, tensor.dtype, tensor.role, tensor.stays_wide, tensor.is_left, name
    )
    return form, numbers


def _op_row(op: Op) -> tuple[OpForm, tuple[int, ...]]:
    rest = op.labels, op.special, op.offsets, op.memory, op.in_checkpoint, op.is_run_again
    form = OpForm(op.kind, op.name, len(op.inputs), len(op.outputs), *rest)
    return form, (*op.inputs, *op.outputs, op.call)


def _call_row(call: Call) -> tuple[str, tuple[int, ...]]:
    path, numbers = _opened(call.path)
    return path, (*numbers, call.parent, call.occurrence)


def _parameter_row(parameter: Parameter) -> tuple[ParameterForm, tuple[int, ...]]:
    opened = [_opened(name) for name in parameter.names]
    form = ParameterForm(tuple(name for name, _ in opened), parameter.trainable)
    return form, (*(number for _, numbers in opened for number in numbers), parameter.tensor)


def _numbered(rows: Sequence[tuple[Form, tuple[int, ...]]]) -> tuple[tuple[Form, ...], list[Row]]:
    """The distinct forms, and the rows with their numbers in the forms' places."""
    known: dict[Form, int] = {}
    found = [(known.setdefault(form, len(known)), *numbers) for form, numbers in rows]
    return tuple(known), found


def _forms(forms: Sequence[Form], rows: Sequence[Row], name: str, least: int = 0) -> list[tuple[Form, tuple[int, ...]]]:
    """The form and the numbers of every row. Raises PlanError for a form that the table lacks, and for a row of fewer
    than ``least`` numbers."""
    for index, (form, *numbers) in enumerate(rows):
        if form >= len(forms):
            raise PlanError(f"{name}: row {index} has form {form}, and there are {len(forms)}")
        if len(numbers) < least:
            raise PlanError(f"{name}: row {index} has {len(numbers)} numbers after its form, expected {least} or more")
    return [(forms[form], tuple(numbers)) for form, *numbers in rows]


def _require_labels(op: OpForm, index: int) -> None:
    """Raise PlanError for labels that are none: below -1, or special without being a label of the op."""
    known = {label for dims in op.labels for label in dims}
    if min(known, default=0) < -1 or min(op.offsets, default=0) < 0:
        raise PlanError(f"ops: op {index} ({op.name}) has a label below -1 or an offset below 0")
    if odd := [label for label, _ in op.special if label not in known]:
        raise PlanError(f"ops: op {index} ({op.name}) gives label {odd[0]} a role, and labels no dim with it")


def _require_memory(op: OpForm, index: int) -> None:
    """Raise PlanError for memory of an op that names operands that it has not, or bytes that no op takes."""
    memory = op.memory
    if memory is None:
        return
    places = (*memory.keeps, *memory.unmade, *memory.handed_on, *memory.weightless)
    if min(places, default=0) < 0 or max(places, default=0) >= op.inputs + op.outputs:
        raise PlanError(f"ops: the memory of op {index} ({op.name}) names an operand or result that the op has not")
    if max((*memory.handed_on, *memory.weightless), default=-1) >= op.inputs:
        raise PlanError(f"ops: the memory of op {index} ({op.name}) gives a result the place of an input")
    lines = [line for of in (memory.wide, memory.narrow) for line in (of.kept, of.forward, of.backward)]
    if any(abs(size) > MOST_DIM for line in lines for size in line):
        raise PlanError(f"ops: the memory of op {index} ({op.name}) has more than {MOST_DIM} bytes")
    if any(of.kept[1] < 0 or sum(of.kept) < 0 for of in (memory.wide, memory.narrow)):
        raise PlanError(f"ops: the memory of op {index} ({op.name}) keeps fewer than 0 bytes of one sample")


# Names -----------------------------------------------------------------------------------------------------------

_NUMBER = re.compile(r"(?<![0-9])(0|[1-9][0-9]{0,8})(?![0-9])")
_PLACE = re.compile(r"(\{\}|\{\{|\}\})")


def _opened(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with ``{}`` for each number in it, its own braces doubled; and the numbers."""
    doubled = name.replace("{", "{{").replace("}", "}}")
    return _NUMBER.sub("{}", doubled), tuple(map(int, _NUMBER.findall(doubled)))


def _filled(names: Sequence[str], numbers: Sequence[int], table: str) -> list[str]:
    """The names with their numbers. Raises PlanError where there are more or fewer numbers than places."""
    split = [_PLACE.split(name) for name in names]
    if (places := sum(part == "{}" for parts in split for part in parts)) != len(numbers):
        raise PlanError(f"{table}: {', '.join(map(repr, names))} with {len(numbers)} numbers, expected {places}")
    left = iter(numbers)
    return [
        "".join(str(next(left)) if part == "{}" else part[0] if part in ("{{", "}}") else part for part in parts)
        for parts in split
    ]
