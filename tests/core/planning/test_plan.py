"""Plans: what is searched, what is pinned, what is refused, and the file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.errors import PlanError, PlanFileError
from shardwright.core.plan.file import to_document, to_text
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.schema import VERSION, schema
from shardwright.core.schedule import schedule_names
from tests.core.toy import decoder

USUAL = {"schedule": "1f1b", "virtual_stages": 1, "placement_order": "PDT"}
GRAPH = decoder(layers=8, hidden=256, heads=8, vocabulary=1024, sequence=128)


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return Cluster("a100-80gb", nodes=2, devices_per_node=8)


@pytest.fixture(scope="module")
def plan(cluster: Cluster) -> sw.Plan:
    return sw.plan(GRAPH, cluster, batch=64, pp=4, dp=2, tp=2, microbatch=2, **USUAL)


def test_pins_stay_pinned(plan: sw.Plan) -> None:
    d = plan.decision
    assert (d.pp, d.dp, d.tp, d.microbatch, plan.microbatches) == (4, 2, 2, 2, 16)
    assert plan.mesh.sizes == (4, 2, 2)
    assert len(plan.predicted.peak_memory_bytes) == 16
    assert plan.predicted.memory[0] == plan.predicted.memory_by_stage_rank[0]
    assert plan.predicted.memory[15] == plan.predicted.memory_by_stage_rank[3]


def test_every_unit_and_parameter_has_a_stage(plan: sw.Plan) -> None:
    assert [u for stage in plan.stage_units for u in stage] == list(range(10))
    stages = plan.parameter_stages("toy")
    assert set(stages) == {p.name for p in GRAPH.parameters}
    assert stages["wte.weight"] == (0, 3)
    paths = [call.path for stage in plan.stage_calls("toy") for call in stage]
    assert paths == ["wte", *(f"h.{i}" for i in range(8)), "ln_f", "head"]


def test_predicted_pipeline_time_is_the_simulated_makespan(plan: sw.Plan) -> None:
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-9)
    p = plan.predicted
    assert p.step_time_s == pytest.approx(p.pipeline_s + p.data_parallel_s + p.optimizer_s)


def test_long_pipelines_are_extrapolated_exactly(cluster: Cluster) -> None:
    long = sw.plan(GRAPH, cluster, batch=512, pp=4, dp=2, tp=2, microbatch=1, **USUAL)
    assert long.microbatches == 256
    assert sw.simulate(long).makespan_s == pytest.approx(long.predicted.pipeline_s, rel=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_activation_memory_follows_the_schedule(cluster: Cluster, schedule: str) -> None:
    plan = sw.plan(GRAPH, cluster, batch=64, pp=4, dp=2, tp=2, microbatch=1, schedule=schedule)
    timeline = sw.simulate(plan)
    for rank, use in enumerate(plan.predicted.memory_by_stage_rank):
        kept = sum(plan.costs.classes[plan.costs.unit_classes[u]].activation_bytes for u in plan.stage_units[rank])
        assert use.activations_bytes >= kept * timeline.peak_live_activations[rank]
        assert use.activations_bytes <= kept * (timeline.peak_live_activations[rank] + 1) + 4 * 2**20


def test_interleaved_stages_go_round_the_ranks(cluster: Cluster) -> None:
    plan = sw.plan(
        GRAPH, cluster, batch=64, pp=4, dp=4, tp=1, microbatch=2, virtual_stages=2, schedule="interleaved-1f1b"
    )
    assert plan.stages == 8
    assert plan.build_schedule().stage_to_rank(5) == 1
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-6)


@pytest.mark.parametrize("schedule", [name for name in schedule_names() if name != "forward-only"])
def test_every_named_schedule_can_be_planned(cluster: Cluster, schedule: str) -> None:
    v_shaped = schedule in ("zbv", "v-half", "v-min", "dualpipev")
    pins = {"pp": 4, "dp": 4, "tp": 1, "microbatch": 1, "virtual_stages": 2 if v_shaped else 1}
    plan = sw.plan(GRAPH, cluster, batch=64, schedule=schedule, **pins)
    assert sw.simulate(plan).makespan_s == pytest.approx(plan.predicted.pipeline_s, rel=1e-6)
    assert plan.build_schedule().placement[0] == 0


def test_recompute_trades_memory_for_time(cluster: Cluster) -> None:
    pins = {"batch": 64, "pp": 2, "dp": 8, "tp": 1, "microbatch": 4}
    none = sw.plan(GRAPH, cluster, recompute="none", **pins)
    full = sw.plan(GRAPH, cluster, recompute="full", **pins)
    assert full.predicted.pipeline_s > none.predicted.pipeline_s
    assert full.predicted.memory[0].activations_bytes < none.predicted.memory[0].activations_bytes


def test_sharding_divides_the_optimizer_state(cluster: Cluster) -> None:
    pins = {"batch": 64, "pp": 1, "dp": 16, "tp": 1}
    whole, shared = (sw.plan(GRAPH, cluster, shard=level, **pins).predicted.memory[0] for level in (0, 1))
    assert shared.optimizer_bytes == pytest.approx(whole.optimizer_bytes / 16, abs=16)
    assert shared.parameters_bytes == whole.parameters_bytes


def test_the_search_takes_the_fastest_of_all_that_fit() -> None:
    small = Cluster("a100-80gb", devices_per_node=4)
    pins = {"recompute": "none", "shard": 0, "answer": "fastest"}
    best = sw.plan(GRAPH, small, batch=32, **pins)
    times = {}
    for pp, dp, tp in [(1, 4, 1), (1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)]:
        for microbatch in (1, 2, 4, 8, 16, 32):
            if 32 % (dp * microbatch) == 0:
                one = sw.plan(GRAPH, small, batch=32, pp=pp, dp=dp, tp=tp, microbatch=microbatch, **pins)
                times[pp, dp, tp, microbatch] = one.predicted.step_time_s
    assert best.predicted.step_time_s == pytest.approx(min(times.values()), rel=1e-5)
    assert best.alternatives
    assert all("slower" in a.reason or "does not fit" in a.reason for a in best.alternatives)


# Requests that cannot be met --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "said"),
    [
        ({"pp": 3}, r"pp 3, and the cluster has 16 devices.*nearest for pp: (2|4)"),
        ({"pp": 2, "dp": 2, "tp": 2}, "multiply to 16"),
        ({"pp": 4, "dp": 4, "batch": 30}, r"batch=30 is not a multiple of dp = 4: use batch=32"),
        ({"dp": 8, "microbatch": 3}, r"dp · microbatch = 8 · 3: use batch=72"),
        ({"pp": 16}, "16 needs more stages than the model's 10 units: use at most pp=10"),
        ({"pp": 0}, "pp=0: expected a whole number"),
        ({"schedule": "1f1bb"}, "did you mean '1f1b'"),
        ({"optimizer": "adamx"}, "did you mean 'adam"),
        ({"recompute": "some"}, "recompute='some'"),
        ({"shard": 4}, "shard=4"),
        ({"precision": "bf17"}, "did you mean 'bf16'"),
        ({"precision": "fp8"}, "the toy runtime of this version does not compute products in 8 bits; plan for 'bf16'"),
        ({"gradient_precision": "fp8"}, "gradient_precision='fp8'"),
        ({"dp": 16, "shard_group": 3, "shard": 1}, "shard_group=3 does not divide dp=16"),
    ],
)
def test_a_request_that_cannot_be_met_names_the_fix(cluster: Cluster, pins: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        sw.plan(GRAPH, cluster, **{"batch": 64, **pins})


def test_a_schedule_that_refuses_the_sizes_is_named(cluster: Cluster) -> None:
    with pytest.raises(PlanError, match=r"schedule 'zbv' at pp=4: .*virtual_stages=1 must be 2"):
        sw.plan(GRAPH, cluster, batch=64, pp=4, dp=2, tp=2, microbatch=1, virtual_stages=1, schedule="zbv")


def test_a_model_that_does_not_fit_says_by_how_much_and_what_would() -> None:
    graph = decoder(layers=24, hidden=8192, heads=64, vocabulary=32000, sequence=2048)
    with pytest.raises(
        PlanError, match=r"does not fit: .* GiB more than the .* the nearest plan that fits: pp"
    ) as said:
        sw.plan(graph, Cluster("a100-80gb", nodes=2, devices_per_node=8), batch=32, pp=1, dp=16, tp=1, shard=1)
    fitting = str(said.value).rsplit("fits: ", 1)[1]
    assert "shard 1" not in fitting


def test_the_nearest_plan_that_fits_keeps_degrees_and_microbatch_where_it_can() -> None:
    """Only the memory policy is given up, and what is named fits when it is asked for."""
    graph = decoder(layers=24, hidden=8192, heads=64, vocabulary=32000, sequence=2048)
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=8)
    pins = {"pp": 2, "dp": 4, "tp": 2, "microbatch": 4, "schedule": "interleaved-1f1b", "virtual_stages": 2}
    with pytest.raises(PlanError, match="does not fit") as said:
        sw.plan(graph, cluster, batch=64, recompute="none", shard=0, **pins)
    fitting = str(said.value).rsplit("fits: ", 1)[1]
    assert fitting.startswith("pp 2 × dp 4 × tp 2, microbatch 4 × 4, interleaved-1f1b, 2 virtual stages")
    assert sw.plan(graph, cluster, batch=64, headroom=0, answer="fastest", **pins).summary() == fitting  # type: ignore[arg-type]


def test_the_nearest_plan_that_fits_has_other_degrees_where_no_policy_helps() -> None:
    """The logits of one sample are larger than a device."""
    graph = decoder(layers=2, hidden=1024, heads=8, vocabulary=131072, sequence=32768)
    with pytest.raises(PlanError, match=r"the nearest plan that fits: pp \d+ × dp \d+ × tp (?!1,)"):
        sw.plan(graph, Cluster("t4", devices_per_node=8), batch=8, pp=1, dp=8, tp=1)


def test_a_model_that_fits_nowhere_asks_for_more_devices() -> None:
    graph = decoder(layers=24, hidden=8192, heads=64, vocabulary=32000, sequence=2048)
    with pytest.raises(PlanError, match="no plan over 1 devices fits"):
        sw.plan(graph, Cluster("t4"), batch=1)


def test_plan_wants_a_graph_and_a_cluster(cluster: Cluster) -> None:
    with pytest.raises(PlanError, match=r"call shardwright.capture first"):
        sw.plan("model", cluster, batch=1)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="write Cluster"):
        sw.plan(GRAPH, "a100-80gb", batch=1)  # type: ignore[arg-type]


# The file ---------------------------------------------------------------------------------------------------------


def test_the_file_round_trips_and_is_stable(plan: sw.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert to_text(again) == (tmp_path / "plan.json").read_text()


def test_the_schema_names_every_section() -> None:
    sections = {"decision", "model", "bindings", "costs", "predicted", "alternatives", "provenance"}
    assert sections <= schema()["properties"].keys()


def edited(plan: sw.Plan, path: str, value: object) -> str:
    document = json.loads(to_text(plan))
    *parents, last = path.split(".")
    place = document
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if isinstance(place, list):
        place[int(last)] = value
    else:
        place[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("version", VERSION + 1, f"version {VERSION + 1} is newer than this Shardwright reads"),
        ("version", "1", "expected a whole number"),
        ("format", "other", "not a plan file"),
        ("decision.pp", "4", r"decision.pp: .*integer"),
        ("decision.pp", 3, "decision: 4 stage_starts for 3 stages"),
        ("decision.batch", 63, "not a multiple"),
        ("decision.stage_starts.1", 0, "stage_starts rise from 0"),
        ("decision.layouts.1/w9", {"tp": {"split": 0}}, "did you mean '1/w"),
        ("decision.layouts.1/w0", {"tp": {"split": 5}}, "names a dim"),
        ("decision.layouts.1/w0", {"xp": {"split": 0}}, "no axis 'xp'"),
        ("decision.typo", 1, "decision.typo"),
        ("model.unit_classes.0", 99, "model.unit_classes"),
        ("model.classes.0.w0", [1, 2], "model.digest"),
        ("costs.boundary_s", [], "costs.boundary_s: 0 entries"),
        ("costs.classes.0.forward_s", -1.0, "costs.classes.0.forward_s"),
        ("bindings.toy.units.0.parameters", {}, "bindings.toy.units.0.parameters"),
        ("predicted.memory_by_stage_rank", [], "one per pipeline rank"),
        ("decision.placement_order", "PDX", "an order of the letters D, P and T"),
        ("decision.schedule", "auto", "0 rows of generated actions"),
        ("decision.generated", ["0F0", "1F0"], "2 rows of generated actions"),
    ],
)
def test_a_bad_file_names_the_place(plan: sw.Plan, path: str, value: object, said: str) -> None:
    with pytest.raises(PlanFileError, match=said):
        Plan.from_text(edited(plan, path, value), "plan.json")


def test_a_file_that_is_not_json_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{\n oops")
    with pytest.raises(PlanFileError, match="line 2"):
        sw.Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="cannot read the plan file"):
        sw.Plan.load(tmp_path / "absent.json")


# Other captures ---------------------------------------------------------------------------------------------------


def test_rebind_takes_a_twin_with_other_names_and_orientation(plan: sw.Plan) -> None:
    twin = decoder(layers=8, hidden=256, heads=8, vocabulary=1024, sequence=128, transposed=True, name="Twin")
    twin = replace(twin, capabilities=replace(twin.capabilities, framework="other"))
    both = plan.rebind(twin)
    assert [name for name, _ in both.bindings] == ["other", "toy"]
    mine, theirs = both.parameter_layouts("toy"), both.parameter_layouts("other")
    assert mine["h.0.fc"].on("tp") == sw.Split(1)
    assert theirs["h.0.fc"].on("tp") == sw.Split(0)
    assert Plan.from_text(to_text(both)) == both


def test_rebind_names_the_first_difference(plan: sw.Plan) -> None:
    with pytest.raises(PlanError, match="10 units against 4"):
        plan.rebind(decoder(layers=2, hidden=256, heads=8, vocabulary=1024))


def test_another_models_names_are_refused_with_the_nearest(plan: sw.Plan) -> None:
    names = [p.name for p in GRAPH.parameters]
    plan.require_model("toy", tuple(names), "Toy")
    wrong = tuple(name.replace("h.0.fc", "h.0.fcc") for name in names)
    with pytest.raises(PlanError, match=r"h.0.fc \(nearest: h.0.fcc") as said:
        plan.require_model("toy", wrong, "Other")
    assert "which the plan lacks" in str(said.value)


def test_an_unbound_framework_is_named(plan: sw.Plan) -> None:
    with pytest.raises(PlanError, match="bound to toy, not to jax"):
        plan.parameter_stages("jax")


def test_a_wrong_world_gives_both_numbers(plan: sw.Plan) -> None:
    plan.require_world(16)
    with pytest.raises(PlanError, match=r"16 ranks \(pp 4 × dp 2 × tp 2\), and 8 are running"):
        plan.require_world(8)


def test_compare_twins_and_others(plan: sw.Plan, cluster: Cluster) -> None:
    twin_graph = decoder(layers=8, hidden=256, heads=8, vocabulary=1024, sequence=128, transposed=True, name="Twin")
    twin = sw.plan(twin_graph, cluster, batch=64, pp=4, dp=2, tp=2, microbatch=2, **USUAL)
    same = sw.compare(plan, twin)
    assert same.same_decision
    assert not same.unexpected
    other = sw.compare(plan, sw.plan(GRAPH, cluster, batch=64, pp=2, dp=2, tp=4, microbatch=2, virtual_stages=1))
    assert not other.same_decision
    assert {d.field for d in other.unexpected} >= {"pp", "tp", "stage_starts"}
    assert "decision.pp: " in str(other)
    assert not sw.compare(plan, plan).differences
    assert str(sw.compare(plan, plan)) == "no difference"


def test_explain_a_plan_and_a_parameter(plan: sw.Plan) -> None:
    assert "pp 4 × dp 2 × tp 2" in sw.explain(plan)
    said = sw.explain(plan, "head.weight")
    assert "stage 0" in said
    assert "stage 3" in said
    with pytest.raises(PlanError, match=r"did you mean 'h.0.fc'"):
        sw.explain(plan, "h.0.fcx")


def test_document_is_plain_json(plan: sw.Plan) -> None:
    assert json.loads(json.dumps(to_document(plan))) == to_document(plan)
