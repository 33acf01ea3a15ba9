"""A step of a program while it is being recorded, and the calls under way meanwhile."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwright.backends.torch.program.program import Context, Step, Tree


@dataclass(slots=True)
class Frame:
    """A module call under way."""

    path: str
    occurrence: int
    segment: int = 0


@dataclass(slots=True)
class Draft:
    """A step under construction. Fields that `Step` has too mean the same."""

    index: int
    path: str | None
    occurrence: int
    function: Callable[..., Any] | None
    arguments: Tree
    reads: set[int]
    written: set[int] = field(default_factory=set)
    memories: set[int] = field(default_factory=set)
    outputs: list[int | None] = field(default_factory=list)
    object_outputs: list[tuple[int, tuple[int | None, ...]]] = field(default_factory=list)
    renewals: list[tuple[int, int]] = field(default_factory=list)
    parameters: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    grad_enabled: bool = True
    autocast: torch.dtype | None = None
    random: dict[Context, None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    views_parameter: bool = False
    reads_value: bool = False
    """Whether the step's result, or its shape, depends on the values of tensors."""

    drawn_before: tuple[int, ...] = ()
    scalars: list[torch.Tensor] = field(default_factory=list)
    """Known tensors whose one value was read."""
    masks: list[torch.Tensor] = field(default_factory=list)
    """Known tensors whose number of entries decides the shape of the result."""
    draws_on_host: bool = False
    """Whether the step draws from Python's or NumPy's generator."""
    stage: int | None = None

    def finished(self, random_paths: set[str]) -> Step:
        """The finished step. ``random_paths`` are the modules whose calls are counted."""
        return Step(
            self.index, self.path, self.occurrence, self.function, self.arguments, frozenset(self.reads),
            tuple(self.outputs), tuple(self.object_outputs), tuple(self.renewals), frozenset(self.written),
            frozenset(self.memories), frozenset(self.parameters), frozenset(self.buffers), self.grad_enabled,
            self.autocast, tuple(self.random), tuple((p, n) for p, n in self.counts.items() if p in random_paths),
            self.views_parameter, self.drawn_before, self.draws_on_host, self.stage,
        )  # fmt: skip


class CallStack:
    """The calls under way while a body is recorded.

    Attributes:
        frames: the module calls under way, the innermost last.
        unit_depth: the number of units, or functions, under way that are recorded whole.
        current: the step for which the innermost of these is recorded.
    """

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.unit_depth = 0
        self.current: Draft | None = None

    @property
    def path(self) -> str | None:
        """The path of the innermost module call; None in the step's own body."""
        return self.frames[-1].path if self.frames else None

    @contextmanager
    def inside(self, draft: Draft) -> Iterator[None]:
        """A context in which everything that runs is recorded as one step."""
        self.unit_depth += 1
        outer, self.current = self.current, draft
        try:
            yield
        finally:
            self.unit_depth -= 1
            self.current = outer

    def note_draw(self, draft: Draft) -> None:
        """Note that a step draws random numbers here."""
        frame = self.frames[-1] if self.frames else Frame("", 0, 0)
        draft.random[(frame.path, frame.occurrence, frame.segment)] = None
