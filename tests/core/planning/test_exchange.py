"""Traffic over the data axis beside computing: closed forms, limits of ports, folding, bounds."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import shardwright as sw
import shardwright.core.tables.exchange as exchange
from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.execution import COMPILED_DISPATCH, PLAIN, SYSTEMS, Execution
from shardwright.core.plan.decision import Decision
from shardwright.core.search.exchanges import SLOWED, Exchanges, Held
from shardwright.core.search.predict import of_units
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scorer
from shardwright.core.search.space import Shape
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.tables.exchange import UnitTraffic, one_stage_of_several, whole_step, with_buckets
from shardwright.core.tables.mesh_links import Links
from tests.core.toy import decoder

GRAPH = decoder(layers=8, hidden=512, heads=8, vocabulary=4096, sequence=256)
AHEAD = Execution("ahead", "1", gradients=True, prefetched_units=1, tensor_chunks=1)
PINS = {"pp": 1, "tp": 1, "dp": 8, "microbatch": 2, "precision": "bf16", "recompute": "none"}


def units(count: int, **seconds: float) -> list[UnitTraffic]:
    return [UnitTraffic(2.0, 4.0, **seconds)] * count


def test_gathers_that_take_less_than_a_unit_are_hidden_but_for_the_first() -> None:
    """And the last sum, which leaves when nothing is left to compute."""
    found = whole_step(units(6, gather_s=1.0, sum_s=1.5), 1, AHEAD, 0.0, sums_each=True)
    assert found.exposed_s(1) == pytest.approx(1.0 + 1.5)
    assert found.exposed_s(1) + found.hidden_s == pytest.approx(6 * (2 * 1.0 + 1.5))


def test_traffic_that_takes_longer_than_computing_decides_the_step() -> None:
    each = {"gather_s": 5.0, "sum_s": 5.0}
    found = whole_step(units(6, **each), 4, AHEAD, 0.0, sums_each=True)
    step_s = 4 * 6 * 6.0 + found.exposed_s(4)
    sent_s = 4 * (6 + 5 + 6) * 5.0  # the last unit's parameters stay for the backward
    assert sent_s <= step_s <= sent_s + 2 * 6.0


def test_nothing_is_hidden_where_a_message_takes_the_whole_device_or_the_system_waits() -> None:
    each, traffic = units(5, gather_s=1.0, sum_s=1.5), 3 * (5 + 4) * 1.0 + 3 * 5 * 1.5
    waiting = Execution("waiting", "1", tensor_chunks=1)
    for execution, slowed in ((AHEAD, 1.0), (waiting, 0.0)):
        found = whole_step(each, 3, execution, slowed, sums_each=True)
        assert found.exposed_s(3) == pytest.approx(traffic), execution.system


def test_whole_gradients_leave_with_the_last_backward() -> None:
    """Buckets of two units: all but the last hide, where units take longer than they."""
    found = with_buckets(units(6), [1.0] * 6, 2.0, lambda size: size)
    assert [unit.sum_s for unit in found] == [2.0, 0.0, 2.0, 0.0, 2.0, 0.0]
    for microbatches in (1, 7):
        step = whole_step(found, microbatches, AHEAD, 0.0, sums_each=False)
        assert (step.exposed_s(microbatches), step.hidden_s) == (pytest.approx(2.0), pytest.approx(4.0))
    alone = whole_step(found, 7, PLAIN, 0.0, sums_each=False)
    assert (alone.exposed_s(7), alone.hidden_s) == (pytest.approx(6.0), 0.0)


def test_updated_parameters_are_gathered_beside_the_next_forward_where_a_system_does_that() -> None:
    each = units(5, update_gather_s=1.0)
    for hides, expected in ((False, 5.0), (True, 1.0)):
        execution = replace(AHEAD, updated_parameters=hides)
        for find in (whole_step, one_stage_of_several):
            assert find(each, 2, execution, 0.0, sums_each=False).exposed_s(2) == pytest.approx(expected), find


@pytest.mark.parametrize("execution", [PLAIN, *SYSTEMS.values()], ids=lambda e: e.system)
def test_long_models_and_steps_are_as_if_laid_whole(execution: Execution, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    for find, sums_each in itertools.product((whole_step, one_stage_of_several), (True, False)):
        for _ in range(4):
            times = dict(zip(("gather_s", "sum_s", "across_s"), random.uniform(0, 3, 3).tolist(), strict=True))
            own = [UnitTraffic(0.5, 1.0), *[UnitTraffic(1.0, 2.0, **times)] * 20, UnitTraffic(3.0, 5.0, **times)]
            with monkeypatch.context() as whole:
                whole.setattr(exchange, "MOST_ALIKE", 100)
                whole.setattr(exchange, "MOST_MICROBATCHES", 100)
                expected = find(own, 5, execution, 0.2, sums_each=sums_each)
            found = find(own, 5, execution, 0.2, sums_each=sums_each)
            compute = 5 * sum(unit.forward_s + unit.backward_s for unit in own)
            assert compute + found.exposed_s(5) == pytest.approx(compute + expected.exposed_s(5), rel=0.01), times


@pytest.mark.parametrize("like", [None, *SYSTEMS])
@pytest.mark.parametrize(("nodes", "each"), [(2, 4), (8, 8), (64, 8)])
def test_no_plan_moves_more_through_a_port_than_time_allows(like: str | None, nodes: int, each: int) -> None:
    """Whatever is hidden: the bytes that leave a node's port, over its rate, are at most the step."""
    for link, (shard, group) in itertools.product(
        ("ib-hdr200", "ethernet-10g"), ((0, None), (1, None), (2, None), (3, None), (3, each))
    ):
        cluster = Cluster("a100-80gb", nodes=nodes, devices_per_node=each, inter_node=link)
        world = cluster.world_size
        pins = PINS | {"dp": world}
        plan = sw.plan(GRAPH, cluster, batch=8 * world, shard=shard, shard_group=group, like=like, **pins)  # type: ignore[arg-type]
        size, p = 2.0 * plan.model.parameter_count, plan.predicted
        once = size * (nodes - 1) / nodes  # what a node has to take in of what is gathered or scattered once
        moved = {0: 2, 1: 2, 2: 1 + 4, 3: 4 * 2}[shard] * once if group is None else 2 * once
        if shard == 3 and plan.decision.whole_below_bytes:  # what stays whole is summed once
            moved = 2 * once
        port = cluster.link_for_group(range(world)).effective_bandwidth_bytes_per_s
        assert moved / port <= p.step_time_s * (1 + 1e-9), (link, shard)
        traffic = p.data_parallel_s + p.passes_wait_s + p.data_parallel_hidden_s
        assert traffic >= moved / port * (1 - 1e-9) or shard == 3, "exposed and hidden are all of it"


