"""Tensor layouts of plans: Megatron's come out of the solver, what cannot be split is said, and plans are realised."""

from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import Cluster, Split
from shardwright.core.cluster.hardware import Link
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.cost.work import Collective
from shardwright.core.errors import PlanError, PlanWarning
from shardwright.core.layout.placements import Partial, Replicate
from shardwright.core.model.fold import fold
from shardwright.core.plan.realised_layouts import realise
from shardwright.core.search.request import Request
from shardwright.core.search.search import make_plan
from tests.core.toy import decoder

BIG = {"layers": 2, "hidden": 1024, "heads": 16, "vocabulary": 32000, "sequence": 512}
R, P = Replicate(), Partial()


def planned(tp: int, graph: sw.Graph | None = None, **pins: object) -> sw.Plan:
    cluster = Cluster("a100-80gb", devices_per_node=tp)
    return sw.plan(graph or decoder(**BIG), cluster, batch=8, pp=1, tp=tp, dp=1, **pins)


def layouts(tp: int, **changes: object) -> dict[str, sw.Layout]:
    return planned(tp, decoder(**{**BIG, **changes})).parameter_layouts("toy")


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_finds_column_and_row_parallel_linear_layers(tp: int, sequence_parallel: bool) -> None:
    found = planned(tp, sequence_parallel=sequence_parallel).parameter_layouts("toy")
    assert found["h.0.c_attn"].on("tp") == Split(1, (1024, 1024, 1024))
    assert found["h.0.c_attn_b"].on("tp") == Split(0, (1024, 1024, 1024))
    assert found["h.0.proj"].on("tp") == Split(0)
    assert found["h.0.fc"].on("tp") == Split(1)
    assert found["h.0.fc_b"].on("tp") == Split(0)
    assert found["h.0.out"].on("tp") == Split(0)
    for replicated in ("h.0.proj_b", "h.0.out_b", "h.0.ln_1.weight", "ln_f.bias"):
        assert found[replicated].is_replicated


def test_a_tied_vocabulary_is_split_in_both_uses() -> None:
    assert layouts(4)["wte.weight"].on("tp") == Split(0)


def test_transposed_weights_get_the_transposed_layout() -> None:
    found = layouts(4, transposed=True)
    assert found["h.0.c_attn"].on("tp") == Split(0, (1024, 1024, 1024))
    assert found["h.0.proj"].on("tp") == Split(1)


def test_one_reduction_per_sublayer_each_way() -> None:
    graph = decoder(**BIG)
    unit = fold(graph).units[1]
    work = WorkCounter(graph).count(unit, 2, "bf16", realise(graph, planned(4, graph))[1])
    activation = Collective("all_reduce", 2 * 512 * 1024 * 2)
    assert work.forward_moved == (activation, activation)
    assert work.backward_moved == (activation, activation)
    assert work.forward_flops * 4 == WorkCounter(graph).count(unit, 2, "bf16").forward_flops


def test_divided_sequences_gather_and_scatter_the_same_bytes() -> None:
    """arXiv 2205.05198, section 4.2.2: an all-gather and a reduce-scatter for each all-reduce."""
    graph = decoder(**BIG)
    unit = fold(graph).units[1]
    plan = planned(4, graph, sequence_parallel=True)
    work = WorkCounter(graph).count(unit, 2, "bf16", realise(graph, plan)[1])
    size = 2 * 512 * 1024 * 2
    pair = [Collective("all_gather", size), Collective("reduce_scatter", size)]
    assert sorted(work.forward_moved, key=str) == sorted(pair * 2, key=str)
    assert sorted(work.backward_moved, key=str) == sorted(pair * 2, key=str)
    assert len(work.backward_gathered) == 2
    kept = WorkCounter(graph).count(unit, 2, "bf16", realise(graph, plan)[1], gathered_stays=True)
    assert (kept.backward_gathered, kept.forward_moved) == ((), work.forward_moved)
    assert (
        work.saved_bytes < WorkCounter(graph).count(unit, 2, "bf16", realise(graph, planned(4, graph))[1]).saved_bytes
    )


@pytest.mark.parametrize(("able", "form"), [(False, False), (True, True)])
def test_sequences_are_divided_where_that_wins_and_the_framework_can(able: bool, form: bool) -> None:
    graph = decoder(**BIG)
    graph = replace(graph, capabilities=replace(graph.capabilities, sequence_parallel=able))
    assert planned(4, graph).decision.sequence_parallel is form


def test_sequences_are_divided_only_where_every_runtime_that_is_asked_for_can() -> None:
    """So that a model and its twin get one plan."""
    graph = decoder(**BIG)
    able = replace(graph.capabilities, sequence_parallel=True)
    graph = replace(graph, capabilities=able)
    cluster = sw.Cluster("a100-80gb", devices_per_node=4)
    for others, form in (((), True), ((replace(able, sequence_parallel=False),), False)):
        request = Request(batch=8, pp=1, tp=4, dp=1, runtimes=(able, *others))
        assert make_plan(graph, cluster, request).decision.sequence_parallel is form


