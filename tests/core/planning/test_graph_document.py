"""The captured graph in plan files: what is repeated stands once, and the same graph comes back."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.core.errors import CaptureError, PlanError
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.model.graph import Footprint, Graph, KeptTwice, UnitMemory
from shardwright.core.model.graph_document import GraphDocument, documents_of, graph_of
from shardwright.core.model.op_memory import OpBytes, OpMemory
from shardwright.core.model.repeated_rows import MOST_ROWS, Run, folded, unfolded
from shardwright.core.plan.sections import from_section, section_of, to_section
from tests.core.toy import decoder

ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=8)


@given(st.lists(st.tuples(ROWS, st.integers(1, 5), st.integers(0, 2)), max_size=4))
def test_rows_come_back(blocks: list[tuple[list[tuple[int, ...]], int, int]]) -> None:
    rows = [
        (form, first + time * step, second + time * time)
        for block, times, step in blocks
        for time in range(times)
        for form, first, second in block
    ]
    assert unfolded(folded(rows), "rows") == rows


@given(st.integers(3, 40), st.integers(1, 6), st.integers(-1, 3))
def test_repeated_rows_stand_once(times: int, length: int, step: int) -> None:
    rows = [(place, 100 + time * step, 7) for time in range(times) for place in range(length)]
    runs = folded(rows)
    assert runs == (Run(times, tuple(rows[:length]), ((step, 0),) * length),)
    assert unfolded(runs, "rows") == rows


def full(layers: int) -> Graph:
    """A graph in which no field is empty."""
    graph = decoder(layers=layers)
    line = (3, 5)
    own = Footprint(line, line, (line, line), 0.5, line, line, (line,), (line, line))
    both = KeptTwice(0, 1, line, line)
    inner = replace(graph, model_name="in 16 bits")
    return replace(
        graph,
        pins=(Pin("wte.weight", Layout.of(tp=Split(0, (32, 32))), "a mark", ("tp",)),),
        logical_axes=(("wte.weight", ("vocab", None)),),
        unit_memory=lambda narrow: UnitMemory((own, own), (both, both)) if narrow else UnitMemory((own,), (both,)),
        in_16_bits=inner,
    )


def test_every_field_of_a_graph_comes_back_through_a_file() -> None:
    graph = full(4)
    empty = [f.name for f in fields(Graph) if f.init and not getattr(graph, f.name)]
    assert not empty, "what is empty is not tested"
    back = []
    for document in documents_of(graph):
        section = section_of(GraphDocument).model_validate_json(json.dumps(to_section(document)))
        back.append(from_section(section, GraphDocument))
    assert repr(back) == repr(list(documents_of(graph)))
    found = graph_of(back)
    for field in fields(Graph):
        if field.name != "unit_memory":
            assert getattr(found, field.name) == getattr(graph, field.name), field.name
    for precision in ("fp32", "bf16"):
        assert found.footprints_of(precision) == graph.footprints_of(precision)
        assert found.kept_twice_of(precision) == graph.kept_twice_of(precision)
    assert found.producer == graph.producer


def test_a_deep_model_takes_no_more_room_than_a_shallow_one() -> None:
    sizes = [len(json.dumps(to_section(GraphDocument.of(decoder(layers=layers))))) for layers in (8, 400)]
    assert sizes[1] < 1.02 * sizes[0] < 12_000
    assert len(decoder(layers=400).ops) > 40 * len(decoder(layers=8).ops)


@pytest.mark.parametrize("name", ["", "a.0.b", "a{}", "{0}", "layer01.x", "7", "}{", "h.10.20", "9" * 30, "{{}}"])
def test_names_with_numbers_and_braces_come_back(name: str) -> None:
    graph = decoder(layers=1)
    renamed = replace(graph, calls=(graph.calls[0], replace(graph.calls[1], path=name), *graph.calls[2:]))
    assert GraphDocument.of(renamed).graph() == renamed


def _with(**values: Any) -> Callable[[GraphDocument], GraphDocument]:
    return lambda document: replace(document, **values)


BAD: dict[str, tuple[Callable[[GraphDocument], GraphDocument], str]] = {
    "too many rows": (_with(tensors=(Run(MOST_ROWS, ((0,), (0,)), ((), ())),)), f"expected at most {MOST_ROWS}"),
    "no steps": (_with(ops=(Run(2, ((0, 1, 2, 3),)),)), "2 times without steps"),
    "too few steps": (_with(ops=(Run(2, ((0, 1, 2, 3),), ((1,),)),)), "a step for each number"),
    "below 0": (_with(calls=(Run(9, ((0, 0, 0),), ((-1, 0),)),)), "falls below 0"),
    "an empty row": (_with(calls=(Run(1, ((),)),)), "a row without numbers"),
    "an unknown form": (_with(ops=(Run(1, ((99, 0),)),)), "row 0 has form 99"),
    "a later parent": (_with(calls=(Run(1, ((0, 5, 0),)),)), "inside call 5, which comes later"),
    "a call without parent": (_with(calls=(Run(1, ((0,),)),)), "expected 2 or more"),
    "no calls": (_with(calls=()), "ran in call 1, and there are 0"),
    "names without numbers": (_with(parameters=(Run(1, ((1, 0),)),)), "with 0 numbers, expected"),
    "a parameter that is an activation": (
        lambda d: replace(d, parameters=(Run(1, ((0, len(unfolded(d.tensors, "")) - 1),)),)),
        "is no parameter",
    ),
    "a tensor that is not there": (_with(inputs=(10**9,)), "name tensor 1000000000"),
    "a huge dim": (
        lambda d: replace(d, tensor_forms=(replace(d.tensor_forms[0], fixed=(1 << 50, 8)), *d.tensor_forms[1:])),
        "more than",
    ),
    "a dim below 0": (
        lambda d: replace(d, tensor_forms=(replace(d.tensor_forms[0], fixed=(-2, 8)), *d.tensor_forms[1:])),
        "fewer than 0",
    ),
    "an unknown dtype": (
        lambda d: replace(d, tensor_forms=(replace(d.tensor_forms[0], dtype="float33"), *d.tensor_forms[1:])),
        "float33",
    ),
    "a label below -1": (
        lambda d: replace(d, op_forms=(replace(d.op_forms[0], labels=((-5,),)), *d.op_forms[1:])),
        "label below -1",
    ),
    "a role of no label": (
        lambda d: replace(d, op_forms=(replace(d.op_forms[0], special=((77, "sum"),)), *d.op_forms[1:])),
        "gives label 77 a role",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_tables_of_no_graph_are_refused(what: str) -> None:
    spoil, said = BAD[what]
    with pytest.raises((PlanError, CaptureError), match=said):
        spoil(GraphDocument.of(decoder(layers=2))).graph()


def test_a_plan_counted_from_its_tables_is_the_plan() -> None:
    graph = full(3)
    back = graph_of(documents_of(graph))
    cluster = sw.Cluster("cpu", devices_per_node=2)
    bare = [replace(g, unit_memory=None, in_16_bits=None) for g in (graph, back)]
    plans = [sw.plan(g, cluster, batch=8, pp=1, dp=1, tp=2) for g in bare]
    assert plans[0] == plans[1]


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (OpMemory(keeps=(99,)), "names an operand or result"),
        (OpMemory(keeps=(-1,)), "names an operand or result"),
        (OpMemory(unmade=(99,)), "names an operand or result"),
        (OpMemory(handed_on=(-1,)), "names an operand or result"),
        (OpMemory(weightless=(1,)), "gives a result the place of an input"),
        (OpMemory(wide=OpBytes(kept=(10**400, 0))), "has more than"),
        (OpMemory(narrow=OpBytes(backward=(-(10**30), 0))), "has more than"),
        (OpMemory(wide=OpBytes(kept=(-1000, 0))), "keeps fewer than 0 bytes"),
        (OpMemory(wide=OpBytes(kept=(1000, -1))), "keeps fewer than 0 bytes"),
    ],
)
def test_memory_that_no_op_has_is_refused(memory: OpMemory, said: str) -> None:
    graph = decoder(layers=1)
    number = next(n for n, op in enumerate(graph.ops) if len(op.inputs) == 1 and op.kind == "elementwise")
    ops = list(graph.ops)
    ops[number] = replace(ops[number], memory=OpMemory(keeps=(0,), wide=OpBytes(kept=(0, 4))))
    assert graph_of(documents_of(replace(graph, ops=tuple(ops)))).ops == tuple(ops)
    ops[number] = replace(ops[number], memory=memory)
    with pytest.raises(PlanError, match=said):
        graph_of(documents_of(replace(graph, ops=tuple(ops))))
