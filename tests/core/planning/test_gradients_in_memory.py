"""Gradients on ranks of several stages, against a walk through the step unit by unit, by name."""

from dataclasses import replace
from functools import partial

import pytest

import shardwright as sw
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.schedule.actions import B, F, I, W
from shardwright.core.tables.cost_tables import CostTables, Place
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.rank_tables import UNCOUNTED_BYTES, RankTables
from tests.core.toy import decoder

WIDTH, MIB = 4, 2**20
PINS = {"tp": 1, "microbatch": 1, "precision": "fp32", "recompute": "none", "shard": 0}


def able(graph: Graph) -> Graph:
    return replace(graph, memory_traits=MemoryTraits(gradients_when_made=True, bucket_bytes=MIB))


TIED = able(decoder(layers=14, hidden=128, heads=4, vocabulary=4096, sequence=32))
TABLE_BYTES = WIDTH * 4096 * 128


def planned(graph: Graph, pp: int, dp: int, microbatches: int, **pins: object) -> sw.Plan:
    cluster = sw.Cluster("a100-80gb", devices_per_node=pp * dp)
    return sw.plan(graph, cluster, batch=dp * microbatches, pp=pp, dp=dp, **PINS, **pins)


def _bytes(size: dict[int, int], there: set[int], activations: float) -> int:
    return int(activations) + sum(size[p] for p in there)


def walked(graph: Graph, plan: sw.Plan) -> list[int]:
    """For every rank the most activations and gradients that are there at once, each parameter by its name."""
    units = fold(graph).units
    cluster = sw.Cluster("a100-80gb")
    table = CostTables(graph, cluster, "fp32", "adamw").table(
        1, 1, "none", Place(cluster.device(0), cluster.group([0]), None, in_stages=False)
    )
    size = {p: WIDTH * graph.tensors[each.tensor].elements(1) for p, each in enumerate(graph.parameters)}
    trained = [{p for p in unit.parameters if graph.parameters[p].trainable} for unit in units]
    found = []

    def put_off(unit: int) -> int:
        left = table.units[unit].put_off_bytes
        assert left is not None
        return left

    for order in plan.build_schedule().table:
        most = live = 0
        there: set[int] = set()
        held = partial(_bytes, size, there)
        for action in order:
            for part in action.flat:
                of_stage = plan.stage_units[part.stage]
                kept = int(table.range_kept[of_stage[0], of_stage[-1] + 1])
                if part.kind is F:
                    live += kept
                    most = max(most, held(live))
                elif part.kind is B:
                    live -= kept
                    for u in reversed(of_stage):
                        there |= trained[u]
                        here = table.range_kept[of_stage[0], u + 1] + table.units[u].passing_bytes
                        most = max(most, held(live + here))
                elif part.kind is I:
                    live -= kept
                    left = table.boundary_bytes[of_stage[0]] if of_stage[0] else 0  # what came stays
                    for u in reversed(of_stage):
                        beside = table.units[u].input_grad_bytes
                        assert beside is not None
                        most = max(most, held(live + left + table.range_kept[of_stage[0], u + 1] + beside[0]))
                        left += put_off(u)
                    live += left
                elif part.kind is W:
                    for u in reversed(of_stage):
                        is_first = not trained[u] <= there
                        there |= trained[u]
                        most = max(most, held(live + table.units[u].weight_grad_bytes * (not is_first)))
                        live -= put_off(u)
                    live -= table.boundary_bytes[of_stage[0]] if of_stage[0] else 0
                most = max(most, held(live))
        found.append(most)
    return found


@pytest.mark.parametrize(
    ("schedule", "pp", "dp", "microbatches"),
    [
        ("zbv", 2, 1, 1),
        ("zbv", 4, 1, 4),
        ("zbv", 2, 2, 4),
        ("v-half", 2, 1, 2),
        ("v-half", 2, 2, 40),
        ("interleaved-1f1b", 4, 1, 4),
        ("interleaved-1f1b", 4, 2, 16),
        ("interleaved-1f1b", 4, 2, 24),
        ("interleaved-1f1b", 2, 2, 40),
    ],
)
def test_what_is_there_at_once_fits_into_what_is_predicted(schedule: str, pp: int, dp: int, microbatches: int) -> None:
    plan = planned(TIED, pp, dp, microbatches, schedule=schedule, virtual_stages=2)
    # What the fullest pass holds beside activations counts beside all: the table's gradient.
    beside = MIB if dp > 1 else 0
    for use, most in zip(plan.predicted.memory_by_stage_rank, walked(TIED, plan), strict=True):
        predicted = use.total_bytes - use.parameters_bytes - use.optimizer_bytes - use.batch_bytes
        assert most <= predicted <= 1.09 * most + beside


