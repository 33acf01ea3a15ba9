"""Capture that keeps, beside the core's graph, the calls that its ops came from, so that they can be run again.

One run makes both, so calls and ops are aligned one to one. Calls are kept in functional form: a tensor written in
place is a new value. Sizes among the arguments are linear in the batch, like those of tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch import CAPABILITIES
from shardwright.backends.torch.capture.batch_dims import Leaf, Sample
from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.capture.host_draws import host_state
from shardwright.backends.torch.capture.model import _NeedsValuesError, _Run, _Session, own_loss
from shardwright.backends.torch.capture.op_schemas import Func
from shardwright.backends.torch.capture.ops import Ref, Template
from shardwright.backends.torch.capture.recorder import Recorder, View
from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.capture.unflatten import unflatten_products, without_unused
from shardwright.backends.torch.compat import FakeTensor
from shardwright.backends.torch.program.program import Context
from shardwright.backends.torch.program.randomness import draws
from shardwright.core.errors import CaptureError
from shardwright.core.model.graph import Graph, Op, Tensor


class NotReplayableError(CaptureError):
    """A model's ops cannot be run again one by one: it runs whole on every rank of the tensor axis instead."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor among the arguments of a call: the call's ``index``-th input."""

    index: int


@dataclass(frozen=True, slots=True)
class Size:
    """A number among the arguments that grows with the batch."""

    fixed: int
    per_sample: int | float

    def at(self, batch: int) -> int | float:
        return self.fixed + self.per_sample * batch


@dataclass(frozen=True, slots=True)
class Site:
    """One call of an aten op, and the core ops that it became."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    template: Template
    ops: tuple[int | None, ...]
    """The index in the graph of the op of each piece of the template; None where the graph did without it."""
    grad: bool
    """Whether gradients were enabled."""
    detached: tuple[bool, ...]
    """Whether the call was given the tensor of each slot without its history."""
    context: Context
    """The context of a random number drawn here."""
    inputs: tuple[int | None, ...]
    """The graph tensor that each slot reads; None for a tensor that the graph does not follow."""
    order: tuple[int, ...] = ()
    """The dims of the first input in the order of its memory, in the unsplit model: random numbers come in that
    order."""
    constants: tuple[tuple[int, torch.Tensor], ...] = ()
    """The (slot, value) of the constants that the graph does not follow."""
    is_write: bool = False
    """Whether this is not the call but its reverse: the part that it gives was written, and goes back into the
    whole."""

    @property
    def name(self) -> str:
        return str(self.function._schema.name).partition("::")[2]

    @property
    def draws(self) -> bool:
        """Whether the call may draw random numbers."""
        return draws(self.function, self.arguments, dict(self.keywords))


@dataclass(frozen=True, slots=True)
class Traced:
    """A captured model and the calls behind its ops."""

    graph: Graph
    sites: tuple[Site, ...]
    site_of_op: tuple[tuple[int, int], ...]
    """The (site, piece) of every op of the graph."""
    constants: dict[int, torch.Tensor]
    """Graph tensor → its value, for constants made outside the model's modules."""
    written: dict[int, int]
    """Graph tensor of a buffer → the value that the forward pass leaves in it, for the buffers that it writes to."""
    outputs: tuple[int | None, ...]
    """The graph tensor of every tensor that the model returns, as `tensors_in` finds them; None for a tensor that was
    not asked for."""


