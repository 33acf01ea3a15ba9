"""Every named schedule over a grid of sizes: whole, legal, free of deadlock; and against other people's programs."""

import json
from pathlib import Path

import pytest

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.checks import check
from shardwright.core.schedule.family import Sizes
from shardwright.core.schedule.files import load_csv
from shardwright.core.schedule.simulate import simulate

GOLDENS = Path(__file__).parent / "goldens"
FIXED_TWO = ("zbv", "v-half", "v-min", "dualpipev")
NAMES = schedule_names()


@pytest.mark.parametrize("name", NAMES)
def test_every_size_is_built_and_passes_every_check_or_is_refused_with_a_reason(name: str) -> None:
    built = 0
    for ranks in (1, 2, 3, 4, 7):
        for m in sorted({1, 2, 3, ranks, 2 * ranks - 1, 2 * ranks, 3 * ranks + 1}):
            for v in (1, 2, 3):
                request = {"ranks": ranks, "microbatches": m, "virtual_stages": v}
                if FAMILIES[name].refusal(Sizes(**request)):
                    with pytest.raises(ScheduleError, match=f"{name} does not admit these sizes"):
                        Schedule.build(name, **request)
                    continue
                check(Schedule.build(name, **request))
                built += 1
    assert built > 10


@pytest.mark.parametrize("path", sorted(GOLDENS.glob("*.csv")), ids=lambda path: path.stem)
def test_the_order_is_that_of_an_independent_program(path: Path) -> None:
    name, ranks, m = path.stem.rsplit("-", 2)
    ours = Schedule.build(name, ranks=int(ranks), microbatches=int(m))
    assert [[a.text for a in order] for order in ours.table] == [[a.text for a in o] for o in load_csv(path).table]


@pytest.mark.parametrize("row", json.loads((GOLDENS / "makespans.json").read_text()), ids=str)
def test_never_longer_nor_fuller_than_an_independent_program(row: dict[str, object]) -> None:
    name, ranks, m = row["name"], row["ranks"], row["microbatches"]
    timeline = simulate(Schedule.build(name, ranks=ranks, microbatches=m, virtual_stages=2 if name in FIXED_TWO else 1))
    assert timeline.makespan_s <= row["makespan_s"]
    assert max(timeline.peak_live_activations) <= row["peak"]


def test_each_family_names_its_source() -> None:
    assert all(family.source and family.name == name for name, family in FAMILIES.items())


def test_simple_is_gpipe_when_everything_may_be_active_and_goes_in_waves_otherwise() -> None:
    gpipe = Schedule.build("gpipe", ranks=3, microbatches=7)
    assert Schedule.build("simple", ranks=3, microbatches=7, active_microbatches=7).digest == gpipe.digest
    waves = Schedule.build("simple", ranks=3, microbatches=7, active_microbatches=2)
    assert simulate(waves).peak_live_activations == (2, 2, 2)
    assert " ".join(a.text for a in waves.table[2][:6]) == "2F0 2F1 2B0 2B1 2F2 2F3"


@pytest.mark.parametrize("active", [1, 2, 5])
def test_interleaved_runs_a_backward_as_soon_as_there_is_one(active: int) -> None:
    schedule = Schedule.build("interleaved", ranks=3, microbatches=9, active_microbatches=active)
    assert max(simulate(schedule).peak_live_activations) <= active
    kinds = [action.kind.value for action in schedule.table[2]]
    assert kinds == ["F", "B"] * 9


def test_the_default_of_active_microbatches_is_ranks_and_two_more() -> None:
    given = Schedule.build("interleaved", ranks=3, microbatches=20, active_microbatches=5)
    assert Schedule.build("interleaved", ranks=3, microbatches=20).digest == given.digest


BAD = [
    ({"name": "1f1bb", "ranks": 2, "microbatches": 2}, "did you mean '1f1b'"),
    ({"name": "1f1b", "ranks": 0, "microbatches": 2}, "ranks=0 is not possible"),
    ({"name": "1f1b", "ranks": 2, "microbatches": 2.0}, "microbatches=2.0 is not possible"),
    ({"name": "1f1b", "ranks": 2, "microbatches": 2, "virtual_stages": 2}, "must be 1"),
    ({"name": "zbv", "ranks": 2, "microbatches": 2}, "must be 2"),
    (
        {"name": "interleaved-1f1b", "ranks": 4, "microbatches": 9, "virtual_stages": 2},
        "=8 and microbatches=10 would",
    ),
    ({"name": "dualpipev", "ranks": 4, "microbatches": 7, "virtual_stages": 2}, "at least 2 \\* ranks = 8"),
    ({"name": "1f1b", "ranks": 2, "microbatches": 2, "active_microbatches": 2}, "simple, interleaved"),
    ({"name": "simple", "ranks": 2, "microbatches": 2, "active_microbatches": 0}, "active_microbatches=0"),
    ({"name": "gpipe", "ranks": 2, "microbatches": 4, "memory_limit_bytes": 3}, "the least that gpipe keeps is 4"),
    ({"name": "gpipe", "ranks": 2, "microbatches": 4, "memory_limit_bytes": [4, 3, 2]}, "has 3 entries"),
    ({"name": "gpipe", "ranks": 2, "microbatches": 4, "memory_limit_bytes": float("nan")}, "expected finite"),
]


@pytest.mark.parametrize(("request_", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_requests_say_what_would_do(request_: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule.build(**request_)
