"""Calls of modules, here or on the rank that owns them, and their backward."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from shardwright.backends.torch.capture.own_checkpoints import marked_paths
from shardwright.backends.torch.compat import keeps_current_graph
from shardwright.backends.torch.memory.kept_results import EachTime
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.backends.torch.training.messages.autograd_across_ranks import Gradients, as_inputs, as_outputs
from shardwright.backends.torch.training.messages.microbatch_threads import Fiber, Turns
from shardwright.backends.torch.training.messages.owners import Owners
from shardwright.backends.torch.training.messages.random_by_call import Draws
from shardwright.backends.torch.training.messages.remote_errors import Failure, again, describe, note_place
from shardwright.backends.torch.training.messages.remote_parameters import ProxyBuffer
from shardwright.backends.torch.training.messages.serialization import (
    Reference,
    State,
    mutable_objects,
    pack,
    put_state,
    same_state,
    state_of,
    unpack,
)
from shardwright.backends.torch.training.messages.thread_modes import Modes
from shardwright.backends.torch.training.messages.transport import Envelope, Kind, Wire
from shardwright.backends.torch.training.messages.written_state import Written, WrittenState
from shardwright.core.errors import ShardwrightError

Original = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class _Request:
    """A call as it travels. ``path`` is a module's, or with ``is_tensor`` the name of a parameter or buffer."""

    path: str
    is_tensor: bool
    modes: Modes
    data: bytes
    needs_grad: tuple[bool, ...]
    """Whether each tensor needs a gradient."""
    objects: int
    """The number of objects that a walk over the arguments meets."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a call. ``data`` packs the result, the (input, tensor) pairs of written tensors, and the (object,
    state) pairs of changed objects."""

    data: bytes
    needs_grad: tuple[bool, ...]


@dataclass(slots=True)
class _Served:
    """The outputs from which the backward of a served call starts, and the list for the gradients of its inputs."""

    path: str
    outputs: list[torch.Tensor]
    gradients: Gradients