@pytest.mark.parametrize(("virtual", "schedule"), [(1, "1f1b"), (2, "interleaved-1f1b"), (4, "looped-bfs")])
def test_no_pipeline_moves_more_through_a_port_than_time_allows(virtual: int, schedule: str) -> None:
    """Of the stages on one rank, each replica sums the gradients and gathers the updated parameters."""
    for link, shard in itertools.product(("ib-hdr200", "ethernet-10g"), (0, 1)):
        cluster = Cluster("a100-80gb", nodes=8, devices_per_node=2, inter_node=link)
        pins = PINS | {"pp": 2, "dp": 8, "schedule": schedule, "virtual_stages": virtual, "placement_order": "DPT"}
        plan = sw.plan(GRAPH, cluster, batch=64, shard=shard, like="megatron-core", **pins)  # type: ignore[arg-type]
        p, port = plan.predicted, cluster.link_for_group(range(0, 16, 2)).effective_bandwidth_bytes_per_s
        least = 2 * min(use.parameters_bytes for use in p.memory_by_stage_rank) * 7 / 8 / port
        traffic = p.data_parallel_s + p.passes_wait_s + p.data_parallel_hidden_s
        assert least <= p.step_time_s, (link, shard)
        assert least <= traffic * (1 + 1e-9), (link, shard)


def test_levels_compared_by_bytes_and_exposure() -> None:
    """On a slow link each level that sends more takes longer; what is exposed is what computing cannot hide."""
    cluster = Cluster("a100-80gb", nodes=8, devices_per_node=8, inter_node="ethernet-10g")
    pins = PINS | {"dp": 64}
    found = [sw.plan(GRAPH, cluster, batch=512, shard=level, like="fsdp2", **pins).predicted for level in range(4)]  # type: ignore[arg-type]
    times = [p.step_time_s for p in found]
    assert times[0] <= times[2] < times[3], "once a step, each microbatch, and with two gathers beside"
    for p in found:
        assert p.step_time_s == pytest.approx(p.pipeline_s + p.data_parallel_s + p.optimizer_s)
        assert p.passes_wait_s <= p.pipeline_s


