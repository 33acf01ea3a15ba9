"""The fit of slices' seconds."""

import math
import random

import pytest

from shardwright import slice_lengths
from shardwright.core.errors import PlanError
from shardwright.core.slices.fitted_cost import FittedCost

LENGTHS, BEFORE = (32, 64, 128, 256), (0, 64, 128, 512)


def exact(length: int, before: int) -> float:
    alone = 1e-3 + 2e-6 * max(length, 100)
    return alone + (1e-5 + 3e-7 * length + 4e-8 * before + 5e-9 * length * before if before else 0.0)


def test_what_has_the_form_is_found() -> None:
    fit = FittedCost.of({(length, before): exact(length, before) for length in LENGTHS for before in BEFORE})
    assert fit.added == pytest.approx((1e-5, 3e-7, 4e-8, 5e-9), rel=1e-6)
    assert fit.worst < 1e-9
    assert fit(64, 300) == pytest.approx(exact(64, 300))
    assert fit(96, 0) == pytest.approx((exact(64, 0) + exact(128, 0)) / 2)
    assert fit(512, 0) == pytest.approx(2 * exact(256, 0))
    assert sum(slice_lengths(fit, 512, 8, step=32)) == 512


def test_errors_are_those_of_the_measurements() -> None:
    rng = random.Random(0)
    measured = {
        (length, before): exact(length, before) * (1 + (rng.uniform(-0.1, 0.1) if before else 0))
        for length in LENGTHS
        for before in BEFORE
    }
    fit = FittedCost.of(measured)
    off = [abs(fit(*key) - seconds) / seconds for key, seconds in measured.items() if key[1]]
    assert fit.error == pytest.approx(sum(off) / len(off))
    assert fit.worst == pytest.approx(max(off))
    assert 0.01 < fit.error < fit.worst < 0.15


def test_short_slices_count_as_long_ones_do() -> None:
    """Seconds that are not of the form, as of attention that passes over hidden keys in the first slice alone: no slice
    is wrong by much of its own time, short ones neither."""

    def seconds(length: int, before: int) -> float:
        return 5e-3 + 1e-3 * length + 3e-6 * length * (before + length if before else length / 2)

    contexts = {length: (0, (1024 - length) // 2, 1024 - length) for length in (16, 64, 128, 256, 512)}
    measured = {(length, c): seconds(length, c) for length, of_length in contexts.items() for c in of_length}
    fit = FittedCost.of(measured)
    assert fit.error < 0.05
    assert fit.worst < 0.1


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({}, "0 slices with nothing before them and 0 others"),
        ({(32, 0): 1.0, (32, 32): 1.0}, "1 slices with nothing before them and 1 others were measured"),
        ({(32, n): 1.0 for n in range(8)}, "do not tell the terms apart"),
        ({(0, 0): 1.0}, "is no slice"),
        ({(32, 0): math.nan}, "took nan: expected seconds"),
        ({(32, 0): "1"}, "took '1'"),
    ],
)
def test_measurements_that_are_not_enough(measured: dict[tuple[int, int], float], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        FittedCost.of(measured)


def test_the_table_of_all_slices_is_what_single_ones_cost() -> None:
    fit = FittedCost.of({(n, c): 1e-3 + 1e-5 * n * (1 + c / 90) for n in (16, 32, 64) for c in (0, 40, 100)})
    places = [0, 3, 16, 50, 64, 200]
    table = fit.table(places)
    for i, end in enumerate(places):
        for j, start in enumerate(places):
            expected = fit(end - start, start) if j < i else math.inf
            assert table[i, j] == pytest.approx(expected, rel=1e-12)
