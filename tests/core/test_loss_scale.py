"""The factor of losses in float16 follows its rule, and a simulation of it, over random overflows."""

import random

import pytest

from shardwright.core.errors import ShardwrightError
from shardwright.core.model.loss.scaling import LossScale


@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("consecutive", [False, True])
def test_random_overflows(shift: int, consecutive: bool) -> None:
    """Against the rule in words: the factor is halved at every overflow when `shift` have come (since a rise, or in a
    row), and doubled whenever a window has passed since the last overflow."""
    drawn = random.Random(shift)
    found = LossScale(2.0**32, True, 2.0, 7, 4.0, shift, consecutive)
    scale, since, left = 2.0**32, 0, shift
    for step in range(3000):
        overflowed = drawn.random() < (0.02 if step % 600 > 300 else 0.3)
        found.update(overflowed)
        if overflowed:
            since = 0
            if left > 1:
                left -= 1
            else:
                scale = max(scale / 2, 4.0)
        else:
            since += 1
            if since % 7 == 0:
                scale *= 2
                left = shift
            elif consecutive:
                left = shift
        assert found.scale == scale, step
    assert found.steps == 3000


def test_a_fixed_factor_stays() -> None:
    scale = LossScale(128.0)
    scale.update(True)
    scale.update(False)
    assert scale.scale == 128.0


@pytest.mark.parametrize(
    "given",
    [{"scale": 0.0}, {"scale": float("nan")}, {"scale_factor": 1.0}, {"scale_window": 0}, {"min_scale": 0.0},
     {"delayed_shift": 0}],
)  # fmt: skip
def test_what_is_not_possible_is_refused(given: dict[str, float]) -> None:
    with pytest.raises(ShardwrightError, match="expected"):
        LossScale(**given)
