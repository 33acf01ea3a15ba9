"""Recompute: units that keep their inputs, and perhaps the results of products, and run their forward again when the
backward pass comes to them.

torch's own checkpoint does the bookkeeping of saved tensors and of autocast, and its selective checkpoint that of
results which are kept op by op. The rest is here: random numbers follow
the streams of the step, objects that the unit writes to (caches) are those of the first run, and so are the buffers
that it writes to (running statistics), which move on once, and the attributes of its modules (a counter).
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.backends.torch.capture.held_tensors import keep_modules, tensors_in
from shardwright.backends.torch.capture.own_checkpoints import plain_checkpoints
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.memory.kept_results import Both, EachTime, KeptResults
from shardwright.backends.torch.memory.module_attributes import Attributes, Place
from shardwright.backends.torch.program.program import ObjectRef, Step
from shardwright.backends.torch.program.randomness import Streams
from shardwright.backends.torch.program.stage_map import Call
from shardwright.core.values.recompute_modes import Mode


class Recompute:
    """The recomputed calls of a plan.

    Args:
        calls: the calls that are recomputed, and how.
        modules: of the model, by path.
        streams: of the step's random numbers.
    """

    def __init__(self, calls: Mapping[Call, Mode], modules: Mapping[str, nn.Module], streams: Streams) -> None:
        self.calls, self.modules, self.streams = calls, modules, streams
        self._written: dict[str, tuple[str, ...]] = {}
        """The buffers that a unit's forward writes to in training, by the unit's path: known once it has run."""
        self._set: dict[str, tuple[Place, ...]] = {}
        """The attributes of its modules that it sets."""

    def names(self, step: Step) -> bool:
        """Whether the plan names a step, which is then recomputed where a backward pass will come."""
        return (step.path, step.occurrence) in self.calls

    def run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of the call."""
        assert step.path is not None
        module = self.modules[step.path]
        before = self._buffers_before(step.path, module)
        found = Attributes(module, self._set.get(step.path))
        unit = _Unit(module, step, args, kwargs)

        mode = self.calls[step.path, step.occurrence]

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            again = EachTime(lambda: self._again(step, module, before, found))
            if mode == "full":
                return nullcontext(), again
            keeping, kept = KeptResults(mode, module).contexts()
            return keeping, Both(again, kept)

        args, kwargs = unit.arguments
        result = checkpoint(unit, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)
        self._note_written(step.path, module, before)
        if step.path not in self._set:
            found.keep_written()
            self._set[step.path] = found.places
        return result

    @contextmanager
    def _again(
        self, step: Step, module: nn.Module, before: dict[str, torch.Tensor], found: Attributes
    ) -> Iterator[None]:
        """A context in which the forward runs again: with its random numbers, and its buffers and attributes as they
        were."""
        now = dict(module.named_buffers())
        held = Attributes(module, found.places)
        found.restore()
        for name, tensor in before.items():
            _set_buffer(module, name, tensor.clone())
        try:
            with self.streams.again(step):
                yield
        finally:
            for name in before:
                _set_buffer(module, name, now[name])
            held.restore()

    def _buffers_before(self, path: str, module: nn.Module) -> dict[str, torch.Tensor]:
        if not module.training:
            return {}
        buffers = dict(module.named_buffers())
        names = self._written.get(path, tuple(buffers))
        return {name: buffers[name].clone() for name in names}

    def _note_written(self, path: str, module: nn.Module, before: dict[str, torch.Tensor]) -> None:
        if path in self._written or not module.training:
            return
        now = dict(module.named_buffers())
        changed = [name for name, tensor in before.items() if not _same(now[name], tensor)]
        self._written[path] = tuple(changed)
        for name in set(before) - set(changed):
            del before[name]


class _Unit:
    """A unit's forward. Its second run gets objects as they were before the first. What later units leave in them is
    theirs to keep, so that this one does not hold the objects themselves."""

    def __init__(self, module: nn.Module, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        given, spec = pytree.tree_flatten((args, kwargs))
        self.positions = [i for i, leaf in enumerate(step.arguments.leaves) if isinstance(leaf, ObjectRef)]
        self.objects = {i: _copied(given[i]) for i in self.positions}
        self._first = {i: given[i] for i in self.positions}
        """The objects themselves, for the first run."""
        for position in self.positions:
            given[position] = None
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(given, spec)
        """What it is to be called with: no objects."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.positions:
            given, spec = pytree.tree_flatten((args, kwargs))
            for position in self.positions:
                first = self._first.pop(position, None)
                given[position] = _copied(self.objects[position]) if first is None else first
            args, kwargs = pytree.tree_unflatten(given, spec)
        with plain_checkpoints():
            return self.module(*args, **kwargs)


def _copied(item: Any) -> Any:
    """A copy of an object. It holds the same tensors and modules."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in tensors_in(item)}
    keep_modules(item, memo)
    return copy.deepcopy(item, memo)


def _set_buffer(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    module.get_submodule(path)._buffers[last] = tensor


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
