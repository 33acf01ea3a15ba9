"""Why a parameter lies as it does."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold
from shardwright.core.model.structure import in_own_dims
from shardwright.core.plan.realised_layouts import terms_of
from shardwright.core.solver import Frame, solve_at
from shardwright.core.solver.op_layouts import choose, pins_of
from tests.core.toy import decoder

GRAPH = decoder(layers=2, hidden=1024, heads=16, vocabulary=32000, sequence=512)


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(GRAPH, sw.Cluster("a100-80gb", devices_per_node=4), batch=8, pp=1, tp=4, dp=1)


def test_every_matrix_has_a_runner_up(plan: sw.Plan) -> None:
    for slot in ("0/w0", "1/w0", "1/w1", "1/w2", "1/w3", "2/w0"):
        others = dict(plan.layout_alternatives)[slot]
        assert sw.Layout() in [a.layout for a in others]
        assert dict(plan.decision.layouts)[slot] not in [a.layout for a in others]


def test_what_an_alternative_costs_is_what_the_solver_finds_when_it_is_pinned(plan: sw.Plan) -> None:
    """One unit with the alternative pinned, the others as chosen, against all as chosen."""
    frame = Frame(fold(GRAPH), WorkCounter(GRAPH))
    terms = terms_of(plan.decision, plan.costs.rates)
    price = terms.price_s_per_byte(frame.folded)
    chosen = choose(frame, terms, pins_of(frame, plan.model, dict(plan.decision.layouts))).solution
    slots = {slot.role: slot for slot in frame.slots[1]}
    for role in ("w1", "w2"):
        other = next(a for a in dict(plan.layout_alternatives)[f"1/{role}"] if a.layout == sw.Layout())
        tensor = GRAPH.parameters[slots[role].parameter].tensor
        place = in_own_dims(other.layout, slots[role].dims).on("tp")
        pinned = solve_at(frame, terms.setting(), price, {tensor: (place,)})
        assert pinned.time_s - chosen.time_s == pytest.approx(other.extra_s, rel=1e-6, abs=1e-12)
        assert pinned.weight_bytes - chosen.weight_bytes == pytest.approx(other.extra_bytes, rel=1e-6)


def test_the_text_names_the_layout_its_alternatives_and_what_they_cost(plan: sw.Plan) -> None:
    text = sw.explain(plan, "h.1.fc")
    assert "layout tp: S1 in slot dims" in text
    assert "not R: +" in text
    assert "MiB held" in text
    assert "not tp: S0: +" in text
    assert "S1 in slot dims (what comes out is split)" in text
    assert "all 2 uses" not in text
    assert "replicated: " in sw.explain(plan, "h.0.ln_1.weight")


def test_a_tied_parameters_alternatives_are_counted_over_all_uses(plan: sw.Plan) -> None:
    """One use alone may gain by another layout: what counts is their sum."""
    text = sw.explain(plan, "wte.weight")
    assert "all 2 uses together" in text
    alternatives = dict(plan.layout_alternatives)
    uses = [plan.model.ties[0][i].split("/") for i in (0, 1)]
    seconds = 0.0
    for unit, role in uses:
        slot = f"{plan.model.unit_classes[int(unit)]}/{role}"
        seconds += next(a.extra_s for a in alternatives[slot] if a.layout == sw.Layout())
    after = text[text.index("all 2 uses together") :]
    assert f"not R: {seconds * 1e6:+.4g} µs" in after


def test_a_unit_that_differs_from_its_class_is_told_by_itself(plan: sw.Plan) -> None:
    layouts = (*plan.decision.layouts, ("@2/w2", sw.Layout.of(tp=sw.Split(0))))
    edited = replace(plan, decision=replace(plan.decision, layouts=layouts))
    assert "layout tp: S1 in slot dims" in sw.explain(edited, "h.0.fc")
    assert "layout tp: S0 in slot dims" in sw.explain(edited, "h.1.fc")


def test_an_unknown_parameter_is_named_with_the_nearest(plan: sw.Plan) -> None:
    with pytest.raises(sw.ShardwrightError, match=r"no parameter 'h\.1\.fcc'"):
        sw.explain(plan, "h.1.fcc")


def test_a_picture_says_which_rank_holds_which_part(plan: sw.Plan) -> None:
    lines = sw.explain(plan, "h.1.fc").splitlines()
    boxes = next(line for line in lines if "rank 0" in line)
    assert [cell.strip() for cell in boxes.split("│")[1:-1]] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    whole = sw.explain(plan, "h.0.ln_1.weight")
    assert "ranks 0,1,2,3" in whole


def test_a_plan_and_a_graph_print_as_one_line(plan: sw.Plan) -> None:
    assert "pp 1 × dp 1 × tp 4" in repr(plan)
    assert "a100-80gb" in repr(plan)
    assert repr(plan).startswith(f"<Plan of {GRAPH.model_name}")
    assert f"{len(GRAPH.ops)} ops" in repr(GRAPH)
    assert max(len(repr(plan)), len(repr(GRAPH))) < 300


def test_a_plan_in_words_says_small_amounts_too(plan: sw.Plan) -> None:
    text = sw.explain(plan)
    assert " 0 GiB" not in text
    assert "0.00" not in text
    assert "pipeline rank 0: " in text