@dataclass(slots=True)
class _Draft:
    """A site under construction, from one run."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    template: Template
    first_op: int
    pieces: int
    grad: bool
    detached: tuple[bool, ...]
    context: Context
    slots: tuple[int, ...]
    order: tuple[int, ...]
    is_write: bool = False


class TracingRecorder(Recorder):
    """A recorder that keeps the calls."""

    def __init__(self, templates: dict[Any, Template], chance: bool = False) -> None:
        super().__init__(templates, chance)
        self.drafts: list[_Draft] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.left: dict[int, int] = {}
        """Value of a tensor that the model holds → the value that it holds in the end, where that is another one."""
        self._prototypes: dict[int, tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]] = {}
        self._detached: set[int] = set()
        self._given: tuple[bool, ...] = ()
        self._order: tuple[int, ...] = ()
        self._finished: dict[int, int] = {}
        self._held: list[tuple[int, torch.Tensor]] = []

    def refuse(self, reason: str) -> None:
        raise NotReplayableError(reason)

    def note_written(self) -> None:
        """Note, after the run, the tensors of the model that hold other values now."""
        for number, tensor in self._held:
            now = self.read(tensor)
            if now != number:
                self.left[number] = now

    def leave(self, given: Sequence[Any] = (), *, failed: bool) -> None:
        super().leave(given, failed=failed)
        self._finished[self._stack[-1]] = self._finished.get(self._stack[-1], 0) + 1

    def name(self, tensor: torch.Tensor, role: Any, name: str) -> int:
        number = super().name(tensor, role, name)
        if role == "constant" and not name:
            self.constants[number] = tensor
        elif role in ("buffer", "parameter", "constant"):
            self._held.append((number, tensor))
        return number

    def _record(self, func: Any, known: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs: list[torch.Tensor] = []
        _slots(args, inputs)
        _slots({k: v for k, v in kwargs.items() if k not in known.writes}, inputs)
        outer, self._given = self._given, tuple(id(t) in self._detached for t in inputs)
        self._order = _memory_order(inputs[0]) if inputs else ()
        try:
            result = super()._record(func, known, args, kwargs)
        finally:
            self._given = outer
        if known.passing:
            is_cut = known.name.endswith(".detach")
            for out in tensors_in(result):
                if is_cut or any(id(t) in self._detached for t in inputs):
                    self._detached.add(id(out))
        for out in tensors_in(result):
            view = self._views.get(id(out))
            if view is not None and view.template is None and id(view.parent) in self._detached:
                self._detached.add(id(out))
        return result

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
        found = super()._template(key, known, args, kwargs, refs, outputs, shares)
        if id(found) not in self._prototypes:
            slots: list[torch.Tensor] = []
            positional = _slots(args, slots)
            named = _slots({k: v for k, v in kwargs.items() if k not in known.writes}, slots)
            self._prototypes[id(found)] = (_functional(key[0], known), positional, tuple(named.items()))
        return found

    def _emit(self, template: Template, name: str, inputs: Sequence[int], call: int) -> list[int]:
        first = len(self.ops)
        made = super()._emit(template, name, inputs, call)
        given = self._given if len(self._given) == template.inputs else (False,) * template.inputs
        self._draft(template, first, call, given, inputs)
        return made

    def _write(self, tensor: torch.Tensor, number: int) -> None:
        if torch.is_grad_enabled():  # what is written brings its history
            self._detached.discard(id(tensor))
        super()._write(tensor, number)

    def _write_back(self, view: View, old: int, number: int) -> int:
        whole = super()._write_back(view, old, number)
        assert view.template is not None
        self._draft(view.template, len(self.ops) - 1, self._stack[-1], (False,) * view.template.inputs, ())
        self.drafts[-1].is_write = True
        self.drafts[-1].pieces = 1
        return whole

    def _draft(
        self, template: Template, first: int, call: int, detached: tuple[bool, ...], slots: Sequence[int]
    ) -> None:
        function, arguments, keywords = self._prototypes[id(template)]
        where = self.calls[call]
        context = (where.path, where.occurrence, self._finished.get(call, 0))
        self.drafts.append(
            _Draft(
                function, arguments, keywords, template, first, len(template.pieces), torch.is_grad_enabled(), detached,
                context, tuple(slots), self._order,
            )
        )  # fmt: skip


class _TracingSession(_Session):
    make_recorder = TracingRecorder
    asked: tuple[int, ...] | None = None
    returned = 0
    _host_state: tuple[Any, ...] = ()

    def runs(self) -> tuple[_Run, _Run]:
        """Both runs on fake tensors. Raises NotReplayableError where an op needs values."""
        try:
            return self.run_fake()
        except _NeedsValuesError as needs:
            raise NotReplayableError(f"{needs}: what it makes depends on values") from needs

    def _run(self, *args: Any) -> _Run:
        self._host_state = host_state()
        with replaced(torch.autograd.Function, "apply", _refuse_gradient):
            found = super()._run(*args)
        assert isinstance(found.recorder, TracingRecorder)
        found.recorder.note_written()
        return found

    def _result(self, output: Any) -> list[torch.Tensor]:
        if host_state() != self._host_state:
            raise NotReplayableError("it draws from Python's or NumPy's generator")
        found = tensors_in(output)
        asked = self.asked
        self.returned = len(found)
        if asked is None:
            loss = own_loss(output)
            return found if loss is None else [loss]
        return [found[i] for i in asked]


def trace(model: nn.Module, sample: Any, *, asked: tuple[int, ...] | None = None) -> Traced:
    """Capture a model and keep its calls.

    Args:
        asked: the tensors wanted of those that the model returns, by position among `tensors_in(output)`; by
            default its loss, or all where it returns none.

    Raises:
        CaptureError: as `capture` does.
        NotReplayableError: the model's ops depend on values, or have gradients of their own.
    """
    session = _TracingSession(model, sample if isinstance(sample, Sample) else Sample(sample), None, False)
    session.asked = asked
    small, large = session.runs()
    if small.recorder.met_chance:
        raise NotReplayableError("random numbers decide which modules of the model are called")
    graph = session.graph(small, large, CAPABILITIES)
    return _traced(graph, small, large, session)


class _PartSession(_TracingSession):
    """The session of a part of a model, on tensors as they are inside it."""

    def _fake_leaf(self, leaf: Leaf, size: int, compute: torch.dtype | None = None) -> torch.Tensor:
        given = leaf.tensor
        made = torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cpu")
        return made.requires_grad_(given.requires_grad)


def trace_part(module: nn.Module, sample: Any, asked: tuple[int, ...]) -> Traced:
    """The trace, as by `trace`, of a module inside a model, at the sizes of the sample alone. Gradients flow into those
    tensors of the sample that require them."""
    session = _PartSession(module, Sample(sample, fixed=True), None, False)
    session.asked = asked
    small, large = session.runs()
    traced = _traced(session.graph(small, large, CAPABILITIES), small, large, session)
    tensors = list(traced.graph.tensors)
    for number, leaf in zip(traced.graph.inputs, session.sample.leaves, strict=True):
        if leaf.tensor.requires_grad:
            tensors[number] = replace(tensors[number], role="activation")
    return replace(traced, graph=replace(traced.graph, tensors=tuple(tensors)))


def _traced(graph: Graph, small: _Run, large: _Run, session: _TracingSession) -> Traced:
    a, b = small.recorder, large.recorder
    assert isinstance(a, TracingRecorder)
    assert isinstance(b, TracingRecorder)
    origin = _origins(a, small.outputs)
    if len(origin) != len(graph.ops) or any(a.ops[r].name != op.name for r, op in zip(origin, graph.ops, strict=True)):
        raise NotReplayableError(f"the calls of {graph.model_name} do not match its captured ops")
    in_graph = {recorded: i for i, recorded in enumerate(origin)}
    number = _numbers(graph, a, origin)
    site_of_op: list[tuple[int, int]] = [(-1, -1)] * len(graph.ops)
    sites: list[Site] = []
    for x, y in zip(a.drafts, b.drafts, strict=True):
        ops = tuple(in_graph.get(x.first_op + p) for p in range(x.pieces))
        for p, op in enumerate(ops):
            if op is not None:
                site_of_op[op] = (len(sites), p)
        sites.append(
            Site(
                x.function, _merged(x.arguments, y.arguments, x), tuple(
                    (k, _merged(v, w, x)) for (k, v), (_, w) in zip(x.keywords, y.keywords, strict=True)
                ), x.template, ops, x.grad, x.detached, x.context,
                tuple(number.get(n) for n in x.slots),
                x.order,
                tuple((i, a.constants[n]) for i, n in enumerate(x.slots) if n in a.constants and n not in number),
                x.is_write,
            )
        )  # fmt: skip
    constants = {number[old]: tensor for old, tensor in a.constants.items() if old in number}
    apart = [tensor for site in sites for _, tensor in site.constants]
    for tensor in (*constants.values(), *apart):
        if isinstance(tensor, FakeTensor):
            raise NotReplayableError("a tensor that the model made outside its forward pass has no value here")
    asked = session.asked
    if asked is None:
        outputs: tuple[int | None, ...] = graph.outputs
    else:
        places = dict(zip(asked, graph.outputs, strict=True))
        outputs = tuple(places.get(i) for i in range(session.returned))
    written = {number[n]: number[m] for n, m in a.left.items() if n in number and m in number}
    for held in written:
        if graph.tensors[held].role == "parameter":  # whose gradient does not flow through what is written
            raise NotReplayableError(f"it writes to its parameter {graph.tensors[held].name} in its forward pass")
    if len(written) != len(a.left):
        raise NotReplayableError("the model writes to a tensor that the captured graph does not follow")
    return Traced(graph, tuple(sites), tuple(site_of_op), constants, written, outputs)


def _origins(recorder: Recorder, outputs: tuple[int, ...]) -> list[int]:
    """The recorded op of every op of the graph: the graph leaves some out."""
    values = [Tensor(v.shape, (0,) * len(v.shape), v.dtype, v.role, v.name) for v in recorder.values]
    tagged = [
        Op(x.kind, x.name, x.inputs, x.outputs, x.labelled.labels, x.labelled.special, x.labelled.offsets, i)
        for i, x in enumerate(recorder.ops)
    ]
    kept, _, _ = without_unused(*unflatten_products(tagged, values, outputs), outputs)
    return [op.call for op in kept]


def _numbers(graph: Graph, recorder: Recorder, origin: Sequence[int]) -> dict[int, int]:
    """Recorded value → graph tensor, for the values that ops read or make, and those that the model holds."""
    named = {(t.role, t.name): n for n, t in enumerate(graph.tensors) if t.name}
    found = {n: named[v.role, v.name] for n, v in enumerate(recorder.values) if (v.role, v.name) in named and v.name}
    for i, r in enumerate(origin):
        op, recorded = graph.ops[i], recorder.ops[r]
        if op.kind != "contraction":
            found.update(zip((*recorded.inputs, *recorded.outputs), (*op.inputs, *op.outputs), strict=True))
    return found


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of dims in the memory of a mask for this tensor. Where the tensor's dims are expanded, or not dense,
    they come where torch puts them."""
    strides = torch.empty_like(tensor).stride()
    return tuple(sorted(range(tensor.dim()), key=lambda d: (-strides[d], d)))


