"""Full garbage collections are held off while models are captured and plans are searched, and come back afterwards."""

import gc
from collections.abc import Iterator

import pytest

from shardwright.core.values.collection import without_full_collections


def full_collections(count: int) -> int:
    """How many full collections run while so many lists that live are made."""
    found = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal found
        found += phase == "start" and info["generation"] == 2

    gc.callbacks.append(note)
    try:
        alive = [[] for _ in range(count)]
    finally:
        gc.callbacks.remove(note)
    assert len(alive) == count
    return found


def test_full_collections_wait() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(10, 2, 2)
        gc.freeze()
        gc.collect()  # what is known is counted anew: full collections wait until a quarter of it is new
        assert full_collections(100_000) > 0
        with without_full_collections():
            assert full_collections(100_000) == 0
        assert gc.get_threshold() == (10, 2, 2)
        with pytest.raises(KeyError), without_full_collections():
            raise KeyError
        assert gc.get_threshold() == (10, 2, 2)
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 9)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
def test_contexts_of_threads_restore_the_threshold_when_the_last_ends() -> None:
    first, second = without_full_collections(), without_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[2] > 9
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 9)


@pytest.mark.usefixtures("thresholds")
def test_thresholds_that_are_set_inside_stay() -> None:
    with without_full_collections():
        gc.set_threshold(50, 5, 5)
    assert gc.get_threshold() == (50, 5, 5)
    with without_full_collections():
        gc.set_threshold(0, *gc.get_threshold()[1:])
    assert gc.get_threshold() == (0, 5, 5)