def test_a_plan_is_simulated_with_what_its_passes_wait_for() -> None:
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=4, inter_node="ethernet-10g")
    for pp in (1, 2):
        plan = sw.plan(GRAPH, cluster, batch=64, shard=3, gathered_stages=0, **PINS | {"pp": pp, "dp": 8 // pp})  # type: ignore[arg-type]
        assert plan.predicted.passes_wait_s > 0
        assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s)


def test_a_sender_that_waits_takes_longer() -> None:
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=4, inter_node="ethernet-10g")
    pins = PINS | {"pp": 2, "dp": 4, "schedule": "1f1b", "virtual_stages": 1}
    free, waiting = (sw.plan(GRAPH, cluster, batch=64, like=like, **pins) for like in (None, "deepspeed"))  # type: ignore[arg-type]
    assert waiting.predicted.pipeline_s > free.predicted.pipeline_s
    assert sw.simulate(waiting).makespan_s == pytest.approx(waiting.predicted.pipeline_s)


def test_traffic_of_interleaved_stages_travels_beside_the_passes_between_them() -> None:
    """Two ranks of two stages: while one microbatch more passes the first stage forward, and the same back."""
    cluster = Cluster("a100-80gb", nodes=4, devices_per_node=2, inter_node="ethernet-25g")
    graph = decoder(layers=8, hidden=512, heads=8, vocabulary=512, sequence=256)
    tables = CostTables(graph, cluster, "bf16", "adamw", execution=SYSTEMS["megatron-core"])
    starts = (0, 3, 5, 7)
    d = Decision(
        pp=2, dp=4, tp=1, batch=32, microbatch=2, schedule="interleaved-1f1b", virtual_stages=2, stage_starts=starts,
        shard=1, precision="bf16", placement_order="DPT",
    )  # fmt: skip
    scorer = Scorer(tables, cluster, Request(batch=d.batch))
    ranked = scorer.bounds.ranked(Shape(d.mesh, "DPT", d.microbatch, d.microbatches), "none")
    exchanges = scorer.step.exchanges
    table, held = ranked.tables[0], [(0, 3), (5, 7)]
    stages = [exchanges._units(d, table, ends, 0) for ends in held]
    together = exchanges._together(d, table, held, stages, 0)
    (filler,) = together[3:-2]
    assert [*together[:3], *together[-2:]] == [unit for units in stages for unit in units]
    first = stages[0]
    assert filler.forward_s == pytest.approx(sum(unit.forward_s for unit in first))
    assert filler.backward_s == pytest.approx(sum(unit.backward_s for unit in first))
    assert (filler.sum_s, filler.gather_s, filler.update_gather_s) == (0.0, 0.0, 0.0)
    apart, beside = (
        one_stage_of_several(units, d.microbatches, exchanges.execution, 0.15, sums_each=False).tail_s
        for units in ([unit for units in stages for unit in units], together)
    )
    assert 0 < beside < apart
    plain = replace(d, schedule="looped-bfs", placement_order="DPT")
    assert exchanges._together(plain, table, held, stages, 0)[3].backward_s == pytest.approx(3 * filler.backward_s)


@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_no_more_is_hidden_than_there_is_computing(shard: int) -> None:
    """Of one pipeline rank with several stages, whose passes are all of its computing."""
    cluster = Cluster("v100", nodes=4, inter_node="ethernet-10g")
    pins = PINS | {"dp": 4, "precision": "fp32", "schedule": "looped-bfs", "virtual_stages": 2}
    plan = sw.plan(GRAPH, cluster, batch=64, shard=shard, like="megatron-core", **pins)  # type: ignore[arg-type]
    assert plan.predicted.data_parallel_hidden_s <= plan.predicted.pipeline_s * (1 + 1e-9)


