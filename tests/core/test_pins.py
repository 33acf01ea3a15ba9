"""Pins from every source, and what is said about bad ones."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.core.errors import LayoutError
from shardwright.core.layout.placements import Layout, Replicate, Split
from shardwright.core.model.fold import fold
from shardwright.core.rules.pins import (
    Asked,
    Pin,
    PinWarning,
    TensorParallelism,
    from_logical_axes,
    from_patterns,
    from_styles,
    resolve,
)
from shardwright.core.solver import AxisCost, Setting, lightest_bytes, solve
from tests.core.toy import decoder

GRAPH = decoder(layers=2, hidden=64, heads=4, vocabulary=128, sequence=16, transposed=True)
TENSOR = {p.name: p.tensor for p in GRAPH.parameters}
TP = {"tp": 4}


def places(pins: tuple[Pin, ...], sizes: dict[str, int] = TP) -> dict[str, object]:
    names = {t: n for n, t in TENSOR.items()}
    return {names[t]: found for t, found in resolve(GRAPH, pins, sizes).places}


def test_hugging_face_styles() -> None:
    plan = {"h.*.c_attn": "packed_colwise", "h.*.proj": "rowwise", "h.*.fc": "colwise", "wte": "embedding_rowwise",
            "h.*.fc_b": "colwise", "h.*.proj_b": "rowwise"}  # fmt: skip
    found = places(from_styles(GRAPH, plan))
    assert found["h.0.c_attn"] == (Split(0, (96, 96)),)
    assert found["h.1.proj"] == (Split(1),)
    assert found["h.1.fc"] == (Split(0),)
    assert found["h.0.fc_b"] == (Split(0),)
    assert found["h.0.proj_b"] == (Replicate(),)
    assert found["wte.weight"] == (Split(0),)


def test_an_unknown_style_warns_with_the_nearest_and_the_rest_holds() -> None:
    with pytest.warns(PinWarning, match=r"style 'colwize' of .* did you mean 'colwise'"):
        pins = from_styles(GRAPH, {"h.*.fc": "colwize", "h.*.proj": "rowwise"})
    assert set(places(pins)) == {"h.0.proj", "h.1.proj"}


def test_the_first_pattern_wins() -> None:
    rules = [(r"h\.0\.fc$", Layout()), (r"fc$", Layout.of(tp=Split(0))), (".*", Layout.of(tp=Split(0)))]
    found = places(from_patterns(GRAPH, rules[:2], ["tp"]))
    assert found == {"h.0.fc": (Replicate(),), "h.1.fc": (Split(0),)}
    with pytest.raises(LayoutError, match="is not a regular expression"):
        from_patterns(GRAPH, [("(", Layout())])
    with pytest.raises(
        LayoutError, match=r"none of 'decoder' matches a parameter of Toy; its names are like wte.weight"
    ):
        from_patterns(GRAPH, [("decoder", Layout.of(tp=Split(0)))])
    with pytest.raises(LayoutError, match="none of"):
        from_styles(GRAPH, {"layers.*.nothing": "colwise"})


def test_logical_axes_take_the_first_free_rule() -> None:
    names = {
        "h.0.fc": ("mlp", "embed"),
        "h.0.out": ("embed", "mlp"),
        "h.1.fc": ("heads", "embed"),
        "h.1.out": (None, "tp"),
    }
    rules = [("mlp", "tp"), ("embed", "tp"), ("embed", None), ("heads", None)]
    found = places(from_logical_axes(GRAPH, names, rules))
    assert found["h.0.fc"] == (Split(0),)
    assert found["h.0.out"] == (Split(0),)
    assert found["h.1.fc"] == (Split(1),)
    assert found["h.1.out"] == (Split(1),)
    with pytest.raises(LayoutError, match=r"has 2 dims, its logical axes are \('mlp',\)"):
        from_logical_axes(GRAPH, {"h.0.fc": ("mlp",)}, rules)
    with pytest.raises(LayoutError, match=r"the nearest is 'h.0.fc'"):
        from_logical_axes(GRAPH, {"h.0.fcc": ("mlp", None)}, rules)
    with pytest.raises(LayoutError, match=r"the nearest is 'h\.\d\.fc'"):  # a name that is short of its path
        from_logical_axes(GRAPH, {"fc": ("mlp", None)}, rules)
    with pytest.raises(LayoutError, match="nothing is like it"):
        from_logical_axes(GRAPH, {"zzz": ("mlp", None)}, rules)


def test_the_innermost_mark_wins() -> None:
    names = [p.name for p in GRAPH.parameters]
    marks = TensorParallelism({"h": True, "h.1": False, "h.1.fc": True})
    paths = ("h.0.fc", "h.1.proj", "h.1.fc", "wte.weight")
    assert [marks.enabled(path) for path in paths] == [True, False, True, None]
    found = places(marks.pins(names))
    assert found["h.1.proj"] == (Replicate(),)
    assert "h.1.fc" not in found
    with pytest.raises(LayoutError, match="under which no parameter is"):
        TensorParallelism({"g.1": True}).pins(names)


def test_pins_that_contradict_each_other_are_both_named() -> None:
    pins = (*from_styles(GRAPH, {"h.*.fc": "colwise"}), *from_patterns(GRAPH, [("h.1.fc$", Layout.of(tp=Split(1)))]))
    with pytest.raises(LayoutError, match=r"style 'colwise' of 'h\.\*\.fc' puts h\.1\.fc at S0, pattern .* at S1"):
        resolve(GRAPH, pins, TP)
    tied = (Pin("wte.weight", Layout.of(tp=Split(0)), "one"), Pin("head.weight", Layout.of(tp=Split(1)), "the other"))
    with pytest.raises(LayoutError, match=r"one puts wte\.weight at S0, the other puts head\.weight at S1"):
        resolve(GRAPH, tied, TP)


def test_patterns_of_a_tied_parameters_two_names() -> None:
    """Each name's own is kept, so that they are seen to contradict; one that meets both names is met once."""
    apart = [("wte", Layout.of(tp=Split(0))), ("head", Layout.of(tp=Split(1)))]
    said = r"pattern 'wte' puts wte\.weight at S0, pattern 'head' puts head\.weight at S1"
    with pytest.raises(LayoutError, match=said):
        resolve(GRAPH, from_patterns(GRAPH, apart, ("tp",)), TP)
    for rules in ([apart[0], (".", Layout())], [("head", apart[0][1])]):
        assert places(from_patterns(GRAPH, rules, ("tp",)))["wte.weight"] == (Split(0),)


