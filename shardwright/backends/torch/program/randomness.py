"""Random numbers that do not depend on how the model is split.

The numbers that a module draws are a function of (seed, step, global microbatch, module path, occurrence of the call,
and number of calls that the module had made before it drew). The generator is seeded at the start of each such stretch:
by hooks on those modules alone that recording saw draw random numbers, and on the modules they call if they draw again
afterwards.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwright.backends.torch.capture.op_schemas import by_name
from shardwright.backends.torch.compat import OpOverload
from shardwright.backends.torch.program.draft_steps import Draft
from shardwright.backends.torch.program.program import (
    ConstantRef,
    Context,
    Leaf,
    Literal,
    NumberRef,
    Program,
    Step,
    Value,
    ValueRef,
    name_of,
)
from shardwright.core.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Moment:
    """A microbatch of a run: ``seed`` is the run's, ``step`` and ``microbatch`` count from 0, the latter over all
    replicas."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0

    def draw_like(
        self, values: Sequence[Value], steps: Sequence[Step | Draft], step: Step | Draft, device: torch.device
    ) -> None:
        """Leave the generators as they are when ``step``, a function that draws, is run at this moment."""
        context = next(iter(step.random))
        seed_generators(stream_seed(self.seed, self.step, self.microbatch, context), host=step.draws_on_host)
        for earlier in step.drawn_before:
            draw_again(values, steps[earlier], device)


def stream_seed(seed: int, step: int, microbatch: int, context: Context) -> int:
    """The seed of a stretch, 63 bits from a hash: the same on every machine."""
    text = f"{seed}/{step}/{microbatch}/{context[0]}/{context[1]}/{context[2]}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_of_model(seed: int, number: int) -> int:
    """The seed of one of several models of a run: for the first the run's own, for each other one of its own, so that
    they draw different numbers in modules of the same path."""
    if number == 0:
        return seed
    text = f"{seed}/model {number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def draws(function: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a call of an op draws random numbers: attention without dropout does not, though its op may."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    return bool(by_name(function._schema, args, kwargs).get("dropout_p") != 0.0)


class Streams:
    """The seeding of the generators while one rank runs the programs of a step."""

    def __init__(
        self, programs: Sequence[Program], modules: Mapping[str, nn.Module], seed: int, device: torch.device
    ) -> None:
        self.seed, self._device = seed, device
        self.contexts = {context for program in programs for step in program.steps for context in step.random}
        self.totals: dict[str, int] = {}
        for program in programs:
            for path, total in program.call_totals.items():
                self.totals[path] = max(total, self.totals.get(path, 0))
        self.active = bool(self.contexts)
        self.enabled = False
        """Whether this program runs now: other programs have hooks on the same modules."""
        self._step = 0
        self._microbatch = 0
        self._counts: dict[str, int] = {}
        self._frames: list[list[Any]] = []
        self._recomputing = False
        self._handles: list[Any] = []
        watched = {context[0] for context in self.contexts}
        watched |= {child for program in programs for held in program.children.values() for child in held}
        unsteady = [unit for program in programs for unit in program.unsteady]
        self._always = {path for path in modules for unit in unsteady if not unit or f"{path}.".startswith(f"{unit}.")}
        self._host = any(program.draws_on_host for program in programs)
        for path in sorted(watched | self._always):
            if path in modules:
                self._watch(path, modules[path])

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin(self, step: int, microbatch: int, *, recomputing: bool = False) -> None:
        """Note the step and the global microbatch; ``recomputing`` in a backward pass, where checkpoints run again."""
        self._step, self._microbatch, self._recomputing = step, microbatch, recomputing
        self._frames.clear()

    def start(self, context: Context) -> None:
        """Seed the generators for ``context``, before a unit that runs op by op draws."""
        self._seed(context)

    def enter(self, program: Program, step: Step) -> None:
        """Prepare the generators for a step of a program."""
        if step.path is not None:
            self._counts = dict(step.counts)
            self._frames.clear()
        elif step.random:
            self._seed(step.random[0])
            for earlier in step.drawn_before:
                draw_again(program.values, program.steps[earlier], self._device)

    @contextmanager
    def again(self, step: Step) -> Iterator[None]:
        """A context in which a unit runs a second time, in a backward pass: it draws the same numbers as the first
        time."""
        before = self._counts, self._frames, self._recomputing
        self._counts, self._frames, self._recomputing = dict(step.counts), [], False
        try:
            yield
        finally:
            self._counts, self._frames, self._recomputing = before

    def _watch(self, path: str, module: nn.Module) -> None:
        def before(_: nn.Module, __: Any) -> None:
            if not self.enabled:
                return
            occurrence = self._counts.get(path, 0)
            if self._recomputing:
                if self.totals.get(path, 1) > 1:
                    raise CaptureError(
                        f"{path} draws random numbers, is called {self.totals[path]} times in one pass and is "
                        f"recomputed by activation checkpointing: which call is recomputed cannot be told; switch "
                        f"checkpointing off for it"
                    )
                occurrence = 0
            else:
                self._counts[path] = occurrence + 1
            self._frames.append([path, occurrence, 0])
            self._seed_if_random((path, occurrence, 0))

        def after(_: nn.Module, __: Any, ___: Any) -> None:
            if not self.enabled:
                return
            if self._frames:
                self._frames.pop()
            if self._frames:
                frame = self._frames[-1]
                frame[2] += 1
                self._seed_if_random((frame[0], frame[1], frame[2]))

        self._handles.append(module.register_forward_pre_hook(before, prepend=True))
        self._handles.append(module.register_forward_hook(after))

    def _seed_if_random(self, context: Context) -> None:
        if context in self.contexts or context[0] in self._always:
            self._seed(context)

    def _seed(self, context: Context) -> None:
        seed_generators(stream_seed(self.seed, self._step, self._microbatch, context), self._host)


def seed_generators(seed: int, host: bool) -> None:
    """Seed torch's generators, and with ``host`` Python's and NumPy's."""
    # Not torch.manual_seed, which queues a call for every kind of accelerator, with the text of the stack.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    if host:
        seed_host(seed)


def seed_host(seed: int) -> None:
    """Seed Python's and NumPy's generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def draw_again(values: Sequence[Value], step: Step | Draft, device: torch.device) -> None:
    """Advance the generator by the draws of a function on tensors of these shapes."""

    def like(leaf: Leaf) -> Any:
        if isinstance(leaf, ValueRef):
            value = values[leaf.value]
            return torch.zeros(value.shape, dtype=value.dtype, device=device)
        if isinstance(leaf, ConstantRef):
            return leaf.tensor.clone()
        if isinstance(leaf, Literal):
            return leaf.value
        if isinstance(leaf, NumberRef):
            return leaf.expression.now()
        raise CaptureError(
            f"{name_of(step.function)} draws random numbers for a parameter, a buffer or an object outside of every "
            f"unit, and is followed by another draw: put them into modules of their own"
        )

    assert step.function is not None
    args, kwargs = step.arguments.build(like)
    with torch.no_grad():
        step.function(*args, **kwargs)


@contextmanager
def kept_generators(active: bool, device: torch.device) -> Iterator[None]:
    """A context in which the default generators may be used; afterwards they are as they were found."""
    if not active:
        yield
        return
    host = torch.get_rng_state()
    python, numpy = random.getstate(), np.random.get_state()
    own = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(numpy)
        if own is not None:
            torch.cuda.set_rng_state(own, device)