@pytest.mark.parametrize("missing", ["partial_layouts", "block_layouts"])
def test_what_the_framework_cannot_do_is_not_chosen(missing: str) -> None:
    graph = decoder(**BIG)
    graph = replace(graph, capabilities=replace(graph.capabilities, **{missing: False}))
    plan = planned(4, graph)
    found = [
        place
        for unit in realise(graph, plan)
        for signatures in unit.signatures
        for signature in signatures
        for place in (*signature.inputs, *signature.outputs)
    ]
    assert any(isinstance(place, Split) for place in found)
    if missing == "partial_layouts":
        assert not any(isinstance(place, Partial) for place in found)
    else:
        assert not any(isinstance(place, Split) and place.blocks for place in found)


def test_heads_that_do_not_divide_are_gathered_and_said() -> None:
    graph = decoder(**{**BIG, "hidden": 960, "heads": 15})
    plan = planned(8, graph)
    assert plan.parameter_layouts("toy")["h.0.fc"].on("tp") == Split(1)
    attention = next(i for i, op in enumerate(graph.ops) if op.kind == "attention")
    block = realise(graph, plan)[1]
    assert all(block.operand(attention, i) == (R,) for i in range(4))
    note = dict(plan.unsplit)["1/attention"]
    assert "8 does not divide 15" in note
    assert "pad it to 16" in note


def test_predicted_parameters_per_rank_follow_the_layouts() -> None:
    graph = decoder(**BIG)
    whole = sw.plan(graph, Cluster("a100-80gb"), batch=8, tp=1)
    split = planned(4, graph)
    share = split.predicted.memory[0].parameters_bytes / whole.predicted.memory[0].parameters_bytes
    assert 0.25 <= share < 0.26


# What a runtime is given -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_realised_links_lead_from_where_a_value_lies_to_where_it_is_read(
    sequence_parallel: bool, tmp_path: Path
) -> None:
    graph = decoder(**{**BIG, "layers": 3})
    plan = planned(4, graph, sequence_parallel=sequence_parallel)
    plan.save(tmp_path / "plan.json")
    units = realise(graph, sw.Plan.load(tmp_path / "plan.json"))
    assert units == realise(graph, plan)
    asked = plan.parameter_layouts("toy")
    name_of = {p.tensor: p.name for p in graph.parameters}
    for unit, of in zip(units, fold(graph).units, strict=True):
        for tensor, layout in unit.parameters:
            assert layout == asked[name_of[tensor]]
        lies = {t: tuple(layout.on(axis) for axis, _ in unit.axes) for t, layout in (*unit.parameters, *unit.enters)}
        for index in range(of.first_op, of.end_op):
            op = graph.ops[index]
            lies |= {t: unit.operand(index, len(op.inputs) + i) for i, t in enumerate(op.outputs)}
        shared = {link.tensor: link for link in unit.links if link.reader is None and not link.leaves}
        for tensor, link in shared.items():
            assert link.before == lies[tensor]
        read = {(link.reader, link.position): link for link in unit.links if link.reader is not None}
        for index in range(of.first_op, of.end_op):
            for position, tensor in enumerate(graph.ops[index].inputs):
                link = read[index, position]
                assert link.tensor == tensor
                assert link.before == (shared[tensor].after if tensor in shared else lies[tensor])
                assert link.after == unit.operand(index, position)


def test_an_edited_layout_is_realised() -> None:
    graph = decoder(**BIG)
    plan = planned(4, graph)
    kept = tuple((slot, layout) for slot, layout in plan.decision.layouts if slot not in ("1/w2", "1/v6", "1/w3"))
    edited = replace(plan, decision=replace(plan.decision, layouts=kept))
    with pytest.raises(PlanError, match=r"the layouts were edited since; call plan\.rebind\(graph\)"):
        realise(graph, edited)
    block = realise(graph, edited.rebind(graph))[1]
    assert {graph.tensors[t].name: layout.is_replicated for t, layout in block.parameters}["h.0.fc"]
    # Every rank holds the weight and computes with a piece of it: the pieces of its gradient are put together.
    work = WorkCounter(graph).count(fold(graph).units[1], 2, "bf16", block)
    gathered = [c.size_bytes for c in work.step_moved if c.kind == "all_gather"]
    assert sorted(gathered)[-2:] == [4 * 1024 * 1024 * 2] * 2
    assert not WorkCounter(graph).count(fold(graph).units[1], 2, "bf16", realise(graph, plan)[1]).step_moved


def test_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="4 units against 5"):
        realise(decoder(**{**BIG, "layers": 3}), planned(4))


# What does not pay -----------------------------------------------------------------------------------------------


def test_a_tensor_axis_across_slow_nodes_is_warned_of_with_figures() -> None:
    cluster = Cluster("a100-80gb", nodes=2, devices_per_node=4, inter_node=Link("slow", 1e9, 5e-5))
    with pytest.warns(PlanWarning, match=r"tp=8 runs across nodes, at .* GB/s: .* ms, and .* ms with tp=4; use tp=4"):
        sw.plan(decoder(**BIG), cluster, batch=8, pp=1, tp=8, dp=1)


def test_a_tensor_axis_that_pays_is_not(recwarn: pytest.WarningsRecorder) -> None:
    planned(4, decoder(**{**BIG, "hidden": 4096}))
    assert not [w for w in recwarn if issubclass(w.category, PlanWarning)]
