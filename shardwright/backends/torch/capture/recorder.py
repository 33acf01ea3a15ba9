"""The recorder: a dispatch mode that turns the aten ops of one forward pass into core ops on numbered values.

It runs below autograd, where composite ops (linear, matmul, scaled_dot_product_attention, layer_norm …) arrive whole. A
composite op that the table of `ops` does not name is decomposed, and the ops that it is made of are recorded. In-place
ops are recorded as functions: the tensor that was written, and every tensor that shares its memory, gets a new value.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.backends.torch.capture.call_forms import (
    SEEN_KINDS,
    CallForm,
    form_of,
    is_seen_whole,
    keeps_copies,
    pieces_of,
    tensors_in,
)
from shardwright.backends.torch.capture.held_tensors import is_plain
from shardwright.backends.torch.capture.held_tensors import tensors_in as tensors_in_objects
from shardwright.backends.torch.capture.op_schemas import Func, bind, by_name, dtype_name, key_of, ref_of
from shardwright.backends.torch.capture.ops import RULES, OpCall, Ref, Template
from shardwright.backends.torch.capture.ops.products import is_plain_einsum
from shardwright.backends.torch.capture.remembered_results import Inferred, memory_of
from shardwright.backends.torch.capture.value_reads import masks_of
from shardwright.backends.torch.compat import TorchDispatchMode, pytree
from shardwright.core.model.graph import Call, OpKind, TensorRole
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled

BOOLEAN = frozenset({"aten.is_nonzero", "aten.item", "aten._local_scalar_dense"})
"""Ops by which a tensor decides a branch."""


@dataclass(frozen=True, slots=True)
class Value:
    """One tensor of one run."""

    shape: tuple[int, ...]
    dtype: str
    role: TensorRole
    name: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """One core op of one run."""

    kind: OpKind
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    labelled: Labelled
    call: int
    form: CallForm | None = None
    """The call that its memory is seen by; None where that follows from the kind of op."""
    piece: int = 0
    """Which of the call's ops it is."""
    whole: CallForm | None = None
    """The call around it that torch takes apart."""
    part: int = 0
    """Which of that call's ops it is."""


@dataclass(slots=True)
class View:
    """The way in which a tensor that shares memory was made, so that it can be made again when that memory is
    written."""

    parent: torch.Tensor
    root: int
    template: Template | None
    """The template of the op; None where it is the same tensor under another name."""
    name: str
    call: int
    output: int
    parent_value: int