@pytest.mark.parametrize(
    ("device", "nodes", "each", "tp", "ways", "expected"),
    [
        ("h100", 4, 8, 1, None, 16 / 132),  # every port of a node: as many channels as there are
        ("h100", 4, 8, 4, None, 8 / 132),  # two of a tensor group's data groups on each node, with a port each
        ("h100", 4, 8, 8, None, 4 / 132),
        ("h100", 1, 8, 1, None, 0.15),  # within a node
        ("h100", 4, 8, 1, 8, 0.15),  # shard groups within a node, summed between them
        ("t4", 4, 2, 1, None, 0.15),
        ("tpu-v5e", 4, 8, 8, None, 0.0),
        ("cpu", 4, 2, 2, None, 1.0),
    ],
)
def test_the_channels_of_a_group_say_what_its_messages_take_of_a_device(
    device: str, nodes: int, each: int, tp: int, ways: int | None, expected: float
) -> None:
    cluster = Cluster(device, nodes=nodes, devices_per_node=each)
    d = Decision(
        pp=1, dp=nodes * each // tp, tp=tp, batch=64, microbatch=1, schedule="1f1b", stage_starts=(0,), shard=3,
        shard_group=ways,
    )  # fmt: skip
    exchanges = Exchanges(Links(cluster), "bf16", AHEAD)
    assert exchanges.slowed(d, d.mesh, 0) == pytest.approx(expected)
    by_stages = replace(d, gathered_stages=1)
    assert exchanges.slowed(by_stages, d.mesh, 0) == SLOWED[cluster.device(0).kind]


def test_parameters_that_are_gathered_one_by_one() -> None:
    """A layer of DeepSpeed's ZeRO-3 that is computed again, its weights in three or more messages each way: at its rate
    at most, with a copy for each rank, and once more before the backward where more lies between two uses."""
    hidden, cluster = 2048, Cluster("a100-80gb", nodes=2, devices_per_node=8)
    graph = decoder(layers=2, hidden=hidden, heads=8, vocabulary=512, sequence=256)
    d = Decision(
        pp=1, dp=16, tp=1, batch=64, microbatch=1, schedule="1f1b", stage_starts=(0,), shard=3, recompute="full",
        precision="bf16",
    )  # fmt: skip

    def of_layer(mode: str = "full", **changes: object) -> tuple[UnitTraffic, int, float]:
        """The traffic of a layer, the number of its large weights, and the bytes of all its parameters."""
        execution = replace(SYSTEMS["deepspeed-0.4"], **changes)  # type: ignore[arg-type]
        tables = CostTables(graph, cluster, "bf16", "adamw", execution=execution)
        scorer = Scorer(tables, cluster, Request(batch=d.batch, precision="bf16"))
        table = scorer.bounds.ranked(Shape(d.mesh, "PDT", d.microbatch, d.microbatches), mode).tables[0]
        assert (table.again_s[1] > 0) == (mode != "none")
        layer, unit = scorer.step.exchanges._units(d, table, (0, len(table.units)), 0)[1], table.units[1]
        return layer, unit.parameter_tensors, 2.0 * unit.parameter_elements

    plain: dict[str, object] = {"lists_ranks": False, "gathered_bytes_per_s": 0.0, "live_entries": 0}
    linked, count, size = of_layer(**plain)
    assert count == sum(
        graph.tensors[p.tensor].elements(2) >= 100_000 for p in graph.parameters if ".0." in f".{p.name}."
    )
    group = cluster.group(range(16))
    assert linked.gather_s == pytest.approx(count * group.all_gather_s(size / count))
    assert linked.again_gather_s == 0.0
    limited, _, _ = of_layer(**plain | {"gathered_bytes_per_s": 1e9})
    assert limited.gather_s == limited.sum_s == pytest.approx(size / 1e9)
    listed, _, _ = of_layer(**plain | {"lists_ranks": True})
    copies_s = count * 16 * cluster.device(0).dispatched_s * COMPILED_DISPATCH
    assert listed.gather_s - linked.gather_s == pytest.approx(copies_s)
    assert listed.sum_s - linked.sum_s == pytest.approx(copies_s)
    for entries, kept in ((size, count), (size / 2 / count * 3, 2), (1, 1)):  # between two uses: twice what follows
        released, _, _ = of_layer(**plain | {"live_entries": int(entries)})
        assert released.again_gather_s == pytest.approx((count - kept) * group.all_gather_s(size / count))
    for mode in ("none", "elementwise"):  # no weight is read between the passes
        assert of_layer(mode, **plain | {"live_entries": 1})[0].again_gather_s == 0.0


