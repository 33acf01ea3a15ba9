"""What a plan may ask beyond degrees: its own cut, sequence parallelism, gradients in fp32, selective recompute."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError
from shardwright.core.schedule import Action
from shardwright.core.schedule.peak_memory import StageMemory, peak_below_sum, peak_live
from shardwright.core.search.bounds import SMALL_SHARE
from shardwright.core.tables.backward_halves import halves_of
from shardwright.core.tables.cost_tables import CostTables, Place
from shardwright.core.tables.memory import MemoryUse
from shardwright.core.tables.memory_request import MANY, MemoryRequest
from tests.core.toy import decoder

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from megatron import gpt

LAYERS, HIDDEN, HEADS, SEQUENCE, MICROBATCH = 4, 1024, 16, 512, 2
GRAPH = gpt(LAYERS, HIDDEN, HEADS, SEQUENCE, vocabulary=8192)
VALUES = MICROBATCH * SEQUENCE * HIDDEN


def kept_per_layer(tp: int, **policy: object) -> float:
    """Bytes that one layer keeps for one microbatch, in values of batch × sequence × hidden."""
    cluster = Cluster("a100-80gb", devices_per_node=tp)
    plan = sw.plan(
        GRAPH, cluster, batch=MICROBATCH, microbatch=MICROBATCH, pp=1, dp=1, tp=tp, precision="fp16", shard=0, **policy
    )
    return plan.costs.classes[1].activation_bytes / VALUES


def test_kept_activations_are_those_of_the_papers_table() -> None:
    """arXiv 2205.05198, table 2: bytes per layer over s·b·h. The paper leaves out the fp32 mean and scale of each row
    of the two norms."""
    scores = 5 * HEADS * SEQUENCE / HIDDEN
    norms = 2 * 2 * 4 / HIDDEN
    assert kept_per_layer(1, recompute="none") == pytest.approx(34 + scores + norms)
    assert kept_per_layer(4, recompute="none") == pytest.approx(10 + 24 / 4 + scores / 4 + norms)
    assert kept_per_layer(4, recompute="none", sequence_parallel=True) == pytest.approx((34 + scores + norms) / 4)
    assert kept_per_layer(4, recompute="selective", sequence_parallel=True) == pytest.approx((34 + norms) / 4)
    assert kept_per_layer(4, recompute="full", sequence_parallel=True) == pytest.approx(2 / 4)
    assert kept_per_layer(4, recompute="full") == pytest.approx(2)


def test_recompute_costs_what_it_runs_again() -> None:
    cluster = Cluster("a100-80gb", devices_per_node=4)
    pins = {"batch": 32, "microbatch": 4, "pp": 1, "dp": 1, "tp": 4, "shard": 0}
    none, selective, full = (
        sw.plan(GRAPH, cluster, recompute=mode, **pins).predicted.pipeline_s for mode in ("none", "selective", "full")
    )
    assert none < selective < full < 4 / 3 * none * 1.05


def test_gradients_in_fp32_take_two_bytes_more() -> None:
    cluster = Cluster("a100-80gb")
    pins = {"batch": 4, "microbatch": 2, "precision": "bf16", "shard": 0}
    half, whole = (sw.plan(GRAPH, cluster, gradient_precision=p, **pins).predicted for p in (None, "fp32"))
    assert whole.memory[0].gradients_bytes == 2 * half.memory[0].gradients_bytes
    assert whole.step_time_s > half.step_time_s


def test_a_pinned_cut_is_kept() -> None:
    cluster = Cluster("a100-80gb", devices_per_node=2)
    plan = sw.plan(GRAPH, cluster, batch=8, pp=2, dp=1, tp=1, microbatch=2, stage_starts=[0, 2])
    assert plan.decision.stage_starts == (0, 2)
    best = sw.plan(GRAPH, cluster, batch=8, pp=2, dp=1, tp=1, microbatch=2)
    assert best.predicted.step_time_s <= plan.predicted.step_time_s


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"pp": 2, "stage_starts": [0, 9]}, "stage_starts=.*stay below the model's 6 units"),
        ({"pp": 2, "stage_starts": [1, 2]}, "rise from 0"),
        ({"pp": 2, "stage_starts": [0]}, "expected 2"),
        ({"stage_starts": [0, 2]}, "without pp"),
        ({"gradient_precision": "fp33"}, "did you mean 'fp32'"),
        ({"sequence_parallel": 1}, "expected True or False"),
    ],
)
def test_bad_policies_name_the_fix(pins: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        sw.plan(GRAPH, Cluster("a100-80gb", devices_per_node=2), batch=8, **pins)


def test_ties_across_stages_are_added_up() -> None:
    graph = decoder(layers=4, hidden=256, heads=8, vocabulary=32000, sequence=64)
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=1)
    plan = sw.plan(graph, cluster, batch=8, pp=2, dp=1, tp=1, microbatch=2, precision="fp16", schedule="1f1b")
    assert plan.predicted.data_parallel_s > 256 * 32000 * 2 / 25e9


def test_the_file_keeps_the_policies(tmp_path: Path) -> None:
    cluster = Cluster("a100-80gb", devices_per_node=4)
    plan = sw.plan(
        GRAPH, cluster, batch=8, tp=4, pp=1, dp=1, microbatch=2, sequence_parallel=True, gradient_precision="fp32"
    )
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert (again.decision.sequence_parallel, again.decision.gradient_precision) == (True, "fp32")
    assert "sequence parallel" in again.summary()


def test_gradients_are_not_there_before_the_first_backward() -> None:
    """By hand, one stage and one microbatch: the first backward goes from the last unit to the first one."""
    able = replace(GRAPH, memory_traits=MemoryTraits(gradients_when_made=True))
    pins = {"microbatch": MICROBATCH, "pp": 1, "dp": 1, "tp": 1, "precision": "fp16", "recompute": "none"}

    def memory(graph: sw.Graph, microbatches: int) -> MemoryUse:
        return sw.plan(graph, Cluster("a100-80gb"), batch=microbatches * MICROBATCH, **pins).predicted.memory[0]

    one, several, before = memory(able, 1), memory(able, 3), memory(GRAPH, 1)
    assert one.apart_bytes > 0
    assert several.apart_bytes == before.apart_bytes == 0
    assert one.total_bytes == before.total_bytes - one.apart_bytes
    scorer_tables = CostTables(able, Cluster("a100-80gb"), "fp16", "adamw")
    place = Place(scorer_tables.device, Cluster("a100-80gb").group([0]), None, False)
    table = scorer_tables.table(1, MICROBATCH, "none", place)
    units = len(table.units)
    at_unit = []
    for unit in range(units):
        activations = sum(u.saved_bytes for u in table.units[: unit + 1]) + table.units[unit].passing_bytes
        made = 2 * sum(u.parameter_elements for u in table.units[unit:])
        at_unit.append(activations + made)
    expected = one.parameters_bytes + one.optimizer_bytes + max(at_unit)
    assert one.total_bytes == pytest.approx(expected, rel=0.01), "ties and values that two units keep aside"


def test_schedules_say_when_gradients_are_made() -> None:
    held = {0: StageMemory(activations=10, working=1, gradients=6, first_backward=12)}

    def apart(*texts: str) -> int:
        return peak_below_sum([Action.parse(text) for text in texts], held)

    # Peak: 20 kept at the first backward, of which it gives 10 up (12 with gradients); in all 20 + 1 + 6.
    assert apart("0F0", "0F1", "0B0", "0B1") == 27 - 22
    # After the first backward the gradients are there, and another forward fills up again.
    assert apart("0F0", "0F1", "0B0", "0F2", "0B1", "0B2") == 0
    # Input gradients make none, and free nothing before the second half but what they are the last to read.
    assert apart("0F0", "0I0", "0W0") == 17 - 11
    split = [Action.parse(text) for text in ("0F0", "0I0", "0F1", "0W0", "0I1", "0W1")]
    assert [peak_live(split), peak_live(split, [10]), peak_live(split, [10], [4])] == [2, 20, 16]
    early = {0: StageMemory(activations=10, working=1, gradients=6, first_backward=12, freed_by_input_grad=4)}
    # The second microbatch beside what the first one's second half needs, before and after there are gradients.
    assert peak_below_sum(split[:3], early) == 17 - 17
    assert peak_below_sum(split, early) == 23 - 17


@pytest.mark.parametrize(
    ("schedule", "pins"), [("zb-h1", {}), ("zb-h2", {}), ("auto", {}), ("zbv", {"virtual_stages": 2})]
)
def test_activations_are_those_of_the_walk_under_every_split_schedule(schedule: str, pins: dict[str, int]) -> None:
    """Whether ranks hold one stage or several, and whether the schedule has a name or was made for the stages."""
    fixed = {"microbatch": 1, "dp": 1, "tp": 1, "precision": "fp32", "recompute": "none"} | pins
    graph = decoder(layers=8, hidden=256, heads=8, vocabulary=8192, sequence=128)
    plan = sw.plan(graph, Cluster("a100-80gb", devices_per_node=2), batch=8, pp=2, schedule=schedule, **fixed)
    cluster, starts = Cluster("a100-80gb"), plan.decision.stage_starts
    table = CostTables(graph, cluster, "fp32", "adamw").table(
        1, 1, "none", Place(cluster.device(0), cluster.group([0]), None, in_stages=True)
    )
    ends = list(zip(starts, (*starts[1:], len(table.units)), strict=True))
    sizes = [int(table.range_kept[a, b]) for a, b in ends]
    freed = [int(halves_of(table).range_freed[a, b]) for a, b in ends]
    assert any(freed)
    peaks = [peak_live(order, sizes, freed) for order in plan.build_schedule().table]
    assert [use.activations_bytes for use in plan.predicted.memory_by_stage_rank] == peaks


@pytest.mark.parametrize(("bucket_bytes", "on_cpu"), [(25 * 2**20, 2**20), (2**20, 2**10), (2**40, 2**40)])
def test_gradients_that_are_summed_over_replicas_take_a_bucket_more(bucket_bytes: int, on_cpu: int) -> None:
    """Gradients are summed where they are: what replicas add is one bucket, which is there before its gradients are;
    beside all gradients it is nothing more."""
    traits = MemoryTraits(gradients_when_made=True, bucket_bytes=bucket_bytes, bucket_bytes_on_cpu=on_cpu)
    capabilities = replace(GRAPH.capabilities, exchanges_as_planned=True)
    able = replace(GRAPH, memory_traits=traits, capabilities=capabilities)
    pins = {"microbatch": 1, "pp": 1, "tp": 1, "precision": "fp32", "recompute": "full", "shard": 0}
    for hardware, most in (("a100-80gb", bucket_bytes), ("cpu", on_cpu)):
        clusters = {dp: Cluster(hardware, devices_per_node=dp) for dp in (1, 2)}
        plans = [sw.plan(able, cluster, batch=64 * dp, dp=dp, **pins) for dp, cluster in clusters.items()]
        size = plans[1].decision.bucket_bytes
        assert size == int(min(most, 19 * clusters[2].group(range(2)).latency_bytes)), "a twentieth is latency"
        alone, two = (plan.predicted.memory[0] for plan in plans)
        assert two.buffers_bytes == alone.buffers_bytes + min(size, alone.gradients_bytes)
        assert two.total_bytes == alone.total_bytes
        once = [sw.plan(able, cluster, batch=dp, dp=dp, **pins) for dp, cluster in clusters.items()]
        alone, two = (plan.predicted.memory[0] for plan in once)
        assert alone.apart_bytes > 0
        beside = min(size, alone.gradients_bytes)
        assert two.total_bytes == alone.total_bytes + min(beside, alone.apart_bytes)


def test_small_units_stay_whole_under_shard_3() -> None:
    """Layers that are small beside the embedding, and whose gather costs its latency alone, are whole all through a
    step, as are their gradients."""
    graph = decoder(layers=4, hidden=32, vocabulary=8192)
    capabilities = replace(graph.capabilities, exchanges_as_planned=True)
    able = replace(graph, memory_traits=MemoryTraits(gathers_units=True), capabilities=capabilities)
    fixed = {"microbatch": 1, "pp": 1, "tp": 1, "dp": 4, "precision": "bf16", "recompute": "none", "batch": 4,
             "gathered_stages": 0, "reduce_after": "each"}  # fmt: skip
    cluster, ways = Cluster("a100-80gb", devices_per_node=4), 4
    plans = {shard: sw.plan(able, cluster, shard=shard, **fixed) for shard in (2, 3)}
    plain = sw.plan(graph, cluster, shard=3, **fixed)  # of a runtime that gathers as it likes
    assert [plan.decision.whole_below_bytes for plan in (plans[2], plain)] == [0, 0]
    units = [plans[3].costs.classes[held].trained_elements for held in plans[3].costs.unit_classes]
    below = plans[3].decision.whole_below_bytes
    assert below == int(min(2 * max(units) / SMALL_SHARE, cluster.group(range(ways)).latency_bytes))
    small = [elements for elements in units if 2 * elements < below]
    assert len(small) == 4 < len(units)
    staying = sum(small) + 2 * 32  # the norm before the head is a call by itself
    # Of the others the master copies alone are kept, which count with the optimizer's states.
    assert plans[3].predicted.memory[0].parameters_bytes == int(staying * (2 + 2 * (1 - 1 / ways)))


def test_what_fits_by_the_order_of_a_step_alone_is_planned() -> None:
    """With one microbatch the gradients are not there before the activations go: a device with room for what is there
    at once, and for no more, has a plan."""
    able = replace(GRAPH, memory_traits=MemoryTraits(gradients_when_made=True))
    pins = {"microbatch": MICROBATCH, "pp": 1, "dp": 1, "tp": 1, "precision": "fp16", "recompute": "none"}
    device = replace(load_profile("a100-80gb").device, reserved_memory_bytes=0)

    def planned(memory_bytes: int) -> MemoryUse:
        cluster = Cluster(replace(device, memory_bytes=memory_bytes))
        return sw.plan(able, cluster, batch=MICROBATCH, **pins).predicted.memory[0]

    use = planned(device.memory_bytes)
    assert use.apart_bytes > 0
    assert planned(use.total_bytes) == use
    with pytest.raises(PlanError, match="does not fit"):
        planned(use.total_bytes - 1)


@pytest.mark.parametrize("shard", [0, 1, 2, 3])
@pytest.mark.parametrize("is_divided", [False, True])
def test_frozen_parameters_in_16_bits_stay_in_fp32_too(shard: int, is_divided: bool) -> None:
    """Four bytes beside the two of the step's copy, which is gone between calls where parameters are divided."""
    request = MemoryRequest(0, "bf16", "adamw", shard, 4, "fp32", gathers_units=is_divided, frozen_in_fp32=True)
    alone = is_divided and shard == 3
    ways = 4 if shard == 3 else 1
    assert request.state_bytes(800, 0, 0) == (800 * (4 if alone else 6) // ways, 0, 0)
    plain = replace(request, frozen_in_fp32=False)
    assert request.state_bytes(800, 800, 800) == plain.state_bytes(800, 800, 800)
    assert plain.state_bytes(800, 0, 0) == (800 * 2 // ways, 0, 0)
    for elements, trained in ((MANY, 0), (MANY, MANY), (MANY, MANY // 2)):
        linear = request.held_bytes * elements + request.trained_bytes * trained
        assert sum(request.state_bytes(elements, trained, trained)) == pytest.approx(linear, abs=3)
