"""Shards: their bytes against those of stages, and the cut against every other one."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import shardwright as sw
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.jobs.cut import LABELS, SAME, choices_of
from shardwright.core.jobs.job import Job
from shardwright.core.jobs.shard_tables import ShardTables
from shardwright.core.model.graph import Graph
from tests.core.toy import decoder
from tests.core.uneven import chain

TRAITS = MemoryTraits(gradients_when_made=True)


def job(graph: Graph, **given: object) -> Job:
    usual: dict[str, object] = {"name": "a", "steps": 3, "batch": 4, "precision": "fp32"}
    return Job(model=graph, **(usual | given))  # type: ignore[arg-type]


def random_chain(seed: int, units: int) -> Graph:
    draw = np.random.default_rng(seed)
    widths, hidden = (64 * draw.integers(1, 9, count) for count in (units + 1, units))
    return replace(chain(list(map(int, widths)), list(map(int, hidden)), sequence=16), memory_traits=TRAITS)


def best_of_all(tables: ShardTables, budget: int, buffer: int | None, *, beside: bool) -> tuple[float, int] | None:
    """The least seconds, and the fewest shards, over all cuts and all that may become of activations."""
    found = []
    for count in range(tables.units):
        for inner in itertools.combinations(range(1, tables.units), count):
            ends = list(zip((0, *inner), (*inner, tables.units), strict=True))
            for labels in itertools.product(LABELS, repeat=count):
                passes = [
                    p for (a, b), of in zip(ends, (*labels, "keep"), strict=True) for p in tables.passes(a, b, of)
                ]
                fits = max(p.device_bytes for p in passes) + (buffer or 0) <= budget
                if fits and (buffer is None or max(p.buffer_bytes for p in passes) <= buffer):
                    found.append((sum(p.seconds(beside=beside) for p in passes), count + 1))
    least = min(found, default=None)
    return None if least is None else (least[0], min(n for s, n in found if s <= least[0] * (1 + SAME)))


def test_the_cut_is_the_best_of_all() -> None:
    cut_in: list[int] = []
    for seed in range(24):
        draw = np.random.default_rng(seed)
        graph = random_chain(seed, int(draw.integers(3, 6)))
        given = job(graph, clip_norm=1.0 if seed % 2 else None, batch=8, microbatch=4)
        tables, beside = ShardTables(given, sw.Cluster("v100")), bool(seed % 3)
        budget = int(max(p.device_bytes for p in tables.passes(0, tables.units, "keep")) * draw.uniform(0.4, 1.1))
        choices = choices_of(tables, budget, beside=beside)
        sizes = sorted({int(size) for size in choices.buffer_bytes})
        for buffer in (None, *sizes[:: max(1, len(sizes) // 3)]):
            cut, best = choices.cut(budget, buffer), best_of_all(tables, budget, buffer, beside=beside)
            assert (cut is None) == (best is None)
            if cut is not None and best is not None:
                assert (cut.cost_s, len(cut.starts)) == (pytest.approx(best[0], rel=1e-8), best[1])
                cut_in.append(len(cut.starts))
    assert len(cut_in) > 20
    assert len(set(cut_in)) > 2


@pytest.mark.parametrize("traits", [TRAITS, MemoryTraits()])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_shards_are_those_of_stages(traits: MemoryTraits, tied: bool) -> None:
    graph = decoder(layers=4, hidden=64, vocabulary=512) if tied else random_chain(5, 6)
    graph = replace(graph, memory_traits=traits)
    tables = ShardTables(job(graph), sw.Cluster("v100"))
    starts = (0, 2, 4)
    plan = sw.plan(
        graph, sw.Cluster("v100", devices_per_node=3), batch=4, microbatch=4, pp=3, dp=1, tp=1, schedule="gpipe",
        recompute="none", shard=0, precision="fp32", optimizer="adamw", stage_starts=starts,
    )  # fmt: skip
    compared = 0
    for stage, (a, b) in enumerate(zip(starts, (*starts[1:], tables.units), strict=True)):
        use = plan.predicted.memory_by_stage_rank[stage]
        assert tables.parameters_bytes(a, b) == use.parameters_bytes
        assert tables.trained(a, b) * 4 == use.gradients_bytes
        assert tables.activations_bytes(a, b) == use.activations_bytes
        if not tied:
            assert tables.optimizer_bytes(a, b) == use.optimizer_bytes
        backward = tables.passes(a, b, "recompute")[-1]
        messages = 4 * (tables.table.boundary_bytes[a] + (tables.table.boundary_bytes[b] if b < tables.units else 0))
        lent = tables.trained(a, b) - tables.updated(a, b)
        states = use.optimizer_bytes - tables.optimizer_bytes(a, b)
        sums = int(tables.summed[a, b]) * 4
        assert use.total_bytes - states <= backward.device_bytes
        assert backward.device_bytes <= use.total_bytes - states + messages + sums + 4 * lent
        compared += 1
    assert compared == 3


def test_a_tied_parameter_is_updated_once_and_its_gradients_are_summed() -> None:
    graph = decoder(layers=4, hidden=64, vocabulary=512)
    tables = ShardTables(job(graph), sw.Cluster("v100"))
    ends = [(0, 1), (1, 3), (3, tables.units)]
    every = graph.parameter_count()
    assert sum(tables.updated(a, b) for a, b in ends) == every
    table = 512 * 64
    assert sum(tables.trained(a, b) for a, b in ends) == every + table
    last, first = tables.passes(*ends[2], "keep")[-1], tables.passes(*ends[0], "recompute")[-1]
    plain = tables.updated(*ends[2]) * (4 + 8) + tables.crossing.entering_flowing[ends[2]]
    assert last.out_bytes == plain + 4 * table  # its gradient leaves, and no parameter or state of it
    assert first.in_bytes >= 4 * table + (4 + 8) * table  # the sum comes in, with parameter and states
    parameters, gradients, states = tables.state_host_bytes((0, 1, 3))
    assert (parameters, gradients, states) == (4 * every, 4 * table, 8 * every)


def test_updates_that_wait_cost_a_pass_and_gradients_on_the_host() -> None:
    graph = random_chain(3, 5)
    at_once = ShardTables(job(graph), sw.Cluster("v100"))
    waiting = ShardTables(job(graph, clip_norm=1.0), sw.Cluster("v100"))
    ahead, back, update = waiting.passes(1, 3, "recompute")
    assert [p.kind for p in (ahead, back, update)] == ["forward", "backward", "update"]
    plain = at_once.passes(1, 3, "recompute")[-1]
    trained = waiting.trained(1, 3)
    assert plain.in_bytes - back.in_bytes == 8 * trained
    assert plain.out_bytes - back.out_bytes == (4 + 8 - 4) * trained
    assert (update.in_bytes, update.out_bytes) == ((4 + 8 + 4) * trained, (4 + 8) * trained)
    assert back.run_s + update.run_s == pytest.approx(plain.run_s)
    assert waiting.state_host_bytes((0, 1, 3))[1] == 4 * graph.parameter_count()
    assert at_once.state_host_bytes((0, 1, 3))[1] == 0


def test_microbatches_pass_a_shard_while_it_is_there() -> None:
    graph = random_chain(4, 5)
    one = ShardTables(job(graph, batch=4, microbatch=4), sw.Cluster("v100"))
    four = ShardTables(job(graph, batch=16, microbatch=4), sw.Cluster("v100"))
    for single, several in zip(one.passes(1, 3, "offload"), four.passes(1, 3, "offload"), strict=True):
        assert several.run_s > 3 * single.run_s
        shard = one.parameters_bytes(1, 3)
        assert several.in_bytes - single.in_bytes < 3 * single.in_bytes - 2 * shard  # the shard itself comes once
        assert several.buffer_bytes == single.buffer_bytes


def test_what_is_kept_depends_on_what_ends_sooner() -> None:
    """Over a fast link to the host activations come back; over a slow one they are computed again."""
    graph = random_chain(7, 6)
    labels = {}
    for rate in (1e9, 1e14):
        device = replace(load_profile("v100").device, host_link_bandwidth_bytes_per_s=rate)
        tables = ShardTables(job(graph, batch=64), sw.Cluster(device))
        most = max(p.device_bytes for p in tables.passes(0, tables.units, "keep"))
        cut = choices_of(tables, most - 1, beside=True).cut(most - 1, None)
        assert cut is not None
        assert len(cut.starts) > 1
        labels[rate] = set(cut.labels[:-1])
    assert labels == {1e9: {"recompute"}, 1e14: {"offload"}}