def test_gradients_are_of_what_is_trained() -> None:
    """As of low-rank adaptation: all but the norms frozen, in one stage and in two."""
    few = tuple(replace(p, trainable=".ln_" in p.name) for p in TIED.parameters)
    frozen = replace(TIED, parameters=few)
    entries = sum(TIED.tensors[p.tensor].elements(1) for p in few if p.trainable)
    for pp, virtual in ((1, 1), (2, 2)):
        pins = {"schedule": "interleaved-1f1b", "virtual_stages": 2} if virtual > 1 else {}
        alone, two = (planned(frozen, pp, dp, 16, **pins).predicted.memory_by_stage_rank for dp in (1, 2))
        assert sum(use.gradients_bytes for use in alone) == WIDTH * entries
        assert sum(use.optimizer_bytes for use in alone) == 2 * WIDTH * entries
        for before, after in zip(alone, two, strict=True):
            assert after.gradients_bytes == before.gradients_bytes
            assert after.total_bytes <= before.total_bytes + WIDTH * entries


@pytest.mark.parametrize("one_home", [False, True])
@pytest.mark.parametrize("frozen", ["", "table", "layers"])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved-1f1b", 2), ("zbv", 2)])
def test_a_tied_parameter_is_held_by_every_rank_that_uses_it(
    schedule: str, virtual: int, frozen: str, one_home: bool
) -> None:
    """Each by its name: where it is trained it has a gradient there too, and optimizer states, perhaps on one rank."""
    table = TIED.parameters[0].name
    trained = {"": lambda name: True, "table": lambda name: name != table, "layers": lambda name: "h." not in name}
    parameters = tuple(replace(p, trainable=trained[frozen](p.name)) for p in TIED.parameters)
    traits = replace(TIED.memory_traits, ties_have_one_home=one_home)
    graph = replace(TIED, parameters=parameters, memory_traits=traits)
    plan = planned(graph, 2, 1, 16, schedule=schedule, virtual_stages=virtual)
    assert len(plan.parameter_stages("toy")[table]) == 2
    size = {p.name: graph.tensors[p.tensor].elements(1) for p in parameters if p.trainable}
    placement = plan.decision.stage_ranks
    for rank, use in enumerate(plan.predicted.memory_by_stage_rank):
        held = updated = 0
        for name, stages in plan.parameter_stages("toy").items():
            ranks = [placement[stage] for stage in stages]
            held += size.get(name, 0) * (rank in ranks)
            updated += size.get(name, 0) * (rank == ranks[0] if one_home else rank in ranks)
        assert use.gradients_bytes == WIDTH * held
        assert use.optimizer_bytes == 2 * WIDTH * updated


def test_as_many_units_keep_their_activations_as_fit() -> None:
    """Units are kept from the last on, until one more would not fit."""
    graph, microbatch = able(decoder(layers=16, hidden=512, heads=8, vocabulary=4096, sequence=64)), 16
    device = replace(load_profile("a100-80gb").device, reserved_memory_bytes=0)
    pins = {
        "pp": 1,
        "dp": 2,
        "tp": 1,
        "precision": "fp32",
        "shard": 0,
        "microbatch": microbatch,
        "batch": 256,
        "headroom": 0.0,
    }
    cluster = sw.Cluster(device, devices_per_node=2)
    least = sw.plan(graph, cluster, recompute="full", **pins)
    place = Place(device, cluster.group([0]), None, in_stages=False)
    table = CostTables(graph, cluster, "fp32", "adamw").table(1, microbatch, "full", place)
    ranked = RankTables((table,), (device.memory_bytes,))
    request = MemoryRequest(0, "fp32", "adamw", 0, 2, None, graph.memory_traits.bucket_bytes, microbatches=8)
    layers = [unit for unit, mode in enumerate(table.modes) if mode == "full"]
    for wanted in (7, 9):
        (use,) = ranked.keeping(layers[-wanted:]).memory([0], [0], [1], request)
        (more,) = ranked.keeping(layers[-wanted - 1 :]).memory([0], [0], [1], request)
        assert least.predicted.memory[0].total_bytes <= use.total_bytes < more.total_bytes
        bucket = graph.memory_traits.bucket_bytes  # which is never there beside all gradients
        full = replace(device, memory_bytes=more.total_bytes - bucket - 1)
        found = sw.plan(graph, sw.Cluster(full, devices_per_node=2), **pins)
        assert found.decision.kept_units == tuple(layers[-wanted:])
        assert found.predicted.memory[0] == replace(use, apart_bytes=bucket)