def test_an_axis_or_a_dim_that_is_not_there() -> None:
    with pytest.raises(LayoutError, match="on axis 'model'; the mesh has tp"):
        resolve(GRAPH, (Pin("h.0.fc", Layout.of(model=Split(0)), "a pin"),), TP)
    with pytest.raises(LayoutError, match=r"splits dim 2 of h.0.fc"):
        resolve(GRAPH, (Pin("h.0.fc", Layout.of(tp=Split(2)), "a pin"),), TP)
    with pytest.raises(LayoutError, match=r"the nearest is 'h.0.fc'"):
        resolve(GRAPH, (Pin("h.0.fcx", Layout.of(tp=Split(0)), "a pin"),), TP)


def test_what_does_not_divide_is_reported_with_the_size_that_would() -> None:
    odd = decoder(layers=1, hidden=64, heads=4, vocabulary=131, sequence=16)
    found = resolve(odd, from_styles(odd, {"wte": "embedding_rowwise", "h.*.proj": "rowwise"}), TP)
    ((name, reason),) = found.unsplit
    assert name == "wte.weight"
    assert "holds 131, which axis 'tp' of size 4 does not divide; pad it to 132" in reason
    assert len(found.places) == 1


def test_the_solver_keeps_to_pins() -> None:
    folded = fold(GRAPH)
    pins = resolve(GRAPH, from_patterns(GRAPH, [(r"h\.0\.fc$", Layout())], ["tp"]), TP)
    setting = Setting((AxisCost("tp", 4, 2e11),), 3e14, 1.5e12, batch=8)
    limit = 1.6 * lightest_bytes(folded, setting)
    found = solve(folded, setting, pins=dict(pins.places), memory_limit_bytes=limit).layouts()
    assert found[TENSOR["h.0.fc"]].is_replicated
    assert found[TENSOR["h.1.fc"]].on("tp") == Split(0)