def test_units_without_a_parameter_that_is_gathered_stay_whole() -> None:
    """Narrow layers under DeepSpeed's ZeRO-3, whose weights are all below its threshold: their gradients are summed
    once a step, and no bound takes them to be gathered."""
    cluster, execution = Cluster("t4", nodes=2, devices_per_node=4), SYSTEMS["deepspeed-0.4"]
    graph = decoder(layers=4, hidden=128, heads=4, vocabulary=4096, sequence=64)
    exchanges = Exchanges(Links(cluster), "fp16", execution)
    tables = CostTables(graph, cluster, "fp16", "adamw", execution=execution)
    d = Decision(pp=1, dp=8, tp=1, batch=8, microbatch=1, schedule="1f1b", stage_starts=(0,), shard=3, precision="fp16")
    scorer = Scorer(tables, cluster, Request(batch=d.batch))
    ranked = scorer.bounds.ranked(Shape(d.mesh, "PDT", d.microbatch, d.microbatches), "none")
    table = ranked.tables[0]
    found = exchanges._units(d, table, (0, len(table.units)), 0)
    whole = [number for number, unit in enumerate(table.units) if not unit.parameter_tensors]
    assert len(whole) >= 4
    assert all(found[number].gather_s == found[number].sum_s == 0.0 for number in whole)
    assert sum(one.gather_s > 0 for one in found) == len(found) - len(whole) > 0
    staying = sum(table.units[number].trained_elements for number in whole)
    assert found[0].across_s == pytest.approx(cluster.group(range(8)).all_reduce_s(2 * staying))
    (work,), (step,) = ranked.work(d.stage_starts, d.stage_ranks), exchanges.of(d, ranked, d.stage_ranks)
    held = Held(work.elements, work.held_elements, work.seconds, *of_units(table))
    end_s = work.seconds + step.tail_s + step.stages[0].exposed_s(1) - step.stages[0].tail_s
    assert exchanges.least_end_s(held, d.mesh, d, 0) <= end_s


def test_an_unknown_system_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="did you mean 'megatron-core'"):
        sw.plan(GRAPH, Cluster("a100-80gb"), batch=8, like="megatron")


@pytest.mark.parametrize("execution", [PLAIN, *SYSTEMS.values()], ids=lambda e: e.system)
def test_no_bound_of_what_is_exposed_is_above_it(execution: Execution) -> None:
    cluster = Cluster("t4", nodes=2, devices_per_node=4, inter_node="ethernet-10g")
    exchanges = Exchanges(Links(cluster), "fp16", execution)
    tables = CostTables(GRAPH, cluster, "fp16", "adamw", execution=execution)
    options = itertools.product(((1, 1), (2, 1), (2, 2)), (0, 1, 2, 3), (None, 2), (1, 8), (0, 1 << 20))
    for (pp, virtual), shard, group, times, below in options:
        d = Decision(
            pp=pp, dp=8 // pp, tp=1, batch=8 // pp * times, microbatch=1,
            schedule="1f1b" if virtual == 1 else "interleaved-1f1b", virtual_stages=virtual,
            stage_starts=tuple(range(0, 10, 5) if virtual == 1 and pp == 2 else range(0, 8, 2) if pp == 2 else (0,)),
            shard=shard, shard_group=group if shard else None,
            precision="fp16", whole_below_bytes=below if shard == 3 else 0,
        )  # fmt: skip
        scorer = Scorer(tables, cluster, Request(batch=d.batch))
        ranked = scorer.bounds.ranked(Shape(d.mesh, "PDT", d.microbatch, d.microbatches), "none")
        work = ranked.work(d.stage_starts, d.stage_ranks)
        found = scorer.step.predicted(d, ranked, (), d.stage_ranks)
        pipeline_s = max(rank.seconds for rank in work) * d.microbatches
        for rank, held in enumerate(work):
            busy_s = held.seconds * d.microbatches
            own = Held(held.elements, held.held_elements, busy_s, *of_units(ranked.tables[0]))
            least_s = max(pipeline_s, exchanges.least_end_s(own, d.mesh, d, rank))
            assert least_s <= (found.pipeline_s + found.data_parallel_s) * (1 + 1e-9), (pp, virtual, shard)
