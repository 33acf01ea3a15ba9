"""Jobs on the event engine: against a plain simulation, brute force, closed forms and Hydra's bound."""

import itertools
import json
import math
import random
import tracemalloc
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.core.errors import ScheduleError
from shardwright.core.jobs.policies import POLICIES, queue_of
from shardwright.core.schedule.measured_costs import measured_costs
from shardwright.report import save_perfetto, timeline_svg, timeline_text
from tests.core.jobs.by_hand import bound_s, faults_of, hydra_units, plainly, rows_of

EVERY = tuple(POLICIES)


def draw_units(draw: random.Random, jobs: tuple[int, int] = (2, 40), units: int = 20) -> list[list[float]]:
    """Lists of unequal units: of jobs that are long and short, and of whole seconds at times, so that many end at
    once."""
    whole = draw.random() < 0.3
    lists = []
    for _ in range(draw.randint(*jobs)):
        scale = draw.choice((0.2, 1.0, 5.0))
        count = draw.randint(1, units)
        lists.append([float(draw.randint(1, 4)) if whole else draw.uniform(0.05, 2) * scale for _ in range(count)])
    return lists


@pytest.mark.parametrize("policy", ["sharded-lrtf", "shortest", "fifo"])
def test_the_engine_agrees_with_a_plain_simulation(policy: str) -> None:
    draw = random.Random(policy)
    for _ in range(60):
        units, devices = draw_units(draw, (1, 12), 10), draw.randint(1, 6)
        runs = [len(row) for row in units]
        assert rows_of(sw.simulate_jobs(units, devices, policy)) == plainly(
            units, devices, policy, [0.0] * len(runs), runs
        )
        arrival = [draw.choice((0.0, 2.0, draw.uniform(0, 20))) for _ in units]
        ends = {job: draw.randint(0, count) for job, count in enumerate(runs) if draw.random() < 0.3}
        runs = [ends.get(job, count) for job, count in enumerate(runs)]
        found = rows_of(sw.simulate_jobs(units, devices, policy, arrival_s=arrival, ends_after=ends))
        assert found == plainly(units, devices, policy, arrival, runs)


def keep_the_bound(lists: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(lists):
        units, devices = draw_units(draw), draw.randint(1, 16)
        timeline = sw.simulate_jobs(units, devices)
        assert timeline.makespan_s <= bound_s(units, devices) * (1 + 1e-12)
        assert not faults_of(timeline, units)


def test_the_longest_first_keeps_hydras_bound() -> None:
    keep_the_bound(150, 0)


@pytest.mark.slow
def test_the_longest_first_keeps_hydras_bound_5000_times() -> None:
    keep_the_bound(5000, 1)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("is_double", [True, False])
def test_copies_leave_every_unit_in_its_order(policy: str, is_double: bool) -> None:
    draw = random.Random(f"{policy} {is_double}")
    for _ in range(40):
        units, devices = draw_units(draw, (1, 12), 10), draw.randint(1, 5)
        copies_in = [[draw.choice((0.0, 0.5, 1.0)) * s for s in row] for row in units]
        copies_out = [[draw.choice((0.0, 0.5, 1.0)) * s for s in row] for row in units]
        sizes = [[draw.randint(1, 9) for _ in row] for row in units]
        timeline = sw.simulate_jobs(
            units,
            devices,
            policy,
            copy_in_s=copies_in,
            copy_out_s=copies_out,
            double_buffering=is_double,
            host_links=draw.choice((None, 1, 2)),
            unit_bytes=sizes,
            device_bytes=draw.choice((9, 12, 18)),
            seed=draw.randrange(9),
        )
        assert not faults_of(timeline, units)
        check_copies(timeline, units, copies_in, copies_out)
        check_path(timeline)
        for device in range(devices):
            _, held = timeline.memory(device)
            assert not len(held) or (held[-1] == 0 and held.min() >= 0)
        assert max(timeline.peak_activation_bytes) <= 18


def check_copies(timeline: sw.Timeline, units: list, copies_in: list, copies_out: list) -> None:
    """A unit starts when its shard is there; elsewhere a job goes on when its copy out has ended."""
    ran = {
        (span.action.job, span.action.number): (device, span.start_s, span.end_s)
        for device in range(timeline.ranks)
        for span in timeline.spans(device)
    }
    seen = {(copy.action.job, copy.action.number, copy.action.kind): copy for copy in timeline.transfers}
    assert len(seen) == len(timeline.transfers)
    for (job, unit), (device, start, end) in ran.items():
        came, went = seen.get((job, unit, "IN")), seen.get((job, unit, "OUT"))
        assert (came is not None) == (copies_in[job][unit] > 0)
        assert (went is not None) == (copies_out[job][unit] > 0)
        assert came is None or (came.target == device and came.end_s <= start)
        assert went is None or (went.source == device and went.start_s >= end)
        if went is not None and unit + 1 < len(units[job]):
            other, after, _ = ran[job, unit + 1]
            assert other == device or after >= went.end_s


def check_path(timeline: sw.Timeline) -> None:
    path = timeline.critical_path()
    assert path[0].start_s == 0
    assert path[-1].end_s == timeline.makespan_s
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(path))


