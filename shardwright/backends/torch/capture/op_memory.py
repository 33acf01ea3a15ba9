"""What autograd keeps of an op, and what its passes hold for a while: every kind of call is run once, without values.

The call is made again on tensors of its shapes, with a backward, and every storage is followed that lives meanwhile.
Calls are seen with the sizes of both runs of a capture, so that bytes are linear in the batch, and in float32 as in 16
bits. An op that fails without values is run with values, if it is small; one that fails then too is counted from
above.
"""

import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch

from shardwright.backends.torch.compat import FakeTensor, FakeTensorMode, TorchDispatchMode
from shardwright.core.model.op_memory import Line, OpBytes, OpMemory

REAL_LIMIT_BYTES = 2**26
"""The largest operand, in bytes, with which an op is run for real."""
SMALL_ENTRIES = 2**16
SMALL_SHARE = 8
"""A gradient that has this many times fewer bytes than its tensor repeats numbers."""
SEEN_KINDS = frozenset({
    "elementwise", "reduction", "softmax", "normalization", "copy", "sort", "opaque", "gather", "scatter", "concat",
})  # fmt: skip
"""The kinds of op whose memory is what autograd holds for the call itself. Of the others it follows from the kind."""
REMEMBERED_CALLS = 4096
FREE_KINDS = frozenset({"view", "slice", "create"})
RECURRENT = frozenset({"aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu"})


@dataclass(frozen=True, slots=True)
class Form:
    """A tensor without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    flows: bool
    """Whether a gradient flows through it."""
    first: int
    """The place of the same tensor among the inputs, the first time that it is given."""
    values: torch.Tensor | None
    """The values of a small tensor of integers, where it has any."""

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class CallForm:
    """A call of an op without values, and the core's ops that stand for it.

    Attributes:
        pieces: for each of these its inputs and outputs as the call numbers its tensors: the inputs, then the outputs,
            then the values between the pieces.
        inputs: of each piece the number of inputs.
        outer: the number of the call's own inputs and outputs.
        flowing: those through which gradients flow.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    pieces: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outer: int
    flowing: frozenset[int]

    @property
    def head(self) -> int:
        """The piece that stands for the whole call: the first one through which a gradient flows."""
        return next(n for n, slots in enumerate(self.pieces) if not self.flowing.isdisjoint(slots[: self.inputs[n]]))


