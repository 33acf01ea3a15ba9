"""Random numbers by the rule of `randomness`: seeded anew at every stretch of every module call.

The calls that draw are not known beforehand here, so each stretch is seeded. A module is run by one rank alone, so the
number of its calls in a microbatch is counted there, in the order of the program. Python's and NumPy's generators take
much longer to seed than torch's: after the first step they are seeded only where something was seen to draw from them.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.program.randomness import seed_host, stream_seed
from shardwright.backends.torch.training.messages.microbatch_threads import Fiber
from shardwright.core.errors import ShardwrightError

BODY = ""
"""The path that stands for the step body in contexts, as in recorded programs."""


class Draws:
    """The seeding of one rank's generators."""

    def __init__(self, device: torch.device) -> None:
        self.seed = self.step = self.first_microbatch = 0
        self._draws_on_host: dict[bool, bool] = {}
        """Whether Python's or NumPy's generator is drawn from, by whether the model trains."""
        self._training = self._host = self._drew = False
        self._host_state: tuple[Any, ...] = ()
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def begin(self, *, training: bool) -> None:
        """Begin a step."""
        self._training, self._drew = training, False
        self._host = self._draws_on_host.get(training, True)
        self._host_state = _host_state()

    def end(self) -> bool:
        """End a step; False when something drew from Python's or NumPy's generator while these were not seeded."""
        self._drew = self._drew or _host_state() != self._host_state
        known = self._host or not self._drew
        self._draws_on_host[self._training] = self._drew or (self._host and self._training in self._draws_on_host)
        return known

    def body(self, fiber: Fiber) -> None:
        """Begin the step body of a fiber."""
        fiber.frames = [[BODY, 0, 0]]
        self._seed(fiber)

    @contextmanager
    def call(self, fiber: Fiber, path: str, recomputing: bool) -> Iterator[None]:
        """A context for a call of a module that this rank runs."""
        count = fiber.counts[path]
        if recomputing:
            occurrence, before = 0, self._generators[-1].get_state()
        else:
            occurrence, before = count, None
            fiber.counts[path] = count + 1
        fiber.frames.append([path, occurrence, 0])
        self._seed(fiber)
        if recomputing and count > 1:
            before = self._generators[-1].get_state()
        try:
            yield
        finally:
            if before is not None and count > 1 and not torch.equal(before, self._generators[-1].get_state()):
                raise ShardwrightError(
                    f"{path!r} draws random numbers, was called {count} times in this microbatch and is recomputed by "
                    f"activation checkpointing, and which call is recomputed cannot be told: switch checkpointing off "
                    f"for it"
                )
            fiber.frames.pop()
            self.resume(fiber)

    @contextmanager
    def served(self, fiber: Fiber) -> Iterator[None]:
        """A context for a call that is served for another rank: no call that is under way here is around it."""
        around, fiber.frames = fiber.frames, []
        try:
            yield
        finally:
            fiber.frames = around

    def resume(self, fiber: Fiber) -> None:
        """Go on with the call around one that has ended."""
        if fiber.frames:
            fiber.frames[-1][2] += 1
            self._seed(fiber)

    def _seed(self, fiber: Fiber) -> None:
        path, occurrence, segment = fiber.frames[-1]
        seed = stream_seed(self.seed, self.step, self.first_microbatch + fiber.microbatch, (path, occurrence, segment))
        for generator in self._generators:
            generator.manual_seed(seed)
        if self._host:
            if self._training not in self._draws_on_host and not self._drew:
                self._drew = _host_state() != self._host_state
            seed_host(seed)
            if self._training not in self._draws_on_host and not self._drew:
                self._host_state = _host_state()


def _host_state() -> tuple[Any, ...]:
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2]