# In plans --------------------------------------------------------------------------------------------------------


def planned(layouts: Asked | None, graph: sw.Graph = GRAPH, tp: int = 4) -> sw.Plan:
    cluster = sw.Cluster("a100-80gb", devices_per_node=tp)
    return sw.plan(graph, cluster, batch=8, pp=1, dp=1, tp=tp, layouts=layouts)


def test_plans_keep_pins_of_one_unit_apart_from_its_class() -> None:
    plan = planned([(r"^h\.1\.(fc|out)$", Layout())])
    found = plan.parameter_layouts("toy")
    assert found["h.1.fc"].is_replicated
    assert found["h.0.fc"].on("tp") == Split(0)
    weights = {slot for slot, _ in plan.decision.layouts if slot.startswith("@") and "/w" in slot}
    assert weights == {"@2/w2", "@2/w3"}  # values between them lie as is fastest on the cluster
    assert plan.predicted.peak_memory_bytes[0] > planned(None).predicted.peak_memory_bytes[0]


def test_plans_take_styles_patterns_pins_and_logical_rules() -> None:
    for asked in (
        {"h.*.fc": "rowwise"},
        [(r"\.fc$", Layout.of(tp=Split(1)))],
        [Pin(f"h.{i}.fc", Layout.of(tp=Split(1)), "a pin") for i in range(2)],
    ):
        assert planned(asked).parameter_layouts("toy")["h.0.fc"].on("tp") == Split(1)
    named = replace(GRAPH, logical_axes=(("h.0.fc", ("mlp", "embed")), ("h.1.fc", ("mlp", "embed"))))
    assert planned([("embed", "tp"), ("mlp", None)], named).parameter_layouts("toy")["h.0.fc"].on("tp") == Split(1)
    assert planned(None, named).decision.layouts == planned(None).decision.layouts  # names without rules say nothing
    marked = replace(GRAPH, pins=TensorParallelism({"h": False}).pins([p.name for p in GRAPH.parameters]))
    found = planned(None, marked).parameter_layouts("toy")
    assert all(layout.is_replicated for name, layout in found.items() if name.startswith("h."))
    assert found["wte.weight"].on("tp") == Split(0)


def test_bad_pins_of_a_plan_are_named() -> None:
    with pytest.raises(LayoutError, match="the parameters of Toy name none"):
        planned([("mlp", "tp")])
    named = replace(GRAPH, logical_axes=(("h.0.fc", ("mlp", "embed")),))
    with pytest.raises(LayoutError, match="no rule for the logical axes 'heads' matches: the model's are embed, mlp"):
        planned([("heads", "tp")], named)
    with pytest.raises(LayoutError, match="on axis 'model'; the mesh has tp"):
        planned([("mlp", "model")], named)
    with pytest.raises(LayoutError, match="layouts= holds 3"):
        planned([3])  # type: ignore[list-item]
    with pytest.raises(LayoutError, match="two pins contradict each other"):
        planned([(r"\.fc$", Layout.of(tp=Split(1))), Pin("h.0.fc", Layout.of(tp=Split(0)), "a pin")])


def test_a_pin_that_cannot_be_kept_is_reported() -> None:
    plan = planned([(r"\.(fc|ln_1.weight)$", Layout.of(tp=Split(0)))], tp=3)
    said = dict(plan.unsplit)
    assert "which axis 'tp' of size 3 does not divide; pad it to 258" in said["1/w2"]


def test_a_pin_that_no_op_can_use_is_reported_and_the_rest_holds() -> None:
    """Without partial sums nothing can look rows up in a piece of a table."""
    unable = replace(GRAPH, capabilities=replace(GRAPH.capabilities, partial_layouts=False))
    plan = planned([("wte", Layout.of(tp=Split(0))), (r"\.fc$", Layout.of(tp=Split(0)))], unable)
    assert "pinned at S0, which an op that reads it cannot use" in dict(plan.unsplit)["0/w0"]
    assert plan.parameter_layouts("toy")["h.0.fc"].on("tp") == Split(0)