def test_what_is_under_way_is_counted_before_a_plan_is_given() -> None:
    """On a rank of two stages, with a bucket of gradients beside them."""
    pins = {"schedule": "interleaved-1f1b", "virtual_stages": 2}
    cut = planned(TIED, 2, 2, 40, **pins)
    device = replace(load_profile("a100-80gb").device, reserved_memory_bytes=0)

    def within(memory_bytes: int) -> sw.Plan:
        cluster = sw.Cluster(replace(device, memory_bytes=memory_bytes), devices_per_node=4)
        starts = list(cut.decision.stage_starts)
        return sw.plan(TIED, cluster, batch=80, pp=2, dp=2, stage_starts=starts, **PINS, **pins)

    needed = max(use.total_bytes for use in cut.predicted.memory_by_stage_rank)
    assert within(needed).predicted.memory_by_stage_rank == cut.predicted.memory_by_stage_rank
    with pytest.raises(PlanError, match="does not fit"):
        within(needed - 1)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dp", [1, 2])
def test_gradients_of_programs_wait_once(dp: int, frozen: bool) -> None:
    """Beside the sums, which are there all through a step, where stages are compiled programs. Replicas sum them one by
    one, and the largest exists twice meanwhile."""
    programs = MemoryTraits(stages_are_programs=True)
    few = tuple(replace(p, trainable=not frozen or ".fc" in p.name) for p in TIED.parameters)
    plan = planned(replace(TIED, memory_traits=programs, parameters=few), 2, dp, 4, schedule="1f1b")
    crossing = plan.costs.boundary_bytes[plan.decision.stage_starts[1]]
    # A value and its gradient; the gradient that the second stage makes for the first is among what its backward holds.
    for use, sent in zip(plan.predicted.memory_by_stage_rank, (2 * crossing, crossing), strict=True):
        waiting = use.buffers_bytes - sent - UNCOUNTED_BYTES
        summed = min(use.gradients_bytes, TABLE_BYTES) if dp == 2 else 0
        assert use.gradients_bytes < waiting - summed < 2 * use.gradients_bytes


@pytest.mark.parametrize("shard", [0, 1, 2, 3])
def test_one_program_divides_its_sums_with_the_states_and_holds_a_unit_whole(shard: int) -> None:
    """A pipeline divides the sums of gradients from shard=2 on."""
    programs = replace(TIED, memory_traits=MemoryTraits(stages_are_programs=True))
    pins = PINS | {"shard": shard}
    use, stage = (
        sw.plan(programs, sw.Cluster("a100-80gb", devices_per_node=2 * pp), batch=8, dp=2, pp=pp, **pins)
        .predicted.memory_by_stage_rank[0]
        for pp in (1, 2)
    )  # fmt: skip
    whole = sum(WIDTH * TIED.tensors[p.tensor].elements(1) for p in TIED.parameters)
    assert use.gradients_bytes == whole // (2 if shard else 1)
    assert use.optimizer_bytes == 2 * use.gradients_bytes
    assert use.parameters_bytes == whole // (2 if shard == 3 else 1)
    assert stage.gradients_bytes * (1 if shard == 1 else 2) == stage.optimizer_bytes


def test_one_program_of_one_microbatch_makes_gradients_as_activations_go() -> None:
    programs = replace(TIED, memory_traits=MemoryTraits(stages_are_programs=True))
    one, two = (planned(programs, 1, 1, microbatches).predicted.memory_by_stage_rank[0] for microbatches in (1, 2))
    assert one.apart_bytes > 0 == two.apart_bytes
    assert one.gradients_bytes == two.gradients_bytes
