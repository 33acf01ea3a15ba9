"""The module tree, D'Hondt, and the traps of SageMaker's partitioner."""

from itertools import pairwise

import numpy as np
import pytest

from shardwright.core.errors import PlanError
from shardwright.core.partition.tree import dhondt, tree_cut, tree_of


def test_dhondt_is_the_textbooks() -> None:
    """The worked example of the method: 8 seats, votes 100,000, 80,000, 30,000 and 20,000 give 4, 3, 1 and 0."""
    assert dhondt([100_000, 80_000, 30_000, 20_000], 8, [8] * 4) == [4, 3, 1, 0]
    assert dhondt([100_000, 80_000, 30_000, 20_000], 8, [2, 8, 8, 8]) == [2, 4, 1, 1]


def test_the_tree_follows_the_paths() -> None:
    tree = tree_of(["model.embed", "model.layers.0", "model.layers.1", "model.layers.2", "head"])
    assert [(c.first, c.end) for c in tree.children] == [(0, 4), (4, 5)]
    assert [(c.first, c.end) for c in tree.children[0].children] == [(0, 1), (1, 4)]


def decoder_paths(layers: int) -> list[str]:
    return ["model.embed", *(f"model.layers.{i}" for i in range(layers)), "model.norm", "head"]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_equal_layers_are_divided_evenly(stages: int) -> None:
    starts = tree_cut([f"h.{i}" for i in range(24)], [1.0] * 24, [1.0] * 24, stages)
    assert starts == [24 * s // stages for s in range(stages)]


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_a_large_embedding_draws_one_device(stages: int) -> None:
    """It has nine tenths of the memory and cannot be divided: devices beyond one would stand idle."""
    paths = decoder_paths(12)
    memory = [90.0, *[0.8] * 12, 0.1, 0.3]
    seconds = [0.1, *[1.0] * 12, 0.1, 0.5]
    starts = tree_cut(paths, memory, seconds, stages, memory_weight=1.0)
    assert starts[0] == 0
    assert starts[1] == 1, "the embedding stands alone"
    assert all(a < b for a, b in pairwise(starts))
    layers = [b - a for a, b in zip(starts[1:], (*starts[2:], 15), strict=True)]
    assert max(layers) - min(layers) <= 3


def test_every_device_has_adjacent_units_and_none_is_idle() -> None:
    for seed in range(400):
        random = np.random.default_rng(seed)
        units = int(random.integers(2, 16))
        paths, depth = [], []
        for _ in range(units):  # a random nesting: each unit keeps part of the path of the one before it
            depth = [*depth[: int(random.integers(0, len(depth) + 1))], str(random.integers(0, 3))]
            paths.append(".".join(depth))
        stages = int(random.integers(1, units + 1))
        weight = float(random.choice([0.0, 0.2, 0.8, 1.0]))
        starts = tree_cut(paths, random.exponential(1, units) ** 3, random.exponential(1, units), stages, weight)
        assert len(starts) == stages
        assert starts[0] == 0
        assert all(a < b for a, b in pairwise(starts)), f"seed {seed}: {starts}"
        assert starts[-1] < units


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(PlanError, match="at most pp=2"):
        tree_cut(["a", "b"], [1, 1], [1, 1], 3)
    with pytest.raises(PlanError, match=r"memory_weight=1.5: expected a share"):
        tree_cut(["a", "b"], [1, 1], [1, 1], 2, 1.5)