def _slots(value: Any, found: list[torch.Tensor]) -> Any:
    """The arguments with a Slot in place of every tensor, in the order in which the recorder counts them."""
    if isinstance(value, torch.Tensor):
        found.append(value)
        return Slot(len(found) - 1)
    if isinstance(value, (list, tuple)):
        return tuple(_slots(item, found) for item in value)
    if isinstance(value, dict):
        return {key: _slots(item, found) for key, item in value.items()}
    return value


def _merged(small: Any, large: Any, draft: _Draft) -> Any:
    """One argument as both runs had it, at batch 2 and 3: a Size where it grows with the batch."""
    if isinstance(small, tuple) and isinstance(large, tuple) and len(small) == len(large):
        return tuple(_merged(x, y, draft) for x, y in zip(small, large, strict=True))
    if isinstance(small, int) and isinstance(large, int) and not isinstance(small, bool):
        return small if small == large else Size(small - 2 * (large - small), large - small)
    if isinstance(small, float) and isinstance(large, float) and small.is_integer() and 3 * small == 2 * large != 0:
        return Size(0, large - small)  # a number of tokens, as a float
    if small is large or small == large or (small != small and large != large):
        return small
    raise NotReplayableError(f"an argument of {draft.function} depends on the batch: {small!r} at 2, {large!r} at 3")


def _functional(func: Any, known: Func) -> Any:
    """The op that returns the tensor that an in-place op, or one with ``out=``, writes."""
    if not known.writes:
        return func
    base = func._schema.name.partition("::")[2]
    if known.writes[0] == "out":
        return _without_out(func)
    packet = getattr(torch.ops.aten, base[:-1], None) if base.endswith("_") and not base.endswith("__") else None
    overload = getattr(packet, func._overloadname, None) if packet is not None else None
    return func if overload is None else overload


def _without_out(func: Any) -> Any:
    """The overload of an op with the same arguments but ``out``."""

    def kinds(overload: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in overload._schema.arguments if a.alias_info is None]

    packet = func.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        if overload is not func and kinds(overload) == kinds(func) and not overload._schema.is_mutable:
            return overload
    raise NotReplayableError(f"{func._schema.name} writes into a tensor that it is given by out=")


@classmethod  # type: ignore[misc]
def _refuse_gradient(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a function with a gradient of its own: running the ops of its forward again would lose it."""
    raise NotReplayableError(f"{cls.__name__} has a gradient of its own (torch.autograd.Function)")