class Recorder(TorchDispatchMode):
    """A recorder of the ops of one forward pass, while it is entered. `enter` and `leave` must keep `calls` current."""

    def __init__(self, templates: dict[Any, Template], chance: bool = False) -> None:
        """``templates`` are kept from run to run: the same call means the same ops. ``chance`` is the outcome of
        branches that random numbers alone decide."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._templates = templates
        self._functions: dict[Any, Func] = {}
        self._inferred = Inferred()
        self.values: list[Value] = []
        self.ops: list[Recorded] = []
        self.calls: list[Call] = [Call("", 0)]
        self.failed_path: str | None = None
        self.failed_op: str | None = None
        self.chance = chance
        self.met_chance = False
        """Whether random numbers alone decided a branch."""
        self.reading: set[int] = set()
        """The calls that read values of tensors."""
        self.left_in_objects: set[int] = set()
        """Values that module calls made and left in objects that they were given."""
        self.checkpointed_functions: list[str] = []
        """The paths of the calls in which something else was checkpointed than one call of a module."""
        self.recomputed: Collection[str] = ()
        """The paths of modules that were marked to be computed again."""
        self._checkpoints = 0
        """The number of checkpoints of the model's own around what runs."""
        self._stack = [0]
        self._begun = [0]
        """The number of values before each call of the stack."""
        self._occurrences: dict[str, int] = {}
        self._value_of: dict[int, int] = {}
        self._views: dict[int, View] = {}
        self._written: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._drawn: set[int] = set()
        """Tensors that follow from random numbers alone; all of them are kept."""
        self._forms: dict[Any, CallForm] = {}
        self._inside = False
        """Whether a composite op is being taken apart."""
        self._flowing: set[int] = set()
        """Tensors through which gradients would flow to a parameter or an input; all of them are kept."""
        self._reaching: set[int] = set()
        """Those, and what is made of them where autograd looks away, as inside of an `autograd.Function`; all kept."""

    # -- module calls --------------------------------------------------------------------------------------------

    def enter(self, path: str) -> None:
        """Begin a module call. The first call of the model itself is call 0."""
        occurrence = self._occurrences.get(path, 0)
        self._occurrences[path] = occurrence + 1
        self._begun.append(len(self.values))
        if path == "" and occurrence == 0:
            self._stack.append(0)
            return
        is_recomputed = self._checkpoints > 0 or path in self.recomputed
        self.calls.append(Call(path, self._stack[-1], occurrence, is_recomputed))
        self._stack.append(len(self.calls) - 1)

    def leave(self, given: Sequence[Any] = (), *, failed: bool) -> None:
        """End the innermost module call; ``given`` are its arguments, of which objects may hold what it made."""
        if failed and self.failed_path is None:
            self.failed_path = self.path
        begun = self._begun.pop()
        for item in pytree.tree_leaves(given):
            if not isinstance(item, torch.Tensor) and not is_plain(item):
                self.left_in_objects |= {n for n in map(self._number_of, tensors_in_objects(item)) if n >= begun}
        if len(self._stack) > 1:
            self._stack.pop()

    @contextmanager
    def checkpoint(self, is_whole: bool) -> Iterator[None]:
        """A checkpoint of the model's own around what runs; ``is_whole``: all of it is computed again."""
        ops, calls, around = len(self.ops), len(self.calls), self._stack[-1]
        self._checkpoints += is_whole
        try:
            yield
        finally:
            self._checkpoints -= is_whole
            has_own_ops = any(op.call == around for op in self.ops[ops:])
            together = sum(call.parent == around for call in self.calls[calls:])
            if has_own_ops or together > 1 or not is_whole:
                self.checkpointed_functions.append(self.path)

    def refuse(self, reason: str) -> None:
        """Note that the model does something that a graph of ops does not hold; ``reason`` says what. A plan does
        without it."""

    def flows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor would require a gradient if autograd kept its graph."""
        if id(tensor) in self._flowing:
            return True
        return self._root(tensor) in self._flowing if id(tensor) in self._views else tensor.requires_grad

    def _reaches(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is made of one through which gradients flow. The core takes all of these for flowing."""
        if id(tensor) in self._reaching:
            return True
        return self._root(tensor) in self._reaching if id(tensor) in self._views else self.flows(tensor)

    def note_reading(self) -> None:
        """Note that the innermost module call reads a value, or makes a tensor whose shape depends on values."""
        self.reading.add(self._stack[-1])

    @property
    def path(self) -> str:
        """The path of the innermost module call."""
        return self.calls[self._stack[-1]].path

    # -- values --------------------------------------------------------------------------------------------------

    def name(self, tensor: torch.Tensor, role: TensorRole, name: str) -> int:
        """Number a tensor that no op made: parameter, buffer, input, constant."""
        number = self._new(tuple(tensor.shape), dtype_name(tensor.dtype), role, name)
        self._value_of[id(tensor)] = number
        self._kept.append(tensor)
        return number

    def read(self, tensor: torch.Tensor) -> int:
        """The number of the value that a tensor holds now."""
        key = id(tensor)
        view = self._views.get(key)
        if view is not None:
            if view.template is None:
                return self.read(view.parent)
            if view.root in self._written:
                now = self.read(view.parent)
                if now != view.parent_value:
                    self._value_of[key] = self._emit(view.template, view.name, [now], view.call)[view.output]
                    view.parent_value = now
        number = self._value_of.get(key)
        return self.name(tensor, "constant", "") if number is None else number

    def _number_of(self, tensor: torch.Tensor) -> int:
        """The number that a tensor has; -1: none."""
        view = self._views.get(id(tensor))
        while view is not None and view.template is None:
            tensor = view.parent
            view = self._views.get(id(tensor))
        return self._value_of.get(id(tensor), -1)

    def _new(self, shape: tuple[int, ...], dtype: str, role: TensorRole = "activation", name: str = "") -> int:
        self.values.append(Value(shape, dtype, role, name))
        return len(self.values) - 1

    def _alias(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        self._kept.append(tensor)
        self._views[id(tensor)] = View(source, self._root(source), None, "", 0, 0, -1)

    def _root(self, tensor: torch.Tensor) -> int:
        view = self._views.get(id(tensor))
        return id(tensor) if view is None else view.root

    def _write(self, tensor: torch.Tensor, number: int) -> None:
        """Give a tensor that was written in place its new value, and the memory that it is a view of."""
        view = self._views.get(id(tensor))
        if view is None:
            self._value_of[id(tensor)] = number
            self._written.add(id(tensor))
            self._kept.append(tensor)
            return
        if view.template is None:
            self._write(view.parent, number)
            return
        old = self.read(view.parent)
        self._value_of[id(tensor)] = number
        whole = self._write_back(view, old, number)
        self._write(view.parent, whole)
        view.parent_value = whole

    def _write_back(self, view: View, old: int, number: int) -> int:
        """The op that puts a written view into the tensor that it is a view of."""
        assert view.template is not None
        piece = view.template.pieces[-1]
        of_parent, of_view = piece.labelled.labels[0], piece.labelled.labels[1 + view.output]
        parent, written = self.values[old], self.values[number]
        whole = self._new(parent.shape, parent.dtype)
        name = f"{view.name}/write"
        if piece.kind == "view":
            op = Recorded("view", name, (number,), (whole,), Labelled((of_view, of_parent)), self._stack[-1])
        else:
            sizes = dict(zip(of_view, written.shape, strict=True))
            kept = tuple(n if sizes.get(n) == size else -1 for n, size in zip(of_parent, parent.shape, strict=True))
            inner = tuple(n if n in kept else -1 for n in of_view)
            op = Recorded("scatter", name, (old, number), (whole,), Labelled((kept, inner, kept)), self._stack[-1])
        self.ops.append(op)
        return whole

    # -- ops -----------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = self._functions.get(func)
        if known is None:
            known = self._functions[func] = Func(func)
        if known.name in BOOLEAN and id(args[0]) in self._drawn and args[0].dtype == torch.bool:
            self.met_chance = True
            return self.chance
        if known.reads and masks_of(func, args) != []:
            self.note_reading()
        try:
            if known.silent:
                return func(*args, **kwargs)
            if known.composite and (known.rule is None or not _is_whole(known.name, args)):
                made = self._taken_apart(func, known, args, kwargs)
                if made is not NotImplemented:
                    return made
            return self._record(func, known, args, kwargs)
        except Exception:
            if self.failed_op is None:
                self.failed_op, self.failed_path = known.name, self.path
            raise

    def _taken_apart(self, func: Any, known: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a composite op, of which the ops that it is made of are recorded."""
        if self._inside or not torch.is_grad_enabled():
            with self:
                return func.decompose(*args, **kwargs)
        inputs: list[torch.Tensor] = []
        given = key_of(args, inputs), key_of(tuple(kwargs.items()), inputs)
        key = func, *given, tuple(map(_strides, inputs)), tuple(map(self._reaches, inputs))
        numbers = [self._value_of.get(id(tensor)) for tensor in inputs]
        first = len(self.ops)
        self._inside = True
        try:
            with self:
                made = func.decompose(*args, **kwargs)
        finally:
            self._inside = False
        ops = self.ops[first:]
        if len(ops) > 1 and any(key[-1]) and is_seen_whole(known.name, {op.kind for op in ops}):
            outputs = [self._value_of.get(id(tensor)) for tensor in tensors_in(made)]
            form_key = key, tuple(numbers.index(n) for n in numbers)
            form = self._forms.get(form_key)
            if form is None:
                pieces = pieces_of([(op.kind, op.inputs, op.outputs) for op in ops], numbers, outputs)
                outer = len(numbers) + len(outputs)
                form = form_of(func, args, kwargs, self._reaches, known.writes, pieces, outer)
                self._forms[form_key] = form
            if len(form.pieces) == len(ops):
                self.ops[first:] = [replace(op, whole=form, part=part) for part, op in enumerate(ops)]
        return made

    def _record(self, func: Any, known: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs: list[torch.Tensor] = []
        key: list[Any] = [func]
        for value in args:
            key.append(key_of(value, inputs))
        for name, value in kwargs.items():
            if name not in known.writes:  # an ``out=`` tensor's old value is not an input
                key.append((name, key_of(value, inputs)))
        refs = [ref_of(i, t) for i, t in enumerate(inputs)] if known.reshapes else None
        result = self._inferred.run(func, args, kwargs)
        given = by_name(known.schema, args, kwargs) if known.writes else {}
        written = [t for name in known.writes for t in tensors_in(given.get(name))]
        outputs = list(tensors_in(result))
        self._note_flow(known, inputs, outputs, written)
        if all(id(t) in self._drawn for t in inputs) if inputs else known.draws:
            self._drawn.update(map(id, outputs))
            self._kept += outputs
        if not outputs:
            outputs = written
        if not outputs:
            return result
        if not written and inputs:
            first, source = outputs[0], inputs[0]
            if known.passing or (len(outputs) == 1 and first is source):
                if first is not source:
                    self._alias(first, source)
                return result
            shares = known.views and memory_of(first) == memory_of(source)
            if shares and first.shape == source.shape and _same_geometry(first, source):
                for out in outputs:
                    self._alias(out, source)
                return result
        else:
            shares = False
        numbers = [self.read(t) for t in inputs]
        key.append(shares)
        key.extend((out.shape, out.dtype) for out in outputs)
        cache_key = tuple(key)
        refs = refs or [ref_of(i, t) for i, t in enumerate(inputs)]
        template = self._template(cache_key, known, args, kwargs, refs, outputs, shares)
        made = self._emit(template, known.name, numbers, self._stack[-1])
        first_piece = template.pieces[0] if template.pieces else None
        if all(piece.kind in SEEN_KINDS for piece in template.pieces) or (
            first_piece is not None and keeps_copies(known.name, first_piece.suffix, inputs)
        ):
            flows = tuple(map(self._reaches, inputs))
            if any(flows):
                form_key = cache_key, flows, tuple([numbers.index(n) for n in numbers]), tuple(map(_strides, inputs))
                form = self._forms.get(form_key)
                if form is None:
                    pieces = [(piece.inputs, piece.outputs) for piece in template.pieces]
                    outer = len(inputs) + len(outputs)
                    form = form_of(func, args, kwargs, self._reaches, known.writes, pieces, outer)
                    self._forms[form_key] = form
                for piece in range(len(template.pieces)):
                    place = piece - len(template.pieces)
                    self.ops[place] = replace(self.ops[place], form=form, piece=piece)
        for i, out in enumerate(outputs):
            if known.reshapes:  # as by `unsqueeze_`: another view of the same memory from now on
                self._views.pop(id(out), None)
            elif any(out is t for t in written):
                self._write(out, made[i])
                continue
            self._value_of[id(out)] = made[i]
            self._kept.append(out)
            if shares:
                self._views[id(out)] = View(
                    inputs[0], self._root(inputs[0]), template, known.name, self._stack[-1], i, numbers[0]
                )
        return result

    def _note_flow(
        self, known: Func, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        if known.name.endswith(".detach") or known.creates or not any(map(self._reaches, inputs)):
            return
        sets = [self._reaching]
        if torch.is_grad_enabled() and any(map(self.flows, inputs)):
            sets.append(self._flowing)
        changed = {id(tensor) for tensor in written}
        for tensor in (*outputs, *written):
            if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
                self._kept.append(tensor)
                for found in sets:
                    found.add(id(tensor))
                    if id(tensor) in changed:
                        found.add(self._root(tensor))

    def _template(
        self,
        key: tuple[Any, ...],
        known: Func,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refs: list[Ref],
        outputs: Sequence[torch.Tensor],
        shares: bool,
    ) -> Template:
        found = self._templates.get(key)
        if found is not None:
            return found
        outs = [ref_of(len(refs) + i, t) for i, t in enumerate(outputs)]
        call = OpCall(known.name.rpartition(".")[2], bind(known, args, kwargs, refs), refs, outs, shares_memory=shares)
        if known.rule is not None:
            if call.name not in RULES and call.name.endswith("_"):
                call.name = call.name[:-1]
            known.rule(call)
        elif known.pointwise:
            call.add("elementwise", refs, outs, labels.elementwise([r.shape for r in refs], [o.shape for o in outs]))
        else:
            kind: OpKind = "view" if shares else ("opaque" if refs else "create")
            call.add(kind, refs, outs, labels.opaque([r.shape for r in refs], [o.shape for o in outs]))
        template = call.template()
        self._templates[key] = template
        return template

    def _emit(self, template: Template, name: str, inputs: Sequence[int], call: int) -> list[int]:
        """Append the template's ops to the record, and return the numbers of their outputs."""
        made = [self._new(ref.shape, ref.dtype) for ref in template.outputs]
        slots = [*inputs, *made, *(self._new(ref.shape, ref.dtype) for ref in template.between)]
        for piece in template.pieces:
            self.ops.append(
                Recorded(
                    piece.kind,
                    name + piece.suffix,
                    tuple([slots[i] for i in piece.inputs]),
                    tuple([slots[i] for i in piece.outputs]),
                    piece.labelled,
                    call,
                )
            )
        return made


def _same_geometry(first: torch.Tensor, second: torch.Tensor) -> bool:
    return (
        first.dtype == second.dtype
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
        and first.stride() == second.stride()
        and first.storage_offset() == second.storage_offset()
    )


def _is_whole(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a composite op of the table is recorded as one op, for these arguments."""
    return name != "aten.einsum" or is_plain_einsum(args[0], len(args[1]))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout is torch.strided else ()