def form_of(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flows: Callable[[torch.Tensor], bool],
    writes: Sequence[str],
    pieces: Sequence[tuple[Sequence[int], Sequence[int]]],
    outer: int,
) -> CallForm:
    """The form of a call. ``writes`` names the arguments that it writes, and that it is given by name alone;
    ``pieces`` gives the inputs and outputs of each."""
    places: dict[Any, int] = {}
    flowing: set[int] = set()

    def form(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            strides = value.stride() if value.layout is torch.strided else ()
            place = places["count"] = places.get("count", -1) + 1
            first = places.setdefault(id(value), place)
            if flows(value):
                flowing.add(first)
            return Form(tuple(value.shape), strides, value.dtype, first in flowing, first, _values(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(form, value)) if isinstance(value, tuple) else list(map(form, value))
        return value

    given = tuple((name, form(value)) for name, value in kwargs.items() if name not in writes)
    return CallForm(
        func,
        form(tuple(args)),
        given,
        tuple((*inputs, *outputs) for inputs, outputs in pieces),
        tuple(len(inputs) for inputs, _ in pieces),
        outer,
        frozenset(flowing),
    )


def _typed_as(call: CallForm, other: CallForm) -> CallForm:
    """A call with the dtypes of another one of the same form."""

    def typed(value: Any, like: Any) -> Any:
        if isinstance(value, Form):
            return replace(value, dtype=like.dtype)
        if isinstance(value, (list, tuple)):
            made = [typed(*pair) for pair in zip(value, like, strict=True)]
            return tuple(made) if isinstance(value, tuple) else made
        return like if isinstance(value, torch.dtype) else value

    return replace(call, args=typed(call.args, other.args), kwargs=typed(call.kwargs, other.kwargs))


def is_seen_whole(name: str, kinds: Collection[str]) -> bool:
    """Whether the memory of a composite op, made of ops of these kinds, is that of the whole call."""
    return name in RECURRENT or (not SEEN_KINDS.isdisjoint(kinds) and SEEN_KINDS.union(FREE_KINDS).issuperset(kinds))


def pieces_of(
    ops: Sequence[tuple[str, Sequence[int], Sequence[int]]],
    inputs: Sequence[int | None],
    outputs: Sequence[int | None],
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The inputs and outputs of the ops that a call is made of, each (kind, inputs, outputs), in the call's numbers.
    None where the call's own tensors are not among those of the ops."""
    slots: dict[int, int] = {}
    for slot, number in enumerate((*inputs, *outputs)):
        if number is not None:
            slots.setdefault(number, slot)
    for kind, given, made in reversed(ops):  # a result that is a view: the memory is that of what it is a view of
        if kind == "view" and made[0] in slots and slots[made[0]] >= len(inputs):
            slots.setdefault(given[0], slots[made[0]])
    between = itertools.count(len(inputs) + len(outputs))

    def numbered(numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(slots[n] if n in slots else slots.setdefault(n, next(between)) for n in numbers)

    return [(numbered(given), numbered(made)) for _, given, made in ops]


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a small tensor of integers; None where it has none."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return None
    return tensor.detach().to("cpu", copy=True) if tensor.numel() <= SMALL_ENTRIES else None


@dataclass(frozen=True, slots=True)
class _Seen:
    """One run of a call. Positions are slots of the call."""

    keeps: frozenset[int]
    handed_on: frozenset[int]
    weightless: frozenset[int]
    kept: int
    forward: int
    backward: int
    """The most in the backward beside what it reads and the gradients of the results."""
    gradients: tuple[int, ...]
    """The bytes of the gradient that each input is given; 0 where it has no memory of its own."""
    shapes: tuple[tuple[int, ...], ...]
    """The shapes of the inputs and of the outputs."""

    def grows_along_two_dims(self, other: "_Seen") -> bool:
        """Whether a tensor of the other run is larger along several dims, so that bytes are no line in the batch."""
        return any(
            len(mine) != len(theirs) or sum(a != b for a, b in zip(mine, theirs, strict=True)) > 1
            for mine, theirs in zip(self.shapes, other.shapes, strict=False)
        )


_NOT_YET: Any = object()
_seen: dict[Any, _Seen | None] = {}
"""The runs of calls so far, in all captures of this process."""


class OpMemories:
    """The memory of the calls of one capture; equal calls are run once."""

    def __init__(self, sizes: tuple[int, int], *, narrow: bool) -> None:
        """``narrow``: whether the second run of the capture was in 16 bits."""
        self._sizes, self._narrow = sizes, narrow
        self._seen: dict[tuple[int, bool], _Seen | None] = {}
        self._found: dict[tuple[int, int], tuple[OpMemory, ...]] = {}
        self._calls: list[CallForm] = []

    def of(self, small: CallForm, large: CallForm | None) -> tuple[OpMemory, ...]:
        """The memory of the pieces of a call, seen at both batch sizes; ``large``: None where it is the same at
        both."""
        large = large or small
        key = id(small), id(large)
        if key not in self._found:
            self._calls += [small, large]  # so that their ids stay theirs
            self._found[key] = self._combined(small, large)
        return self._found[key]

    def _combined(self, small: CallForm, large: CallForm) -> tuple[OpMemory, ...]:
        try:
            wide, narrow = self._runs(small, large)
        except (ValueError, AttributeError, TypeError):  # the calls differ in more than their sizes
            return _unknown(small)
        runs = [seen for seen in (*wide, *narrow) if seen is not None]
        same = (small.func, small.pieces, small.inputs, small.outer) == (
            large.func, large.pieces, large.inputs, large.outer
        )  # fmt: skip
        if len(runs) < len(wide) + len(narrow) or not same or _is_no_line(*wide) or _is_no_line(*narrow):
            return _unknown(small)
        keeps = set(frozenset.union(*(seen.keeps for seen in runs)))
        handed_on = frozenset.intersection(*(seen.handed_on for seen in runs))
        weightless = frozenset.intersection(*(seen.weightless for seen in runs))
        found, head = [], small.head
        for piece, (slots, inputs) in enumerate(zip(small.pieces, small.inputs, strict=True)):
            kept = [place for place, slot in enumerate(slots) if slot in keeps]
            keeps -= set(slots)
            found.append(
                OpMemory(
                    tuple(kept),
                    tuple(n for n in range(inputs) if slots[n] in handed_on or slots[n] >= small.outer),
                    tuple(n for n in range(inputs) if slots[n] in weightless),
                    tuple(n for n, slot in enumerate(slots) if slot >= small.outer),
                    self._bytes(*wide, slots, small.outer, is_head=piece == head),
                    self._bytes(*narrow, slots, small.outer, is_head=piece == head),
                )
            )
        return tuple(found)

    def _runs(
        self, small: CallForm, large: CallForm
    ) -> tuple[tuple[_Seen | None, _Seen | None], tuple[_Seen | None, _Seen | None]]:
        """The runs at both batch sizes, in float32 and in 16 bits. In 16 bits a call has the dtypes of the second run,
        which has in float32 what the model casts to that."""
        in_16_bits = (_typed_as(small, large), large) if self._narrow else (small, large)
        wide = self._run(small, narrow=False), self._run(_typed_as(large, small), narrow=False)
        small_narrow, large_narrow = (self._run(call, narrow=not self._narrow) for call in in_16_bits)
        narrow = small_narrow, large_narrow
        return (narrow if None in wide else wide), (wide if None in narrow else narrow)

    def _bytes(
        self, small: _Seen | None, large: _Seen | None, slots: Sequence[int], outer: int, *, is_head: bool
    ) -> OpBytes:
        """The bytes of one piece of a call. What is kept and what the forward holds is counted at the ``is_head`` one,
        what the backward holds where the gradients of results arrive."""
        assert small is not None
        assert large is not None
        inputs = len(small.gradients)
        backward = []
        for seen in (small, large):
            given = {slot for slot in slots if slot < inputs}
            backward.append(seen.backward - sum(seen.gradients[slot] for slot in given))
        return OpBytes(
            self._line(small.kept, large.kept) if is_head else (0, 0),
            self._line(small.forward, large.forward) if is_head else (0, 0),
            self._line(*backward) if any(inputs <= slot < outer for slot in slots) else (0, 0),
        )

    def _line(self, small: int, large: int) -> Line:
        each = (large - small) // (self._sizes[1] - self._sizes[0])
        return small - each * self._sizes[0], each

    def _run(self, call: CallForm, *, narrow: bool) -> _Seen | None:
        key = id(call), narrow
        if key not in self._seen:
            self._calls.append(call)
            self._seen[key] = seen_of(call, narrow=narrow)
        return self._seen[key]


def _unknown(call: CallForm) -> tuple[OpMemory, ...]:
    """The pieces of a call whose memory is not known."""
    return tuple(OpMemory(keeps=tuple(range(len(slots))), is_known=False) for slots in call.pieces)


def _is_no_line(small: _Seen | None, large: _Seen | None) -> bool:
    """Whether bytes of a call beside its tensors grow faster than the batch, as those of all pairs of samples do."""
    if small is None or large is None:
        return False
    held = (large.kept, large.forward, large.backward - sum(large.gradients))
    return small.grows_along_two_dims(large) and any(size > 0 for size in held)


def seen_of(call: CallForm, *, narrow: bool) -> _Seen | None:
    """A run of the call, as it is or ``narrow``, with bfloat16 in the place of float32; None where it fails. The last
    `REMEMBERED_CALLS` are remembered, for captures of models with the same calls."""
    try:
        given = (_hashable(part) for part in (call.func, call.args, call.kwargs))
        key = *given, call.pieces, call.inputs, call.outer, call.flowing, narrow
        found = _seen.get(key, _NOT_YET)
    except (TypeError, RuntimeError):  # an argument without a hash, a tensor without bytes
        return _seen_anew(call, narrow=narrow)
    if found is _NOT_YET:
        if len(_seen) >= REMEMBERED_CALLS:
            _seen.clear()
        found = _seen[key] = _seen_anew(call, narrow=narrow)
    known: _Seen | None = found
    return known


def _seen_anew(call: CallForm, *, narrow: bool) -> _Seen | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # The workspace of oneDNN's recurrent layers is empty without values.
        ways = (False, True) if call.func._schema.name == "aten::lstm" else (True, False)
        # An op of the user's is never run for real: it may do more than compute.
        for is_fake in ways if call.func.namespace == "aten" else (True,):
            try:
                return _Trial(call, narrow=narrow, is_fake=is_fake).run()
            except Exception:
                continue
    return None


def _hashable(value: Any) -> Any:
    """An argument that equal ones equal; numbers by type too, as 1 and 1.0 make other results."""
    if isinstance(value, Form):
        values = None if value.values is None else sha256(value.values.numpy().tobytes()).digest()
        return value.shape, value.strides, value.dtype, value.flows, value.first, values
    if isinstance(value, (list, tuple)):
        return type(value), *map(_hashable, value)
    return type(value), value


class _Live(TorchDispatchMode):
    """The bytes of all storages that live: those noted, and those made while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.now = self.most = 0
        self._serials: dict[int, int] = {}
        """Address → number, of storages that live: an address is used again."""
        self._numbers = itertools.count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.note(tensor)
        return result

    def note(self, tensor: torch.Tensor) -> int:
        """The storage of a tensor, by number; it is followed from now on."""
        storage = tensor.untyped_storage()
        address = int(storage._cdata)
        if address not in self._serials:
            number = self._serials[address] = next(self._numbers)
            self.sizes[number] = size = storage.nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, address)
        return self._serials[address]

    def _gone(self, address: int) -> None:
        self.now -= self.sizes.pop(self._serials.pop(address))


class _Source(torch.autograd.Function):
    """A tensor of its own memory that is no leaf; what gradient it gets is noted."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, form: Any, slot: int, trial: Any) -> torch.Tensor:
        ctx.slot, ctx.trial = slot, trial
        return trial.empty(form)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.trial.gradients[ctx.slot] = gradient
        return None, None, None, None


class _Target(torch.autograd.Function):
    """A scalar of some tensors, whose backward makes their gradients."""

    @staticmethod
    def forward(ctx: Any, trial: Any, *outputs: torch.Tensor) -> torch.Tensor:
        ctx.trial, ctx.forms = trial, [(tuple(t.shape), t.dtype) for t in outputs]
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        made = [torch.zeros(shape, dtype=dtype) for shape, dtype in ctx.forms]
        ctx.trial.given = {ctx.trial.live.note(t): t.untyped_storage().nbytes() for t in made}
        return None, *made


class _Trial:
    """One run of a call, forward and backward."""

    def __init__(self, call: CallForm, *, narrow: bool, is_fake: bool) -> None:
        self.call, self.narrow, self.is_fake = call, narrow, is_fake
        self.live = _Live()
        self.gradients: dict[int, torch.Tensor] = {}
        self.given: dict[int, int] = {}
        self._sources: list[torch.Tensor] = []
        self._scalar_bytes = 0

    def run(self) -> _Seen:
        """The run, whatever modes, hooks and random state the caller has."""
        mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
        if not self.is_fake:
            mode = torch.random.fork_rng(devices=[])
        as_they_are = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with torch.inference_mode(False), torch.enable_grad(), torch.device("cpu"), as_they_are, mode, self.live:
            return self._run()

    def _dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.narrow and dtype is torch.float32 else dtype

    def empty(self, form: Form) -> torch.Tensor:
        made = torch.empty_strided(form.shape, form.strides, dtype=self._dtype(form.dtype))
        return made if self.is_fake else made.zero_()

    def _made(self, value: Any) -> Any:
        """An argument with tensors in the place of their forms."""
        if isinstance(value, Form):
            if value.first < len(self._sources):
                self._sources.append(self._sources[value.first])
                return self._sources[value.first]
            if not self.is_fake and value.size_bytes > REAL_LIMIT_BYTES:
                raise MemoryError(f"an operand of {value.size_bytes} bytes")
            if value.flows:
                leaf = torch.empty((), dtype=self._dtype(value.dtype), requires_grad=True)
                self._scalar_bytes += leaf.nbytes
                tensor = _Source.apply(leaf, value, len(self._sources), self)  # type: ignore[no-untyped-call]
            else:
                tensor = self.empty(value) if self.is_fake or value.values is None else value.values.clone()
            self._sources.append(tensor)
            return tensor
        if isinstance(value, (list, tuple)):
            made = [self._made(item) for item in value]
            return tuple(made) if isinstance(value, tuple) else made
        return self._dtype(value) if isinstance(value, torch.dtype) else value

    def _run(self) -> _Seen:
        live = self.live
        args, kwargs = self._made(self.call.args), {k: self._made(v) for k, v in self.call.kwargs}
        of_input = [live.note(tensor) for tensor in self._sources]
        input_bytes = [_own_bytes(tensor) for tensor in self._sources]
        before = live.now
        live.most = before
        result = self.call.func(*args, **kwargs)
        outputs = list(tensors_in(result))
        if not outputs:
            raise ValueError("no results")
        of_output = [live.note(tensor) for tensor in outputs]
        inputs = len(of_input)
        first_piece = self.call.pieces[self.call.head]
        made_first = [_own_bytes(t) for i, t in enumerate(outputs) if inputs + i in first_piece]
        forward = live.most - before - sum(made_first)
        shapes = tuple(tuple(tensor.shape) for tensor in (*self._sources, *outputs))
        flowing = [tensor for tensor in outputs if tensor.requires_grad]
        if not flowing and any(tensor.is_floating_point() for tensor in outputs):
            raise ValueError("a gradient ends here")
        end = _Target.apply(self, *flowing) if flowing else None  # type: ignore[no-untyped-call]
        del result, outputs, flowing, args, kwargs
        self._sources.clear()
        first = torch.ones(())
        keeps = frozenset(
            [inputs + i for i, number in enumerate(of_output) if number in live.sizes]
            + [i for i, number in enumerate(of_input) if number in live.sizes and number not in of_output]
        )
        named_slots = keeps.intersection(*[itertools.chain.from_iterable(self.call.pieces)])
        named = {of_input[s] if s < inputs else of_output[s - inputs] for s in named_slots}
        read = live.now
        scalars = (self._scalar_bytes if end is not None else 0) + (0 if end is None else end.nbytes) + first.nbytes
        kept = read - scalars - sum(live.sizes[number] for number in named)
        forward -= kept
        live.most = read
        if end is None:
            return _Seen(keeps, frozenset(), frozenset(), kept, forward, 0, (0,) * inputs, shapes)
        end.backward(first)
        made, handed_on, weightless = [0] * inputs, set(), set()
        for slot, gradient in self.gradients.items():
            if gradient.untyped_storage().nbytes() * SMALL_SHARE <= input_bytes[slot]:
                weightless.add(slot)
            elif live.note(gradient) in self.given:
                handed_on.add(slot)
            else:
                made[slot] = input_bytes[slot]
        backward = live.most - read - sum(self.given.values())
        return _Seen(keeps, frozenset(handed_on), frozenset(weightless), kept, forward, backward, tuple(made), shapes)


def _own_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the entries of a tensor."""
    return tensor.numel() * tensor.element_size()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a result."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
