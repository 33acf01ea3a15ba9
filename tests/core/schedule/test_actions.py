"""Cells: text, parsing, and what is refused."""

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Action, Kind

PLAIN = [Action(stage, kind, None if kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD") else mb)
         for stage in (0, 3, 17) for mb in (0, 128) for kind in Kind if kind is not Kind.OVERLAP]  # fmt: skip


@pytest.mark.parametrize("action", PLAIN, ids=str)
def test_text_round_trips(action: Action) -> None:
    assert Action.parse(action.text) == action


def test_a_composite_round_trips_with_and_without_its_suffix() -> None:
    pair = Action.overlap(Action(0, Kind.FORWARD, 3), Action(3, Kind.BACKWARD, 1))
    assert pair.text == "(0F3;3B1)OVERLAP_F_B"
    assert Action.parse(pair.text) == Action.parse(" (0F3;3B1) ") == pair
    assert [part.text for part in pair.flat] == ["0F3", "3B1"]


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "-1F0", "2F-1", "1UNSHARD3", "(0F1)", "(0B1;3F1)", "(0F1;1F2)",
                                  "2F0 3", "((0F1;1B2);1B2)"])  # fmt: skip
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_the_kind_decides_whether_there_is_a_microbatch() -> None:
    with pytest.raises(ScheduleError, match="needs a microbatch"):
        Action(0, Kind.FORWARD)
    with pytest.raises(ScheduleError, match="concerns a whole stage"):
        Action(0, Kind.UNSHARD, 1)
