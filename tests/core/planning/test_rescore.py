"""Edited plans: old figures are shown as old, and counted anew they are those of `plan()` with the edits pinned."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.cluster.hardware import load_link, load_profile
from shardwright.core.cluster.node_group import NodeGroup
from shardwright.core.errors import LayoutError, PlanError, PlanFileError, PlanWarning
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.plan.breakdown import break_down
from shardwright.core.plan.file import to_document, to_text
from shardwright.core.plan.memory_over_time import memory_over_time
from shardwright.core.plan.plan import Plan
from tests.core.toy import decoder
from tests.plan_edit_judge import planned_with_pins

EIGHT = sw.Cluster("a100-80gb", devices_per_node=8)
MIXED = sw.Cluster.of_groups(
    [NodeGroup(load_profile(name).device, 1, 4, load_link("nvlink3")) for name in ("a100-80gb", "h100")],
    "ib-hdr200",
)
PLAIN: dict[str, Any] = {"schedule": "1f1b", "virtual_stages": 1}
PLANS: dict[str, tuple[sw.Cluster, dict[str, Any]]] = {
    "found": (sw.Cluster("a100-80gb", devices_per_node=2), {"microbatch": 4}),
    "all axes": (EIGHT, {"pp": 2, "dp": 2, "tp": 2, "microbatch": 2, **PLAIN}),
    "generated": (
        EIGHT,
        {"pp": 4, "tp": 1, "dp": 2, "schedule": "auto", "virtual_stages": 1, "microbatch": 2, "shard": 0},
    ),
    "sharded": (EIGHT, {"pp": 1, "tp": 1, "shard": 3, "microbatch": 2}),
    "summed last": (
        EIGHT,
        {"pp": 2, "tp": 1, "shard": 3, "reduce_after": "last", "gathered_stages": 1, "microbatch": 2, **PLAIN},
    ),
    "recomputed": (
        EIGHT,
        {
            "pp": 2,
            "recompute": "full",
            "kept_units": [1, 2],
            "tp": 1,
            "shard_group": 2,
            "shard": 1,
            "microbatch": 1,
            **PLAIN,
        },
    ),
    "fp8": (sw.Cluster("h100", devices_per_node=4), {"precision": "fp8", "tp": 2, "pp": 1, "microbatch": 2}),
    "mixed": (
        MIXED,
        {
            "pp": 2,
            "dp": 4,
            "tp": 1,
            "devices": "all",
            "partitioner": "pareto",
            "placement_order": "PDT",
            "microbatch": 2,
            **PLAIN,
        },
    ),
    "left out": (MIXED, {"devices": 4, "pp": 2, "tp": 1, "microbatch": 2, **PLAIN}),
    "pinned layouts": (EIGHT, {"tp": 2, "pp": 2, "microbatch": 2, **PLAIN, "layouts": [(r"h\..*fc$", Layout())]}),
}


@pytest.fixture(scope="module")
def graph() -> sw.Graph:
    made = decoder(layers=4)
    return replace(made, capabilities=replace(made.capabilities, fp8=True))


@pytest.fixture(scope="module")
def plans(graph: sw.Graph) -> dict[str, Plan]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: sw.plan(graph, cluster, batch=32, **pins) for name, (cluster, pins) in PLANS.items()}


def edited(plan: Plan, change: Callable[[Any], object]) -> Plan:
    document = json.loads(to_text(plan))
    change(document)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        return Plan.from_text(json.dumps(document))


# Counting anew ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_that_was_not_edited_is_rescored_to_itself(plans: dict[str, Plan], name: str) -> None:
    plan = plans[name]
    loaded = Plan.from_text(to_text(plan))
    assert loaded == plan
    assert not loaded.is_stale
    rescored = sw.rescore(loaded)
    assert rescored.alternatives == ()
    assert replace(rescored, alternatives=plan.alternatives, counted_for="") == plan


CHANGES: dict[str, dict[str, Any]] = {
    "all axes": {"microbatch": 4},
    "found": {"batch": 64},
    "generated": {"microbatch": 4},
    "sharded": {"shard": 0},
    "summed last": {"shard": 1},
    "recomputed": {"recompute": "none"},
    "fp8": {"precision": "bf16", "dp": 4, "tp": 1},
    "mixed": {"optimizer": "sgd"},
    "left out": {"gradient_precision": "fp32"},
    "pinned layouts": {"tp": 4, "pp": 1},
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_plan_is_what_plan_says_with_its_decision_pinned(
    graph: sw.Graph, plans: dict[str, Plan], name: str
) -> None:
    changes = CHANGES[name]
    rescored = sw.rescore(plans[name], **changes)
    assert {key: getattr(rescored.decision, key) for key in changes} == changes
    assert rescored.predicted != plans[name].predicted
    oracle = planned_with_pins(graph, rescored)
    for part in ("decision", "predicted", "costs", "work", "programs"):
        assert getattr(rescored, part) == getattr(oracle, part), part
    for key, value in changes.items():
        assert key == "batch" or f"{key}={value}" in rescored.provenance.pinned
    assert not rescored.is_stale


def test_layouts_that_were_edited_are_kept_and_named(graph: sw.Graph, plans: dict[str, Plan]) -> None:
    plan = plans["all axes"]
    assert dict(plan.decision.layouts)["1/w2"] == Layout.of(tp=Split(1))
    rescored = sw.rescore(plan, layouts={"1/w2": Layout.of(tp=Split(0))})
    assert dict(rescored.decision.layouts)["1/w2"] == Layout.of(tp=Split(0))
    assert rescored.predicted.step_time_s > plan.predicted.step_time_s
    assert dict(rescored.provenance.pinned_layouts) == {"1/w2": "an edit of the plan"}
    assert "layouts of 1 slots by an edit of the plan" in rescored.provenance.pinned
    assert planned_with_pins(graph, rescored).predicted == rescored.predicted
    same = sw.rescore(edited(plan, lambda d: d["decision"]["layouts"].update({"1/w2": {"tp": {"split": 0}}})))
    assert same == rescored
    again = sw.rescore(rescored, microbatch=4)  # an edit stays
    assert dict(again.decision.layouts)["1/w2"] == Layout.of(tp=Split(0))
    back = sw.rescore(rescored, layouts={"1/w2": Layout.of(tp=Split(1))})
    assert (back.decision, back.predicted) == (plan.decision, plan.predicted)


def test_marks_of_the_model_hold_on_another_tensor_axis(plans: dict[str, Plan]) -> None:
    plan = plans["pinned layouts"]
    rescored = sw.rescore(plan, tp=4, pp=1)
    assert "1/w2" not in dict(rescored.decision.layouts)
    assert rescored.provenance.pinned_layouts == plan.provenance.pinned_layouts
    assert sw.rescore(plans["all axes"], tp=4, pp=1).decision.layouts != rescored.decision.layouts


def test_compare_shows_what_an_edit_does(plans: dict[str, Plan]) -> None:
    plan = plans["all axes"]
    other = edited(plan, lambda d: d["decision"].update(microbatch=4))
    stale, counted = sw.compare(plan, other), sw.compare(plan, sw.rescore(other))
    assert len(stale.notes) == 1
    assert "microbatch 2 → 4" in stale.notes[0]
    assert "(before the edit)" in str(stale)
    assert counted.notes == ()
    assert {d.field for d in counted.differences} >= {"microbatch", "step_time_s", "bubble_fraction"}


def test_an_edited_plan_is_simulated_as_it_is_shown(plans: dict[str, Plan]) -> None:
    plan = plans["all axes"]
    other = edited(plan, lambda d: d["decision"].update(pp=4, dp=1, stage_starts=[0, 1, 3, 4]))
    assert other.decision.pp == 4
    assert other.predicted == plan.predicted
    with pytest.warns(PlanWarning, match="before it was edited.*pp 2 → 4, dp 2 → 1, stage_starts"):
        assert sw.simulate(other).makespan_s == sw.simulate(plan).makespan_s
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-12)
    assert break_down(other) == break_down(plan)
    assert memory_over_time(other) == memory_over_time(plan)
    assert other.throughput == plan.throughput
    assert "before an edit" in repr(other)
    assert sw.simulate(sw.rescore(other)).ranks == 4


def test_more_ranks_than_unlike_ones_have_costs(plans: dict[str, Plan]) -> None:
    other = edited(plans["mixed"], lambda d: d["decision"].update(pp=4, dp=2, stage_starts=[0, 1, 2, 4]))
    with pytest.raises(PlanError, match="counted for 2 unlike pipeline ranks"):
        other.stage_costs()
    assert len(sw.rescore(other).costs.ranks) == 4


def test_edited_devices_are_planned_for(graph: sw.Graph, plans: dict[str, Plan]) -> None:
    other = edited(plans["all axes"], lambda d: d["input"]["cluster"].update(device="h100", intra_node="nvlink4"))
    assert other.is_stale
    rescored = sw.rescore(other)
    assert rescored.provenance.cluster == "1 × 8 h100"
    assert rescored.predicted == planned_with_pins(graph, rescored).predicted
    assert rescored.predicted != plans["all axes"].predicted


EDITS: dict[str, Callable[[Any], object]] = {
    "the peaks that MFU is of": lambda d: d["provenance"]["peak_flops_per_s"].pop("bf16"),
    "the memory of a device": lambda d: d["provenance"].update(device_memory_bytes=[1 << 40, 1 << 40]),
    "the headroom": lambda d: d["provenance"].update(headroom=0.5),
    "the framework": lambda d: d["provenance"].update(captured_from="torch"),
    "the name of the devices": lambda d: d["provenance"].update(cluster="1 × 8 h100"),
    "the length of the training": lambda d: d["run"].update(tokens=1e9),
    "the price": lambda d: d["run"].update(usd_per_hour=0.01),
    "layouts not chosen": lambda d: d["alternatives"].update(layouts={}),
    "pins": lambda d: d["input"].update(pins=[]),
    "runtimes": lambda d: d["input"]["runtimes"][0].update(offload=not d["input"]["runtimes"][0]["offload"]),
    "options": lambda d: d["input"]["options"].update(headroom=0.2),
}


@pytest.mark.parametrize("what", EDITS)
def test_edited_figures_and_what_they_were_counted_from_are_said_to_be_old(plans: dict[str, Plan], what: str) -> None:
    plan = plans["pinned layouts"]
    other = edited(plan, EDITS[what])
    assert other.is_stale
    if what not in ("pins", "runtimes", "options"):
        assert sw.rescore(other).predicted == plan.predicted
        assert sw.rescore(other).provenance == replace(plan.provenance, pinned=sw.rescore(other).provenance.pinned)


def test_rates_of_an_edited_plan_are_of_the_batch_that_they_were_counted_for(graph: sw.Graph) -> None:
    pins = {"pp": 2, "tp": 1, "dp": 4, "microbatch": 2, **PLAIN}
    plan = sw.plan(graph, EIGHT, batch=32, samples=3200, **pins)
    twice = edited(plan, lambda d: d["decision"].update(batch=64))
    assert twice.throughput == plan.throughput
    assert twice.training == plan.training
    assert sw.compare(plan, twice).faster == ""
    assert sw.compare(plan, sw.rescore(twice)).faster.startswith("The second")


# Refusals ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown name": ({"microbach": 2}, "microbach=2: no part .*did you mean 'microbatch'"),
    "an unknown slot": ({"layouts": {"1/w9": Layout()}}, "slot '1/w9', which the model lacks: did you mean '1/w"),
    "an unknown unit": ({"recompute": "full", "kept_units": [99]}, "kept_units=.99.* that the model's 6 lack"),
    "a cut beyond the units": ({"stage_starts": [0, 9]}, "stage_starts=.0, 9.*the model's 6 units"),
    "an axis": ({"layouts": {"1/w0": Layout.of(ep=Split(0))}}, "1/w0: .*'ep'"),
    "a data axis": ({"layouts": {"1/w0": Layout.of(dp=Split(0))}}, "1/w0 lies on axis 'dp'"),
    "a dim": ({"layouts": {"1/v0": Layout.of(tp=Split(1))}}, "1/v0: .*names a dim that shape"),
    "no layout": ({"layouts": {"1/w0": "S1"}}, "1/w0 'S1': expected a Layout"),
    "16 ranks on 8 devices": (
        {"pp": 4},
        "pp 4 × dp 2 × tp 2 are 16 ranks, .* the 8 devices .*take pp=2 or dp=1 or tp=1",
    ),
    "4 ranks on 8 devices": ({"dp": 1}, "are 4 ranks.* take pp=4 or dp=2 or tp=4"),
    "12 ranks": ({"tp": 3}, "are 12 ranks.* take tp=2"),
    "no degree": ({"tp": 0}, "tp=0: expected a whole number of at least 1"),
    "not a number": ({"microbatch": float("nan")}, "microbatch=nan: expected a whole number"),
    "a batch": ({"batch": 31}, "batch=31 is not a multiple of dp · microbatch"),
    "an unknown schedule": ({"schedule": "1f1bb"}, "schedule='1f1bb': did you mean '1f1b'"),
    "a schedule of other sizes": ({"schedule": "zbv"}, "zbv"),
    "what is derived": ({"bucket_bytes": 77}, "bucket_bytes=77: .* a plan has bucket_bytes="),
    "weights in fp8": ({"fp8_weights": ("1/w0",)}, "fp8_weights"),
    "actions": ({"generated": ("0F0,0B0",)}, "generated"),
    "sequences on no tensor axis": ({"tp": 1, "dp": 4, "sequence_parallel": True}, "sequence_parallel=True and tp=1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_planned_is_refused_by_name(plans: dict[str, Plan], what: str) -> None:
    changes, said = REFUSED[what]
    with pytest.raises((PlanError, LayoutError), match=said):
        sw.rescore(plans["all axes"], **changes)


def test_a_plan_that_no_longer_fits_is_refused_with_what_it_lacks(graph: sw.Graph) -> None:
    pins = {"batch": 32, "pp": 2, "tp": 1, "dp": 1, "microbatch": 1, "shard": 0, "recompute": "none"}
    room = max(sw.plan(graph, sw.Cluster("a100-80gb", devices_per_node=2), **pins).predicted.peak_memory_bytes)
    small = replace(load_profile("a100-80gb").device, memory_bytes=room, reserved_memory_bytes=0)
    plan = sw.plan(graph, sw.Cluster(small, devices_per_node=2), **pins)
    with pytest.raises(PlanError, match="fit"):
        sw.rescore(plan, microbatch=32)


FILES: dict[str, tuple[Callable[[Any], object], str]] = {
    "no input": (lambda d: d.pop("input"), "input: the file lacks the captured graph .*plan again"),
    "an older version": (lambda d: d.update(version=d["version"] - 1), "older .*plan again"),
    "an edited graph": (lambda d: d["input"]["graphs"][0].update(sample_batch=9), "input.digest: .*was edited"),
    "another digest": (lambda d: d["input"].update(digest="0" * 16), "input.digest: '0000000000000000'"),
    "three graphs": (lambda d: d["input"].update(graphs=d["input"]["graphs"] * 3), "input.graphs"),
    "fewer devices": (lambda d: d["input"]["cluster"].update(devices_per_node=4), "4 devices, .*world_size is 8"),
    "a path for a device": (lambda d: d["input"]["cluster"].update(device="own.toml"), "device 'own.toml'"),
    "a link": (lambda d: d["input"]["cluster"].update(intra_node="nvlink33"), "nvlink33.*did you mean"),
    "a step of no time": (lambda d: d["predicted"].update(step_time_s=0), "predicted.step_time_s: 0 seconds"),
    "memory of other ranks": (
        lambda d: d["predicted"]["decision"].update(pp=4, dp=1, stage_starts=[0, 1, 2, 3]),
        "memory_by_stage_rank: 2",
    ),
    "a decision of other ranks": (lambda d: d["predicted"]["decision"].update(dp=8), "predicted.decision: .* ranks"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_file_that_cannot_be_rescored_is_refused(plans: dict[str, Plan], what: str) -> None:
    change, said = FILES[what]
    with pytest.raises(PlanFileError, match=said):
        edited(plans["all axes"], change)


def test_names_and_options_that_are_not_the_graphs_are_refused(plans: dict[str, Plan]) -> None:
    def rename(document: Any) -> None:
        document["bindings"]["toy"]["units"][0]["calls"] = [["another", 0]]

    with pytest.raises(PlanError, match=r"bindings.toy name other parts"):
        sw.rescore(edited(plans["all axes"], rename))
    with pytest.raises(PlanError, match=r"input.options: 'partitoner' is no option .*did you mean 'partitioner'"):
        sw.rescore(edited(plans["all axes"], lambda d: d["input"]["options"].update(partitoner="tree")))
    for name in ("pp", "devices", "offload"):
        with pytest.raises(PlanError, match=rf"input.options: '{name}' stands elsewhere"):
            sw.rescore(edited(plans["all axes"], lambda d, name=name: d["input"]["options"].update({name: 2})))
    other = sw.plan(decoder(layers=5), EIGHT, batch=32, pp=1, tp=1, dp=8, microbatch=4)
    exchanged = replace(plans["all axes"], input=other.input)
    with pytest.raises(PlanError, match=r"input.graphs hold another model"):
        sw.rescore(exchanged)
    for plan in (replace(other, input=None), "plan.json"):
        with pytest.raises(PlanError):
            sw.rescore(plan)  # type: ignore[arg-type]
    with pytest.raises(PlanFileError, match="without the graph"):
        to_document(replace(other, input=None))
