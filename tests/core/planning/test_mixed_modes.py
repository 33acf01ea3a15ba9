"""Two modes of recompute in one plan: the best mix for a budget, its file, its edits, and what is refused."""

import warnings
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.capabilities import Capabilities
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import MissingCapabilityError, PlanError, PlanWarning
from shardwright.core.plan.plan import Plan
from tests.core.planning.test_kept_products import ABLE, BATCH, BLOCKS, RESULTS, graph, named

MIXING: Capabilities = replace(ABLE, mixes_recompute=True)
MIXED = replace(graph(pointwise=8), capabilities=MIXING)
MODES = [named("out"), named("gate", "in"), named(*RESULTS)]


def plan_of(
    recompute: str, memory_bytes: int = 2**34, devices: int = 1, graph: sw.Graph = MIXED, **pins: object
) -> Plan:
    device = replace(load_profile("a100-80gb").device, memory_bytes=memory_bytes, reserved_memory_bytes=0)
    cluster = Cluster(device, nodes=1, devices_per_node=devices)
    asked = {"microbatch": BATCH // devices, "precision": "fp32", "headroom": 0.0} | pins
    return sw.plan(graph, cluster, batch=BATCH, recompute=recompute, **asked)


BLOCK_UNITS = tuple(unit for unit, mode in enumerate(plan_of("full").unit_modes) if mode == "full")


def mixes() -> list[Plan]:
    """Plans of three modes: the last block keeps everything or not, and those before it have one mode or two."""
    found = [plan_of(mode) for mode in MODES]
    assert len(BLOCK_UNITS) == BLOCKS
    for mode in MODES:
        for kept in (0, 1):
            rest = BLOCK_UNITS[: BLOCKS - kept]
            own = {"kept_units": BLOCK_UNITS[BLOCKS - kept :] or None}
            found.append(plan_of(mode, **own))
            for other in MODES:
                found += [
                    plan_of(mode, **own, other_recompute=other, other_units=rest[-count:])
                    for count in range(1, len(rest))
                    if other != mode
                ]
    return found


def test_no_mix_that_fits_is_faster() -> None:
    every = mixes()
    ends = [plan_of(mode).predicted.peak_memory_bytes[0] for mode in ("full", "none")]
    mixed = kept = 0
    for share in (0.05, 0.2, 0.45, 0.7):
        room = int(ends[0] + share * (ends[1] - ends[0]))
        found = plan_of("products", room)
        fits = [plan.predicted.step_time_s for plan in every if plan.predicted.peak_memory_bytes[0] <= room]
        assert found.predicted.peak_memory_bytes[0] <= room
        # FLOPs choose the sets of modules that are mixed, and not seconds.
        assert found.predicted.step_time_s <= 1.002 * min(fits), room
        alone = plan_of("products", room, graph=replace(MIXED, capabilities=ABLE))
        assert found.predicted.step_time_s <= alone.predicted.step_time_s
        assert alone.decision.other_recompute is None
        mixed += found.decision.other_recompute is not None
        kept += bool(found.decision.kept_units)
        pins = {
            name: getattr(found.decision, name) or None for name in ("kept_units", "other_recompute", "other_units")
        }
        pinned = plan_of(found.decision.recompute, room, **pins)
        assert pinned.predicted == found.predicted
        assert pinned.unit_modes == found.unit_modes
    assert mixed >= 2
    assert kept >= 2


def test_stages_have_as_many_units_in_another_mode_as_each_has_room_for() -> None:
    pins = {"pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b", "microbatch": 2}
    whole, full = (plan_of(mode, devices=2, **pins) for mode in ("none", "full"))
    peaks = [max(plan.predicted.peak_memory_bytes) for plan in (full, whole)]
    seen = set()
    for share in (0.1, 0.3, 0.5, 0.7):
        room = int(peaks[0] + share * (peaks[1] - peaks[0]))
        found = plan_of("products", room, devices=2, **pins)
        assert max(found.predicted.peak_memory_bytes) <= room
        assert whole.predicted.step_time_s <= found.predicted.step_time_s <= full.predicted.step_time_s
        assert sw.simulate(found).makespan_s == pytest.approx(found.predicted.pipeline_s, rel=1e-9)
        seen |= {len(set(found.unit_modes) - {"none"} | ({"none"} if found.decision.kept_units else set()))}
    assert 2 in seen


def test_a_mix_is_between_its_modes_and_counts_what_each_unit_repeats() -> None:
    one, other = named("in"), named(*RESULTS)
    first, last = plan_of(one), plan_of(other)
    for count in range(1, BLOCKS):
        found = plan_of(one, other_recompute=other, other_units=BLOCK_UNITS[-count:])
        share = count / BLOCKS
        assert found.predicted.step_time_s == pytest.approx(
            (1 - share) * first.predicted.step_time_s + share * last.predicted.step_time_s, rel=1e-9
        )
        assert found.work.recomputed_flops == pytest.approx((1 - share) * first.work.recomputed_flops)
        kept = [plan.predicted.memory[0].activations_bytes for plan in (first, found, last)]
        assert kept[0] < kept[1] < kept[2]


def test_the_file_holds_it_and_an_edit_is_counted_anew(tmp_path) -> None:
    plan = plan_of("full", other_recompute=named("up"), other_units=BLOCK_UNITS[2:])
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert "1f1b" not in sw.explain(plan)
    edited = sw.rescore(loaded, other_units=BLOCK_UNITS[1:])
    assert edited.predicted == plan_of("full", other_recompute=named("up"), other_units=BLOCK_UNITS[1:]).predicted
    assert sw.rescore(loaded, recompute="elementwise").decision.other_recompute is None, "found anew"
    with pytest.raises(PlanError, match=r"other_recompute='products:uq': 'uq' is no module of a unit"):
        sw.rescore(loaded, other_recompute="products:uq")


@pytest.mark.parametrize(
    ("recompute", "pins", "said"),
    [
        ("full", {"other_units": [1]}, "the second mode and its units go together"),
        ("full", {"other_recompute": "elementwise"}, "the second mode and its units go together"),
        ("full", {"other_recompute": "full", "other_units": [1]}, "the modes are the same"),
        ("none", {"other_recompute": "full", "other_units": [1]}, "take 'full', 'elementwise', .* for 'none'"),
        ("full", {"other_recompute": "selective", "other_units": [1]}, "for 'selective'"),
        ("auto", {"other_recompute": "full", "other_units": [1]}, "pin recompute as well"),
        ("products", {"other_recompute": "full", "other_units": [1]}, "pin recompute as well"),
        (
            "full",
            {"other_recompute": "elementwise", "other_units": [99]},
            r"other_units=\[99\] name units that the mod",
        ),
        ("full", {"other_recompute": "elementwise", "other_units": [1], "kept_units": [1]}, "1 is kept or offloaded"),
        ("products", {"kept_units": [1]}, r"kept_units=\[1\] with recompute='products'"),
        ("products", {"kept_units": []}, r"kept_units=\[\] with recompute='products': .* pin recompute as well"),
        ("auto", {"other_units": []}, r"other_units=\[\] with recompute='auto': .* leave other_units out"),
        ("elementwise", {"offloaded_units": [1]}, r"offloaded_units=\[1\] with recompute='elementwise'"),
    ],
)
def test_what_does_not_go_together_is_refused(recompute: str, pins: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(recompute, **pins)


def test_units_that_are_not_there_or_never_recomputed_are_refused() -> None:
    plan = plan_of("full", other_recompute="elementwise", other_units=BLOCK_UNITS[:1])
    with pytest.raises(PlanError, match="name units that the model's"):
        replace(plan, decision=replace(plan.decision, other_units=(99,)))
    alone = replace(plan.model, unit_classes=(7, *plan.model.unit_classes[1:]))
    with pytest.raises(PlanError, match="unit 0 has no others like it"):
        replace(plan, model=alone, decision=replace(plan.decision, other_units=(0,)))


def test_a_runtime_that_has_one_mode_says_so() -> None:
    for runtime, mode, said in ((ABLE, "elementwise", "in one mode"), (MIXING, "selective", "it has elementwise, ")):
        assert runtime.lack_of_modes(mode) == f"other_recompute={mode!r}"
        with pytest.raises(MissingCapabilityError, match=f"other_recompute='{mode}', in which .* {said}"):
            runtime.require_modes(mode)
    MIXING.require_modes("elementwise")
    MIXING.require_modes(None)


@pytest.mark.parametrize(
    ("frameworks", "recompute", "pins", "said"),
    [
        (["jax"], "alternate", {}, "recompute='alternate': the jax runtime .*'elementwise', 'full', and two of them"),
        (["torch"], "selective", {}, "recompute='selective': the torch runtime .*take one of these, or leave 'torch'"),
        (["torch", "jax"], named("up"), {}, "recompute='products:up': the jax runtime"),
        (["jax"], "full", {"other_recompute": "alternate", "other_units": [1]}, "other_recompute='alternate': the jax"),
    ],
)
def test_a_pinned_mode_that_a_named_runtime_lacks_is_refused(
    frameworks: list[str], recompute: str, pins: dict[str, object], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(recompute, frameworks=frameworks, **pins)


def test_a_pinned_mode_that_the_captured_framework_lacks_comes_with_a_warning() -> None:
    alone = replace(MIXED, capabilities=ABLE)
    with pytest.warns(PlanWarning, match="other_recompute='elementwise': the .* and one of them in a plan"):
        plan_of("full", graph=alone, other_recompute="elementwise", other_units=BLOCK_UNITS[:1])
    with pytest.warns(PlanWarning, match="recompute='selective': the "):
        plan_of("selective")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        plan_of("selective", like="megatron-core")
        plan_of("elementwise", frameworks=["torch", "jax"])
