"""A schedule is checked where it enters: when it is made, read, taken from a plan, or handed to a runtime."""

from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.core.errors import PlanError, PlanFileError, ScheduleError
from shardwright.core.plan.decision import Decision
from shardwright.core.plan.file import to_text
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Action, Kind, Schedule, StageCosts
from shardwright.core.schedule.checks import require_runnable, require_trains
from shardwright.core.schedule.files import from_csv, load_csv, save_csv, to_csv
from tests.core.toy import decoder

GPIPE = Schedule.build("gpipe", ranks=2, microbatches=2)
CROSSED = ("0F0,0B0,0F1,0B1", "1F0,1F1,1B0,1B1")
"""Whole and in order on each rank, and yet each waits for the other."""


def with_order(rank: int, *cells: str) -> Schedule:
    table = list(GPIPE.table)
    table[rank] = tuple(map(Action.parse, cells))
    return replace(GPIPE, table=tuple(table))


NOT_WHOLE = [
    (("0F0", "0F1", "0B0"), "rank 0 never runs 0B1"),
    (("0F0", "0F1"), "rank 0 never runs 0B0, nor 0I0 and 0W0"),
    ((), "rank 0 never runs 0F0"),
    (("0F0", "0B1", "0F1", "0B0"), "0B1 comes before 0F1"),
    (("0F0", "0F1", "0B0", "0B1", "0B1"), "0B1 is on rank 0 a second time; the first is at step 3"),
    (("0F0", "0F1", "0I0", "0B1"), "rank 0 never runs 0W0"),
    (("0F0", "0F1", "0W0", "0I0", "0B1"), "0W0 comes before 0I0"),
    (("0F0", "0F1", "0I0", "0W0", "0B0", "0B1"), "0B0 repeats 0I0"),
    (("1F0", "0F0", "0F1", "0B0", "0B1"), "1F0 is on rank 0: stage 1 is on rank 1"),
    (("0F0", "0F1", "0F2", "0B0", "0B1"), "there is no microbatch 2"),
    (("0F0", "0F1", "2F0", "0B0", "0B1"), "there is no stage 2"),
    (("(0F0;0B1)", "0F1", "0B0"), "0B1 comes before 0F1"),
]


@pytest.mark.parametrize(("cells", "said"), NOT_WHOLE, ids=[said for _, said in NOT_WHOLE])
def test_a_schedule_made_by_hand_is_whole_or_refused(cells: tuple[str, ...], said: str) -> None:
    with pytest.raises(ScheduleError) as refused:
        with_order(0, *cells)
    assert said in str(refused.value)
    assert str(refused.value).count("<-- here") == 1


def test_forwards_without_backwards_are_for_evaluation_alone() -> None:
    forward = Schedule.build("forward-only", ranks=2, microbatches=2)
    assert (forward.trains, GPIPE.trains) == (False, True)
    require_runnable(forward)
    require_trains(GPIPE)
    with pytest.raises(ScheduleError, match="forward-only has no backward passes"):
        require_trains(forward)


def test_ranks_that_wait_for_one_another() -> None:
    rows = tuple(tuple(map(Action.parse, row.split(","))) for row in CROSSED)
    crossed = replace(GPIPE, name="crossed", table=rows)
    for ask in (require_runnable, sw.simulate):
        with pytest.raises(ScheduleError, match=r"crossed: the schedule stops before its end \(deadlock\)"):
            ask(crossed)
    with pytest.raises(ScheduleError, match="deadlock"):
        from_csv("\n".join(CROSSED))


