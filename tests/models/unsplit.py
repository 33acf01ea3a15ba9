"""The randomness rule for a model that runs whole and by itself, so that dropout too can be compared exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.program.randomness import kept_generators, seed_generators, stream_seed


@contextmanager
def seeded_by_rule(model: nn.Module, *, seed: int, step: int, microbatch: int) -> Iterator[None]:
    """A context in which the model draws for its forward pass the numbers that it would draw as a pipeline.

    The generators are seeded whenever a module is entered and whenever one that it called returns (`randomness`), and
    are afterwards as they were. Enter this once for every microbatch.

    Args:
        seed: that of `init` or `set_seed`.
        step: training steps run before this one.
        microbatch: its number among those of all replicas.
    """
    frames: list[list[Any]] = []
    counts: dict[str, int] = {}

    def draw() -> None:
        if frames:
            path, occurrence, segment = frames[-1]
            seed_generators(stream_seed(seed, step, microbatch, (path, occurrence, segment)), host=True)

    handles = []
    for path, module in model.named_modules():

        def before(_: nn.Module, __: Any, path: str = path) -> None:
            counts[path] = counts.get(path, 0) + 1
            frames.append([path, counts[path] - 1, 0])
            draw()

        def after(_: nn.Module, __: Any, ___: Any) -> None:
            frames.pop()
            if frames:
                frames[-1][2] += 1
            draw()

        handles.append(module.register_forward_pre_hook(before, prepend=True))
        handles.append(module.register_forward_hook(after, always_call=True))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with kept_generators(True, device):
            yield
    finally:
        for handle in handles:
            handle.remove()