def least_by_brute_force(units: list[list[float]], devices: int) -> float:
    """The least makespan over all orders of units, each on the device that is free first."""
    best = math.inf

    def extend(position: tuple[int, ...], free: tuple[float, ...], job_s: tuple[float, ...]) -> None:
        nonlocal best
        if all(at == len(row) for at, row in zip(position, units, strict=True)):
            best = min(best, max(job_s))
        for job, at in enumerate(position):
            if at < len(units[job]):
                first = min(range(devices), key=lambda each: free[each])
                end = max(free[first], job_s[job]) + units[job][at]
                if end < best:
                    extend(
                        tuple(p + (j == job) for j, p in enumerate(position)),
                        tuple(end if d == first else f for d, f in enumerate(free)),
                        tuple(end if j == job else s for j, s in enumerate(job_s)),
                    )

    extend((0,) * len(units), (0.0,) * devices, (0.0,) * len(units))
    return best


def test_the_optimum_is_that_of_brute_force_and_no_policy_beats_it() -> None:
    pytest.importorskip("ortools")
    draw = random.Random(3)
    for _ in range(12):
        units, devices = draw_units(draw, (2, 4), 3), draw.randint(2, 3)
        best = sw.simulate_jobs(units, devices, "optimum")
        assert not faults_of(best, units)
        assert best.makespan_s == pytest.approx(least_by_brute_force(units, devices), rel=1e-5)
        for policy in EVERY:
            assert sw.simulate_jobs(units, devices, policy).makespan_s >= best.makespan_s * (1 - 1e-5)


@pytest.mark.parametrize(("devices", "jobs", "shards"), [(2, 2, 3), (4, 4, 8), (4, 6, 2), (8, 12, 8), (3, 7, 5)])
def test_the_gain_over_model_parallelism_is_the_closed_form(devices: int, jobs: int, shards: int) -> None:
    f, b, minibatches = 1.0, 2.0, 60
    one_after_another = jobs * minibatches * shards * (f + b)
    pool = sw.simulate_jobs([hydra_units(shards, f, b, minibatches)] * jobs, devices).makespan_s
    keeps = devices * shards * (f + b) / (shards * (f + b) + (shards - 1) * f)
    assert one_after_another / pool == pytest.approx(keeps, rel=0.01)
    both_recompute = jobs * minibatches * sum(hydra_units(shards, f, b))
    assert both_recompute / pool == pytest.approx(devices, rel=0.01)


@pytest.mark.parametrize("jobs", [4, 6, 8, 20])
def test_copies_of_half_a_unit_are_hidden_and_cost_what_they_take_otherwise(jobs: int) -> None:
    units, devices = [[1.0] * 200] * jobs, 4
    plain = sw.simulate_jobs(units, devices).makespan_s
    copies = {"copy_in_s": 0.5, "copy_out_s": 0.5}
    shown = sw.simulate_jobs(units, devices, **copies).makespan_s - plain
    assert shown <= 0.05 * (jobs * 200 / devices)
    alone = sw.simulate_jobs(units, devices, **copies, double_buffering=False).makespan_s
    assert alone == pytest.approx(2 * plain, rel=0.01)


