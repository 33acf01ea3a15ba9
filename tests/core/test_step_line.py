"""The lines of training steps: what is added up between them, the rates, and the words."""

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from shardwright.core.errors import ShardwrightError
from shardwright.core.values.step_line import (
    LINES,
    Argument,
    StepLine,
    StepLines,
    Work,
    legend,
    process_memory,
    require_every,
    tokens_in,
)

H100 = {"bf16": 989e12, "fp32": 67e12}


def test_a_line_has_the_fields_of_torchtitan() -> None:
    line = StepLine(
        10, Work(64, 64 * 4096, {"bf16": 9.89e15}, 8), 2.3456, 1.25, (int(10.5 * 2**30), (80 * 2**30)), 5.0, H100
    )  # fmt: skip
    assert line.text() == (
        "step: 10  loss:   2.3456  grad_norm:  1.2500  memory: 10.50GiB(13.12%)  tps: 6,554  tflops: 247  mfu: 25.00%"
    )


def test_what_is_not_known_is_left_out() -> None:
    assert StepLine(1, Work(6, None, None, 3), seconds=0.5).text() == "step:  1  sps: 4"
    assert "mfu" not in StepLine(1, Work(6, None, {"fp64": 1.0}, 1), peaks=H100).text()


def test_products_of_several_precisions_count_by_their_own_peaks() -> None:
    line = StepLine(1, Work(1, None, {"bf16": 989e12, "fp32": 67e12}, 2), seconds=4.0, peaks=H100)
    assert line.mfu == pytest.approx(2 / 4 / 2)
    assert line.flops_per_s == pytest.approx((989e12 + 67e12) / 8)


def test_small_losses_and_updates_that_were_not_made_are_said() -> None:
    text = StepLine(3, Work(1, None, None, 1), 1.5e-5, skipped=2).text()
    assert "loss: 1.500e-05" in text
    assert text.endswith("skipped: 2")
    assert "loss:      nan" in StepLine(3, Work(1, None, None, 1), float("nan")).text()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([Argument("input_ids", (8, 128), True), Argument("labels", (8, 64), True)], "input_ids"),
        ([Argument("images", (8, 3, 32, 32), False), Argument("labels", (8,), True)], None),
        ([Argument("user", (8,), True), Argument("item", (8,), True)], None),
        ([Argument("positions", (1, 128), True, None), Argument("input_ids", (8, 128), True)], "input_ids"),
        ([Argument("images", (8, 3, 32, 32), False), Argument("segments", (8, 32, 32), True)], None),
    ],
)
def test_tokens_are_the_entries_of_the_first_whole_numbers_with_positions(arguments: list, name: str | None) -> None:
    found = tokens_in(arguments)
    assert (None if found is None else found.name) == name


class Later:
    """Figures that are there once somebody says so."""

    def __init__(self, loss: float, *, there: bool = False) -> None:
        self.loss, self.there = loss, there

    def is_there(self) -> bool:
        return self.there

    def figures(self) -> Mapping[str, Any]:
        return {"loss": self.loss, "seconds": 2.0}


@pytest.fixture
def said() -> Any:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    LINES.addHandler(handler)
    yield found
    LINES.removeHandler(handler)


def test_lines_are_said_in_order_once_their_figures_are_there(said: list[str]) -> None:
    lines = StepLines(4, lambda: H100)
    assert [step for step in range(1, 13) if lines.is_due(step)] == [1, 4, 8, 12]
    first, second = Later(1.0), Later(2.0, there=True)
    lines.worked(Work(8, 80, {"fp32": 67e12}, 1), "tokens")
    lines.note(1, first)
    for _ in range(3):
        lines.worked(Work(8, 80, {"fp32": 67e12}, 1), "tokens")
    lines.skip()
    lines.note(4, second)
    lines.look()
    assert said == []
    first.there = True
    lines.look()
    assert said[0] == legend(4, "tokens", H100, ["fp32"])
    assert said[1] == "step:  1  loss:   1.0000  tps: 40  tflops: 33.5  mfu: 50.00%"
    assert said[2] == "step:  4  loss:   2.0000  tps: 120  tflops: 100  mfu: 150.00%  skipped: 1"
    lines.worked(Work(8, 80, None, 1), "tokens", "the FLOPs of my::op are not known")
    lines.note(8, Later(3.0))
    lines.look()
    assert len(said) == 3
    lines.look(wait=True)
    assert said[3] == "step:  8  loss:   3.0000  tps: 40"


def test_one_call_of_unknown_work_makes_the_sum_unknown() -> None:
    both = Work(8, 80, {"fp32": 1.0}, 1) + Work(4, None, None, 1)
    assert both == Work(12, None, None, 1)
    assert (Work(1, 1, {"fp32": 1.0}, 1) + Work(1, 1, {"bf16": 2.0}, 1)).flops == {"fp32": 1.0, "bf16": 2.0}


def test_the_legend_says_how_figures_are_counted() -> None:
    text = legend(10, None, H100, {"bf16": 1}, "")
    assert "every 10 steps" in text
    assert "sps counts samples" in text
    assert "989 in bf16" in text
    assert "fp32" not in text
    assert "tflops is left out: because" in legend(10, "input_ids", H100, (), "because")


@pytest.mark.parametrize("given", [-1, 2.0, True, "10", None])
def test_a_number_of_steps_that_is_none_is_refused(given: object) -> None:
    with pytest.raises(ShardwrightError, match=r"log_every=.*expected a number of steps"):
        require_every(given)


def test_the_memory_of_a_process_is_its_peak() -> None:
    before, whole = process_memory()
    held = bytearray(200 * 2**20)
    for place in range(0, len(held), 4096):
        held[place] = 1
    after, _ = process_memory()
    assert 0 < before <= after < whole
    assert after >= 200 * 2**20
    del held
    assert process_memory()[0] >= after
