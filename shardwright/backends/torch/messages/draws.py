"""Random numbers by the rule of `randomness`: seeded anew at every stretch of every module call.

Which calls draw is not known beforehand here, so each stretch is seeded. A module is run by one rank alone, so the
number of its calls in a microbatch is counted there, in the order of the program.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwright.backends.torch.messages.strands import Strand
from shardwright.backends.torch.randomness import seed_host, stream_seed
from shardwright.core.errors import ShardwrightError

BODY = ""
"""Stands for the step body in contexts, as in recorded programs."""


class Draws:
    """Seeds the generators of one rank."""

    def __init__(self, device: torch.device) -> None:
        self.seed = self.step = self.first_microbatch = 0
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generators.append(torch.cuda.default_generators[index])

    def body(self, strand: Strand) -> None:
        """The step body begins."""
        strand.frames = [[BODY, 0, 0]]
        self._seed(strand)

    @contextmanager
    def call(self, strand: Strand, path: str, recomputing: bool) -> Iterator[None]:
        """A call of a module that this rank runs."""
        count = strand.counts[path]
        if recomputing:
            occurrence, before = 0, self._generators[-1].get_state()
        else:
            occurrence, before = count, None
            strand.counts[path] = count + 1
        strand.frames.append([path, occurrence, 0])
        self._seed(strand)
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
            strand.frames.pop()
            self.resume(strand)

    @contextmanager
    def served(self, strand: Strand) -> Iterator[None]:
        """A call for another rank: no call that is under way here is around it."""
        around, strand.frames = strand.frames, []
        try:
            yield
        finally:
            strand.frames = around

    def resume(self, strand: Strand) -> None:
        """A call has ended, and the one around it goes on."""
        if strand.frames:
            strand.frames[-1][2] += 1
            self._seed(strand)

    def _seed(self, strand: Strand) -> None:
        path, occurrence, segment = strand.frames[-1]
        seed = stream_seed(self.seed, self.step, self.first_microbatch + strand.microbatch, (path, occurrence, segment))
        for generator in self._generators:
            generator.manual_seed(seed)
        seed_host(seed)
