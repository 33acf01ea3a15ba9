"""Runs of calls without values, forward and backward: every storage is followed that lives meanwhile.

An op of torch's that fails without values is run with values, if it is small. An op of the user's never is.
"""

import itertools
import warnings
import weakref
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch

from shardwright.backends.torch.capture.call_forms import CallForm, Form, tensors_in
from shardwright.backends.torch.compat import FakeTensorMode, TorchDispatchMode

REAL_LIMIT_BYTES = 2**26
"""The largest operand, in bytes, with which an op is run for real."""
SMALL_SHARE = 8
"""A gradient that has this many times fewer bytes than its tensor repeats numbers."""
REMEMBERED_CALLS = 4096


@dataclass(frozen=True, slots=True)
class Seen:
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

    def grows_along_two_dims(self, other: "Seen") -> bool:
        """Whether a tensor of the other run is larger along several dims, so that bytes are no line in the batch."""
        return any(
            len(mine) != len(theirs) or sum(a != b for a, b in zip(mine, theirs, strict=True)) > 1
            for mine, theirs in zip(self.shapes, other.shapes, strict=False)
        )


_NOT_YET: Any = object()
_seen: dict[Any, Seen | None] = {}
"""The runs of calls so far, in all captures of this process."""


def seen_of(call: CallForm, *, narrow: bool) -> Seen | None:
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
    known: Seen | None = found
    return known


def _seen_anew(call: CallForm, *, narrow: bool) -> Seen | None:
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

    def run(self) -> Seen:
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

    def _run(self) -> Seen:
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
            return Seen(keeps, frozenset(), frozenset(), kept, forward, 0, (0,) * inputs, shapes)
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
        return Seen(keeps, frozenset(handed_on), frozenset(weightless), kept, forward, backward, tuple(made), shapes)


def _own_bytes(tensor: torch.Tensor) -> int:
    """The bytes of the entries of a tensor."""
    return tensor.numel() * tensor.element_size()