def test_a_shared_link_carries_one_copy_at_a_time() -> None:
    units = [[1.0] * 50] * 8
    shared = sw.simulate_jobs(units, 4, copy_in_s=0.5, host_links=1)
    assert shared.makespan_s == pytest.approx(400 * 0.5, rel=0.02)  # the link is what is short
    moves = sorted((copy.start_s, copy.end_s) for copy in shared.transfers)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(moves))


def test_jobs_arrive_end_early_and_fail_alone() -> None:
    units = [[1.0] * 4, [1.0] * 4, [2.0] * 3]
    timeline = sw.simulate_jobs(units, 2, arrival_s=[0.0, 0.5, 10.0], ends_after={0: 2})
    rows = sorted(itertools.chain(*rows_of(timeline)))
    assert [row for row in rows if row[0] == 0] == [(0, 0, 0.0, 1.0), (0, 1, 1.0, 2.0)]
    assert [row[2] for row in rows if row[0] == 1] == [0.5, 1.5, 2.5, 3.5]
    assert [row[2] for row in rows if row[0] == 2] == [10.0, 12.0, 14.0]
    assert sw.simulate_jobs(units, 2, ends_after={0: 0, 1: 0}).makespan_s == 6.0
    kept = sw.simulate_jobs(units, 2, ends_after={0: 1}, copy_in_s=0.5, copy_out_s=0.25, unit_bytes=3, device_bytes=6)
    assert sum(len(row) for row in rows_of(kept)) == 1 + 4 + 3
    assert all(kept.memory(device)[1][-1] == 0 for device in range(2))


def test_memory_of_a_device_holds_two_shards_where_there_is_room() -> None:
    units = [[1.0] * 20] * 6
    wide = sw.simulate_jobs(units, 2, copy_in_s=0.5, unit_bytes=10, device_bytes=20)
    narrow = sw.simulate_jobs(units, 2, copy_in_s=0.5, unit_bytes=10, device_bytes=19)
    assert (max(wide.peak_activation_bytes), max(narrow.peak_activation_bytes)) == (20, 10)
    assert wide.makespan_s == 60.5
    assert narrow.makespan_s == 90.0