def test_a_csv_file_is_checked_where_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    save_csv(GPIPE, path)
    assert load_csv(path).digest == GPIPE.digest
    for text, said in (
        (to_csv(GPIPE).replace("0F0,0F1,0B0,0B1", "0B0,0F0,0F1,0B1"), "0B0 comes before 0F0"),
        (to_csv(GPIPE).replace("0B1", ""), "has no 0B1"),
        ("\n".join(CROSSED), "deadlock"),
        ("0F" + "9" * 5000, "is not an action"),
        ("0F٣", "is not an action"),
        ("0F999999999\n", "has no 0F0"),
        ("999999999F0\n", "stage 0 is in no cell"),
        ('"' + "x" * 200_000, "not CSV"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ScheduleError, match=said):
            load_csv(path)
    path.write_bytes(b"\xff\xfe0F0")
    with pytest.raises(ScheduleError, match="not text in UTF-8"):
        load_csv(path)
    for absent in (tmp_path / "none.csv", tmp_path, "\0", 7):
        with pytest.raises(ScheduleError):
            load_csv(absent)


GRAPH = decoder(layers=4, hidden=64, heads=4, vocabulary=256, sequence=16)


@pytest.fixture(scope="module")
def generated() -> sw.Plan:
    return sw.plan(
        GRAPH, sw.Cluster("a100-80gb", devices_per_node=2), batch=4, pp=2, tp=1, dp=1, microbatch=1, schedule="auto"
    )


def test_a_plan_file_without_backwards(generated: sw.Plan) -> None:
    rows = generated.decision.generated
    forwards = tuple(",".join(cell for cell in row.split(",") if "F" in cell) for row in rows)
    text = to_text(generated)
    for row, other in zip(rows, forwards, strict=True):
        assert row in text
        text = text.replace(row, other)
    with pytest.raises(PlanFileError, match="the generated schedule cannot be run: auto has no backward passes"):
        Plan.from_text(text)


def test_a_plan_file_with_a_table_that_cannot_be_run(generated: sw.Plan) -> None:
    first = generated.decision.generated[0]
    cells = first.split(",")
    last = next(cell for cell in reversed(cells) if "B" in cell or "W" in cell)
    swapped = [cells[-1], *cells[1:-1], cells[0]]
    for edited, said in (
        (",".join(cell for cell in cells if cell != last), "cannot be run"),
        (",".join(swapped), "cannot be run"),
        (first.replace("0F0", "0F7"), "cannot be run"),
    ):
        with pytest.raises(PlanFileError, match=said):
            Plan.from_text(to_text(generated).replace(first, edited))


def decision(**changes: object) -> Decision:
    values: dict[str, object] = {
        "pp": 2, "dp": 1, "tp": 1, "batch": 4, "microbatch": 1, "schedule": "1f1b", "stage_starts": (0, 1)
    }  # fmt: skip
    return Decision(**(values | changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "forward-only"}, "has no backward passes, and a plan trains"),
        ({"schedule": "zbv"}, "does not admit these sizes"),
        ({"schedule": "interleaved-1f1b", "virtual_stages": 2, "stage_starts": (0, 1, 2, 3), "batch": 5}, "admit"),
        ({"batch": 1 << 20}, "make 1048576 microbatches: 2 stages and 1048576 microbatches"),
        ({"optimizer": "sgdd"}, "optimizer='sgdd': did you mean 'sgd'"),
        ({"loss_scope": "nonsense"}, "loss_scope='nonsense'"),
        ({"precision": "fp23"}, "precision='fp23'"),
        ({"gradient_precision": "fp23"}, "gradient_precision='fp23'"),
        ({"recompute": "ful"}, "recompute='ful'"),
        ({"shard_group": 7, "shard": 1}, "shard_group=7 does not divide dp=1"),
        ({"shard_group": 2, "shard": 0, "dp": 2}, "shard=0 and shard_group=2"),
        ({"kept_units": (1, 1), "recompute": "full"}, "each unit once"),
        ({"placement_order": 7}, "placement_order=7"),
        ({"sequence_parallel": "yes"}, "sequence_parallel='yes'"),
    ],
)
def test_a_decision_that_cannot_be_run(changes: dict[str, object], said: str) -> None:
    decision()
    with pytest.raises(PlanError) as refused:
        decision(**changes)
    assert said in str(refused.value)


def test_no_schedule_is_built_that_takes_minutes() -> None:
    for ranks, microbatches in ((2, 10**9), (10**9, 2), (1, 10**9)):
        with pytest.raises(ScheduleError, match="a schedule has at most"):
            Schedule.build("1f1b", ranks=ranks, microbatches=microbatches)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Action(0, "F", 0),
        lambda: Action(0.0, Kind.FORWARD, 0),
        lambda: Action(0, Kind.FORWARD, True),
        lambda: Action(0, Kind.OVERLAP, None, ["0F0"]),
        lambda: Action.parse(7),
        lambda: replace(GPIPE, table=(("0F0",), ("1F0",))),
        lambda: replace(GPIPE, table=[list(order) for order in GPIPE.table]),
        lambda: replace(GPIPE, placement=(0, 7)),
        lambda: replace(GPIPE, microbatches=2.0),
        lambda: replace(GPIPE, credits="2"),
        lambda: Schedule.build(["1f1b"], ranks=2, microbatches=2),
        lambda: Schedule.build("1f1b", ranks=2, microbatches=2, costs=7),
        lambda: Schedule.build("1f1b", ranks=2, microbatches=2, memory_limit_bytes="ab"),
        lambda: Schedule.build("auto", ranks=2, microbatches=2, memory_limit_bytes=[1, float("nan")]),
        lambda: StageCosts(1.0, (1.0,), (1.0,), (), (1,)),
        lambda: StageCosts(("a",), (1.0,), (1.0,), (), (1,)),
        lambda: StageCosts((1.0,), (1.0,), (1.0,), (), (1.5,)),
        lambda: StageCosts((1e300,), (1.0,), (1.0,), (), (1,)),
        lambda: StageCosts((10**400,), (1.0,), (1.0,), (), (1,)),
        lambda: StageCosts((1.0,), (1.0,), (1.0,), (), (1,), overlap="half"),
        lambda: StageCosts.uniform("two"),
        lambda: StageCosts.uniform(10**12),
    ],
)
def test_values_of_other_kinds_are_named(make: object) -> None:
    with pytest.raises(ScheduleError):
        make()
