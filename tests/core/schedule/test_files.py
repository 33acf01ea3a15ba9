"""CSV: round trips, and errors that say in which row and column."""

from pathlib import Path

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.schedule.files import from_csv, load_csv, save_csv, to_csv
from shardwright.core.schedule.passes import insert_sharding, insert_transfers


@pytest.mark.parametrize("name", [*schedule_names(), "auto"])
def test_every_schedule_round_trips(name: str, tmp_path: Path) -> None:
    v = 2 if name in ("zbv", "v-half", "v-min", "dualpipev", "interleaved-1f1b") else 1
    schedule = Schedule.build(name, ranks=3, microbatches=6, virtual_stages=v)
    for one in (schedule, insert_transfers(schedule), insert_transfers(insert_sharding(schedule))):
        save_csv(one, tmp_path / "schedule.csv")
        again = load_csv(tmp_path / "schedule.csv", one.name)
        assert (again.table, again.placement, again.microbatches) == (one.table, one.placement, one.microbatches)
        assert again.digest == one.digest


def test_empty_cells_and_rows_at_the_end_are_ignored() -> None:
    schedule = from_csv("0F0,,0F1,0B0,,0B1\n,1F0,1B0,1F1,1B1,\n\n")
    assert schedule.digest == Schedule.build("1f1b", ranks=2, microbatches=2).digest


GOOD = to_csv(Schedule.build("1f1b", ranks=3, microbatches=3))
BAD = [
    (GOOD.replace("1F1", "1F0"), r"row 2 \(rank 1\), column 2 repeats 1F0, which is in row 2 \(rank 1\), column 1"),
    (
        GOOD.replace("1F1,", ""),
        r"row 2 \(rank 1\) has no 1F1: expected it once \(1F0 is in column 1, 1F2 is in column 3",
    ),
    (GOOD.replace("1B1,", ""), r"row 2 \(rank 1\) has no 1B1"),
    (GOOD.replace("1F1", "1X1"), r"row 2 \(rank 1\), column 2: '1X1' is not an action: expected a stage, a kind"),
    (GOOD.replace("1B1", "2B1"), r"row 3 \(rank 2\), column 1 holds 2F0, but stage 2 is in row 2"),
    (GOOD.replace("1B1", "1I1"), r"row 2 \(rank 1\) has no 1W1"),
    (GOOD.replace("1B1", "1W1"), r"row 2 \(rank 1\) has no 1I1"),
    ("0F0,0B0\n2F0,2B0\n", "stage 1 is in no cell"),
    ("0F0\n1F0,2F0\n", "3 stages do not divide over 2 rows"),
    ("0F0,1F0\n2F0,3F0,3F1\n", r"has no 0F1"),
    ("", "the CSV is empty"),
    ("0B0", "has no forward"),
]


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message for _, message in BAD])
def test_errors_name_the_cell_and_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)