def test_the_random_policy_follows_its_seed() -> None:
    units = draw_units(random.Random(5), (10, 10))
    first, again, other = (rows_of(sw.simulate_jobs(units, 3, "random", seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    queue = queue_of("random", [0.0] * 3, seed=0)
    taken = []
    for _ in range(3000):
        queue.put(0, 1.0)
        queue.put(1, 1.0)
        taken.append(queue.take((2, 1.0)))
        while queue.take() is not None:
            pass
    assert all(taken.count(job) / 3000 == pytest.approx(1 / 3, abs=0.04) for job in range(3))


def test_a_timeline_of_jobs_is_shown_as_one_of_a_schedule_is(tmp_path: Path) -> None:
    timeline = sw.simulate_jobs([[2.0, 2.0], [1.0, 1.0]], 2, copy_in_s=0.5, unit_bytes=7)
    lines = timeline_text(timeline, width=18).splitlines()
    assert lines[0].startswith("device 0  ")
    assert lines[0].count("0") > 12
    assert "7 bytes held on a device" in lines[2] or "14 bytes held on a device" in lines[2]
    picture = timeline_svg(timeline)
    assert picture.count("<title>") == 4
    assert all(text in picture for text in ("device 1", "0U1 ", "1U1 "))
    save_perfetto(timeline, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sorted(e["name"] for e in events if e["ph"] == "X") == sorted(
        ["0U0", "0U1", "1U0", "1U1", "0IN0", "0IN1", "1IN0", "1IN1"]
    )
    assert {"from the host"} == {e["args"]["name"] for e in events if e.get("tid") == 1002 and e["ph"] == "M"}
    assert any(e["ph"] == "C" and e["name"] == "memory" for e in events)
    spans = [span for device in range(2) for span in timeline.spans(device)]
    measured = sw.Timeline.measured(spans, 2, timeline.transfers, held=timeline.held, lane="device")
    assert measured.makespan_s == timeline.makespan_s
    assert measured.peak_activation_bytes == timeline.peak_activation_bytes
    assert measured.peak_live_activations == (0, 0)
    assert sw.Timeline.measured(spans, 2, lane="device").peak_activation_bytes == (0, 0)
    with pytest.raises(ScheduleError, match="a timeline of jobs has no stages"):
        measured_costs([measured])


def test_many_units_take_little_memory() -> None:
    """How long they take is in benchmarks/jobs.py."""
    units = [[1.0 + job / 7 + unit % 3 for unit in range(300)] for job in range(50)]
    tracemalloc.start()
    timeline = sw.simulate_jobs(units, 8, copy_in_s=0.5, copy_out_s=0.5)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sum(len(row) for row in timeline.actions) == 15_000
    assert peak * 100 < 2**30  # A hundredth of the units.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"units_s": []}, "no jobs"),
        ({"units_s": [[1.0], []]}, r"units_s\[1\] has no units"),
        ({"units_s": [[1.0, math.nan]]}, r"units_s\[0\]\[1\]=nan of unit 1 of job 0"),
        ({"units_s": [[1.0], [2.0, -1.0]]}, r"units_s\[1\]\[1\]=-1.0"),
        ({"units_s": [[math.inf]]}, r"units_s\[0\]\[0\]=inf"),
        ({"units_s": [["1"]]}, r"units_s\[0\]\[0\]='1'"),
        ({"units_s": [[[1.0], 2.0]]}, r"units_s\[0\]\[0\]=\[1.0\]"),
        ({"units_s": [[[1.0], [2.0]]]}, r"units_s\[0\]\[0\]=\[1.0\]"),
        ({"units_s": [[True]]}, r"units_s\[0\]\[0\]=True"),
        ({"units_s": [1.0]}, r"units_s\[0\]=1.0: expected a number for each unit"),
        ({"units_s": 3}, "units_s=3"),
        ({"units_s": "abc"}, "units_s='abc'"),
        ({"devices": 0}, "devices=0: expected a whole number of at least 1"),
        ({"devices": 2.0}, "devices=2.0"),
        ({"devices": True}, "devices=True"),
        ({"policy": "lrtf"}, "no policy is named 'lrtf': did you mean 'sharded-lrtf'"),
        ({"policy": None}, "no policy is named None"),
        ({"copy_in_s": -1.0}, "copy_in_s=-1.0"),
        ({"copy_in_s": [[1.0]]}, "copy_in_s is of 1 jobs: expected 2"),
        ({"copy_out_s": [[1.0], [1.0]]}, r"copy_out_s\[0\] has 1 entries: expected 2"),
        ({"copy_out_s": [[1.0, math.nan], [1.0]]}, r"copy_out_s\[0\]\[1\]=nan"),
        ({"double_buffering": 1}, "double_buffering=1"),
        ({"host_links": 0}, "host_links=0"),
        ({"arrival_s": [0.0]}, "arrival_s has 1 entries: expected 2"),
        ({"arrival_s": [0.0, math.nan]}, r"arrival_s\[1\]=nan"),
        ({"ends_after": {2: 1}}, "ends_after names job 2: expected 0 to 1"),
        ({"ends_after": {0: 3}}, r"ends_after\[0\]=3: expected 0 to 2"),
        ({"unit_bytes": 1.5}, r"unit_bytes\[0\]\[0\]=1.5"),
        ({"device_bytes": 9}, "device_bytes without unit_bytes"),
        ({"unit_bytes": [[1, 12], [3]], "device_bytes": 9}, "unit 1 of job 0 holds 12 bytes, 3 more than a device has"),
        ({"policy": "optimum", "copy_in_s": 1.0}, "knows no copies"),
        ({"policy": "optimum", "ends_after": {0: 1}}, "leave out ends_after"),
        ({"policy": "random", "seed": None}, "seed=None"),
    ],
)
def test_bad_input_is_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        sw.simulate_jobs(**{"units_s": [[1.0, 2.0], [3.0]], "devices": 2} | given)


def test_the_optimum_refuses_what_it_cannot_prove() -> None:
    pytest.importorskip("ortools")
    with pytest.raises(ScheduleError, match="at most 64 units, here 65"):
        sw.simulate_jobs([[1.0] * 65], 2, "optimum")