class Calls:
    """One rank's calls: those that it makes and those that it serves.

    Args:
        before_backward: called before the first gradient of a step is added to a parameter's.
    """

    def __init__(
        self,
        owners: Owners,
        ownership: Ownership,
        wire: Wire,
        turns: Turns,
        draws: Draws,
        device: torch.device,
        who: str,
        ranks: Sequence[int],
        before_backward: Callable[[], None],
    ) -> None:
        self.owners, self.ownership, self.wire, self.turns, self.draws = owners, ownership, wire, turns, draws
        self.device, self.who, self.ranks = device, who, tuple(ranks)
        self.before_backward = before_backward
        self.microbatches: Sequence[Sequence[torch.Tensor]] = ()
        self._paths = {id(module): path for path, module in ownership.model.named_modules()}
        self._marked = marked_paths(ownership.model)
        self._recomputed = {id(module) for path, module in ownership.model.named_modules() if path in self._marked}
        """The modules that `set_activation_checkpointing` marks."""
        self._written: dict[tuple[str | bool, ...], Written] = {}
        """What their forward writes to, by path and modes: known once it has run."""
        self._served_inside: set[tuple[str | bool, ...]] = set()
        """The modules in marked ones of other ranks that set no attributes, by path and modes."""
        self._original: Original = nn.Module.__call__
        self.crossings = 0

    # The caller's side -------------------------------------------------------------------------------------------

    def module(self, original: Original, fiber: Fiber, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A call of any module by the code of a fiber."""
        path = self._paths.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        if self.owners.of_path[path] == self.wire.me:
            here = partial(self._here, original, fiber, module, path, kwargs)
            if id(module) in self._recomputed and torch.is_grad_enabled():
                modes = _modes_of(path, module)
                before = WrittenState(module, self._written.get(modes))
                contexts = partial(_checkpoint_contexts, before)
                result = torch_checkpoint.checkpoint(here, *args, use_reentrant=False, context_fn=contexts)
                if modes not in self._written:
                    self._written[modes] = before.keep_written()
                self._require_no_calls_between(path, self._written[modes].names)
                return result
            return here(*args)
        result = self._ask(fiber, self.owners.of_path[path], path, args, kwargs)
        self.draws.resume(fiber)
        return result

    def _here(
        self, original: Original, fiber: Fiber, module: nn.Module, path: str, kwargs: Any, *args: Any
    ) -> Any:  # fmt: skip
        """A call of a module that is on this rank; once more in the backward pass, where it is computed again."""
        with self.draws.call(fiber, path, fiber.backward_depth > 0):
            try:
                return original(module, *args, **kwargs)
            except Exception as error:
                note_place(error, _module(path))
                raise

    def _require_no_calls_between(self, path: str, written: Sequence[str]) -> None:
        """Raise ShardwrightError for a marked module that writes to buffers or attributes, and with modules on other
        ranks in it: it would wait for these with them as they were, and other microbatches would write to them."""
        inside = [p for p, owner in self.owners.of_path.items() if owner != self.wire.me and _is_in(p, path)]
        if written and inside:
            raise ShardwrightError(
                f"{_module(path)} is marked by set_activation_checkpointing, and its forward writes to "
                f"{written[0]}; the module {inside[0]!r} in it lies on rank "
                f"{self.ranks[self.owners.of_path[inside[0]]]}: mark the modules in it, and not all of it"
            )

    def require_here(self, function: str, args: Sequence[Any]) -> None:
        """Raise ShardwrightError for a module of another rank that is given to an autograd function: its backward may
        call more of the module than forward, which no message carries."""
        given = (item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,)))
        for module in (inner for item in given if isinstance(item, nn.Module) for inner in item.modules()):
            path = self._paths.get(id(module))
            if path is not None and self.owners.of_path[path] != self.wire.me:
                raise ShardwrightError(
                    f"{function}, an autograd function, is handed the module {path!r}, which lies on rank "
                    f"{self.ranks[self.owners.of_path[path]]}: its backward may call more of it than its forward, and "
                    f"use its parameters, which cannot be carried; run such a model without a pipeline "
                    f"(pipeline_parallel_degree=1), or let the function take tensors alone"
                )

    def fetch(self, fiber: Fiber, name: str) -> torch.Tensor:
        """The values of a parameter or buffer that another rank holds."""
        first = self.ownership.first_name[name]
        key = (first, torch.is_grad_enabled())
        if key not in fiber.fetched:
            placement = self.ownership.placement
            assert placement is not None
            fiber.fetched[key] = self._ask(fiber, placement.holders(first)[0], first, (), {}, is_tensor=True)
        return fiber.fetched[key]

    def _ask(self, fiber: Fiber, owner: int, path: str, args: Any, kwargs: Any, *, is_tensor: bool = False) -> Any:
        objects = mutable_objects((*args, *kwargs.values()))
        batch = {id(tensor): index for index, tensor in fiber.batch.items() if _untouched(tensor)}

        def refer(item: Any) -> Reference | None:
            if isinstance(item, torch.Tensor) and id(item) in batch:
                return ("batch", batch[id(item)])
            return self._reference(item)

        packed = pack((args, kwargs), refer, f"the arguments of {path!r}")
        modes = Modes.here(self.device, recomputing=fiber.backward_depth > 0)
        needs = tuple(modes.grad and tensor.requires_grad for tensor in packed.tensors)
        request = _Request(path, is_tensor, modes, packed.data, needs, len(objects))
        fiber.calls_made += 1
        call = fiber.calls_made
        self.crossings += 1
        self.wire.send(owner, Kind.CALL, fiber.microbatch, call, request, packed.tensors)
        answer = self._await(fiber, owner, call, f"the answer of {path!r}")
        return self._receive(fiber, owner, call, path, answer, packed.tensors, needs, objects)

    def _receive(
        self, fiber: Fiber, owner: int, call: int, path: str, answer: Envelope, given: Sequence[torch.Tensor],
        needs: Sequence[bool], objects: Sequence[Any],
    ) -> Any:  # fmt: skip
        """The result of a call, in the graph of this rank. Tensors and objects that the call wrote to are written
        here."""
        body: _Answer = answer.body
        tensors = [tensor.to(self.device) for tensor in answer.tensors]
        with_grad = [position for position, needed in enumerate(body.needs_grad) if needed]
        if with_grad:
            inputs = [tensor for tensor, needed in zip(given, needs, strict=True) if needed]

            def back(gradients: Gradients) -> Gradients:
                return self._ask_gradients(fiber, owner, call, path, gradients)

            made = as_outputs([tensors[position] for position in with_grad], inputs, back)
            for position, tensor in zip(with_grad, made, strict=True):
                tensors[position] = tensor

        def resolve(reference: Reference) -> Any:
            kind, value = reference
            if kind == "given":
                return given[value]
            if kind == "object":
                return objects[value]
            if kind == "batch":
                return fiber.batch[value]
            return self._named(reference)

        result, written, changed = unpack(body.data, tensors, resolve)
        for target, tensor in written:
            target.copy_(tensor)
        for target, state in changed:
            put_state(target, state)
        return result

    def _ask_gradients(self, fiber: Fiber, owner: int, call: int, path: str, gradients: Gradients) -> Gradients:
        if not fiber.backward_depth:
            raise ShardwrightError(
                "gradients are asked for inside the step, of what another rank computed: torch.autograd.grad and "
                "Tensor.backward do not work there; give the loss to model.backward"
            )
        present = tuple(gradient is not None for gradient in gradients)
        tensors = [gradient for gradient in gradients if gradient is not None]
        keep = keeps_current_graph()
        self.wire.send(owner, Kind.GRADIENT, fiber.microbatch, call, (present, keep), tensors)
        answer = self._await(fiber, owner, call, f"the gradients of {path!r}")
        return _spread(answer.body, [tensor.to(self.device) for tensor in answer.tensors])

    def _await(self, fiber: Fiber, owner: int, call: int, what: str) -> Envelope:
        """The answer of a call. Calls of this microbatch that come in the meantime are served."""
        while True:
            fiber.waits_for = (what, owner, time.monotonic())
            envelope = self.turns.take(fiber)
            fiber.waits_for = None
            if envelope.kind is Kind.RETURN and envelope.source == owner and envelope.call == call:
                return envelope
            if envelope.kind is Kind.RAISED:
                raise again(envelope.body)
            self.serve(fiber, envelope)

    # The owner's side --------------------------------------------------------------------------------------------

    def serve(self, fiber: Fiber, envelope: Envelope) -> None:
        """Answer a call or a request for gradients."""
        try:
            if envelope.kind is Kind.CALL:
                with self.draws.served(fiber):
                    self._serve_call(fiber, envelope)
            elif envelope.kind is Kind.GRADIENT:
                self._serve_gradients(fiber, envelope)
            else:
                raise ShardwrightError(f"a message {envelope.kind.name} came out of order from pp {envelope.source}")
        except Exception as error:
            failure: Failure = describe(error, self.who, fiber.microbatch)
            self.wire.send(envelope.source, Kind.RAISED, fiber.microbatch, envelope.call, failure)

    def _serve_call(self, fiber: Fiber, envelope: Envelope) -> None:
        request: _Request = envelope.body
        with request.modes.applied(self.device):
            tensors = [tensor.to(self.device) for tensor in envelope.tensors]
            with_grad = [position for position, needed in enumerate(request.needs_grad) if needed]
            gradients: Gradients = []
            if with_grad:
                made, gradients = as_inputs([tensors[position] for position in with_grad])
                for position, tensor in zip(with_grad, made, strict=True):
                    tensors[position] = tensor
            args, kwargs = unpack(request.data, tensors, lambda reference: self._resolve(fiber, reference))
            objects = mutable_objects((*args, *kwargs.values()))
            if len(objects) != request.objects:
                objects = []  # classes that pickle only a part of what they hold: they cannot be written back
            before = [state_of(item) for item in objects]
            watched = [*tensors, *fiber.batch.values()]
            versions = [_version(tensor) for tensor in watched]
            result = self._run(fiber, request, args, kwargs)
            written = [t for t, version in zip(watched, versions, strict=True) if _version(t) != version]
            after = [state_of(item) for item in objects]
            answer, outputs = self._answer(fiber, request.path, result, tensors, written, objects, before, after)
        needs = tuple(request.modes.grad and tensor.requires_grad for tensor in outputs)
        if any(needs):
            roots = [tensor for tensor, needed in zip(outputs, needs, strict=True) if needed]
            fiber.served[envelope.source, envelope.call] = _Served(request.path, roots, gradients)
        self.wire.send(envelope.source, Kind.RETURN, fiber.microbatch, envelope.call, _Answer(answer, needs), outputs)

    def _run(self, fiber: Fiber, request: _Request, args: Any, kwargs: Any) -> Any:
        if request.is_tensor:
            tensor = self.ownership.tensor(request.path)
            return tensor.view_as(tensor)
        fiber_depth = fiber.backward_depth
        fiber.backward_depth = fiber_depth + int(request.modes.recomputing)
        module = self.ownership.modules[request.path]
        marked = [path for path in self._marked if _is_in(request.path, path)]
        once_more = request.modes.recomputing and bool(marked)
        try:
            with WrittenState(module).as_before() if once_more else nullcontext():
                call = partial(self.module, self._original, fiber, module, args, kwargs)
                away = [path for path in marked if self.owners.of_path[path] != self.wire.me]
                return self._setting_nothing(request, module, away[0], call) if away and not once_more else call()
        finally:
            fiber.backward_depth = fiber_depth

    def _setting_nothing(self, request: _Request, module: nn.Module, marked: str, call: Callable[[], Any]) -> Any:
        """The result of a served call inside of a marked module of another rank. Raises ShardwrightError where it sets
        attributes, which a second run would not find as the first did."""
        modes = _modes_of(request.path, module)
        if modes in self._served_inside or not request.modes.grad:
            return call()
        before = WrittenState(module)
        result = call()
        if set_here := before.keep_written().attributes:
            raise ShardwrightError(
                f"{_module(marked)} is marked by set_activation_checkpointing and lies on rank "
                f"{self.ranks[self.owners.of_path[marked]]}; {_module(request.path)} in it lies on this one, and its "
                f"forward sets the attribute {set_here[0][1]!r}: mark the modules in it, and not all of it"
            )
        self._served_inside.add(modes)
        return result

    def _answer(
        self, fiber: Fiber, path: str, result: Any, given: Sequence[torch.Tensor], written: Sequence[torch.Tensor],
        objects: Sequence[Any], before: Sequence[State], after: Sequence[State],
    ) -> tuple[bytes, list[torch.Tensor]]:  # fmt: skip
        """The result, the written tensors with their new values, and the changed objects with their new states,
        packed."""
        known: dict[int, Reference] = {id(item): ("object", number) for number, item in enumerate(objects)}
        known |= {id(tensor): ("batch", index) for index, tensor in fiber.batch.items()}
        known |= {id(tensor): ("given", number) for number, tensor in enumerate(given)}
        changed = [
            (item, new) for item, old, new in zip(objects, before, after, strict=True) if not same_state(old, new)
        ]
        aliases = [(tensor, tensor.view_as(tensor)) for tensor in written]

        def refer(item: Any) -> Reference | None:
            return known.get(id(item)) or self._reference(item)

        packed = pack((result, aliases, changed), refer, f"the result of {path!r}")
        return packed.data, packed.tensors

    def _serve_gradients(self, fiber: Fiber, envelope: Envelope) -> None:
        present, keep = envelope.body
        tensors = [tensor.to(self.device) for tensor in envelope.tensors]
        key = (envelope.source, envelope.call)
        served: _Served = fiber.served[key] if keep else fiber.served.pop(key)
        gradients = _spread(present, tensors)
        roots = [(t, g) for t, g in zip(served.outputs, gradients, strict=True) if g is not None]
        self.before_backward()
        try:
            self.backward(fiber, [root for root, _ in roots], [gradient for _, gradient in roots], keep)
        except Exception as error:
            note_place(error, f"the backward pass of {_module(served.path)}")
            raise
        back = served.gradients
        answer = tuple(gradient is not None for gradient in back)
        self.wire.send(
            envelope.source, Kind.RETURN, fiber.microbatch, envelope.call, answer, [g for g in back if g is not None]
        )

    def backward(
        self, fiber: Fiber, roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], keep: bool = False
    ) -> None:
        """A backward pass of a fiber, on its own thread whatever the device: it may wait for other ranks inside."""
        fiber.backward_depth += 1
        try:
            with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
                torch.autograd.backward(list(roots), list(gradients), retain_graph=keep)
        finally:
            fiber.backward_depth -= 1

    # Names -------------------------------------------------------------------------------------------------------

    def _reference(self, item: Any) -> Reference | None:
        if isinstance(item, nn.Parameter):
            name = self.ownership.name_of(item)
            return None if name is None else ("tensor of the model", name)
        if isinstance(item, ProxyBuffer):
            return ("tensor of the model", item._shardwright_name)
        if isinstance(item, nn.Module):
            path = self._paths.get(id(item))
            return None if path is None else ("module", path)
        return None

    def _named(self, reference: Reference) -> Any:
        kind, value = reference
        return self.ownership.modules[value] if kind == "module" else self.ownership.tensor(value)

    def _resolve(self, fiber: Fiber, reference: Reference) -> Any:
        kind, value = reference
        if kind == "batch":
            if value not in fiber.batch:
                fiber.batch[value] = self.microbatches[fiber.microbatch][value].clone()
            return fiber.batch[value]
        return self._named(reference)


def _module(path: str) -> str:
    return f"module {path!r}" if path else "the model itself"


def _spread(present: Mapping[int, bool] | Sequence[bool], tensors: Sequence[torch.Tensor]) -> Gradients:
    """The gradients in their places, None where there is none."""
    left = iter(tensors)
    return [next(left) if is_there else None for is_there in present]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _untouched(tensor: torch.Tensor) -> bool:
    return not tensor.requires_grad and _version(tensor) == 0


def _checkpoint_contexts(before: WrittenState) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a marked module's forward, and of the forward that is run once more."""
    return nullcontext(), EachTime(before.as_before)


def _modes_of(path: str, module: nn.Module) -> tuple[str | bool, ...]:
    """A module's path, and the modes of those in it."""
    return (path, *(inner.training for inner in module.modules()))


def _is_in(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")
