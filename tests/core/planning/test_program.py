"""The program of a plan on the tensor axis: what each op reads and makes is in the file, and stays what it was."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright import Cluster, Split
from shardwright.core.errors import LayoutError, PlanError, PlanFileError
from shardwright.core.layout.placements import Partial, Placement, Replicate, placement_of
from shardwright.core.layout.signature import Signature
from shardwright.core.model.fold import fold
from shardwright.core.model.structure import structure_of
from shardwright.core.plan.program import Conversion, Placed
from shardwright.core.plan.realised_layouts import digest, program_for, realise
from shardwright.core.solver.op_prices import Prices
from tests.core.toy import decoder

BIG = {"layers": 3, "hidden": 1024, "heads": 16, "vocabulary": 32000, "sequence": 512}


def planned(tp: int = 4, graph: sw.Graph | None = None, **pins: object) -> sw.Plan:
    cluster = Cluster("a100-80gb", devices_per_node=tp)
    return sw.plan(graph or decoder(**BIG), cluster, batch=8, pp=1, tp=tp, dp=1, **pins)


def saved(plan: sw.Plan, folder: Path) -> sw.Plan:
    plan.save(folder / "plan.json")
    return sw.Plan.load(folder / "plan.json")


def with_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of the solver: moving data costs nothing, and computing a thousandth."""
    monkeypatch.setattr(Prices, "edge_s", lambda *_: 0.0)
    own = Prices.seconds
    monkeypatch.setattr(Prices, "seconds", lambda self, op, chosen: own(self, op, chosen) / 1000)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_plan_file_keeps_its_program_when_the_solver_changes_its_mind(
    sequence_parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = decoder(**BIG)
    plan = planned(graph=graph, sequence_parallel=sequence_parallel)
    before = digest(realise(graph, plan))
    loaded = saved(plan, tmp_path)
    with_prices(monkeypatch)
    assert digest(realise(graph, loaded)) == before
    structure, _ = structure_of(fold(graph))
    assert program_for(graph, structure, plan.decision, plan.costs.rates) != plan.programs[0][1]


def test_what_is_read_from_a_file_is_what_was_written(tmp_path: Path) -> None:
    plan = planned()
    assert saved(plan, tmp_path).programs == plan.programs
    text = (tmp_path / "plan.json").read_text()
    found = json.loads(text)["programs"]["toy"]
    assert found["units"] == [0, 1, 1, 1, 2]
    assert re.fullmatch(
        r"S2\[1024\|1024\|1024\], S0\[1024\|1024\|1024\] → S2\[1024\|1024\|1024\]", found["forms"][1]["ops"][4]
    )


def test_one_rank_on_the_tensor_axis_has_no_program() -> None:
    assert sw.plan(decoder(), Cluster("cpu"), batch=8, tp=1).programs == ()


places = st.one_of(
    st.just(Replicate()),
    st.builds(Partial, st.sampled_from(["sum", "max", "min", "mean"])),
    st.builds(Split, st.integers(0, 9)),
    st.builds(Split, st.integers(0, 9), st.lists(st.integers(1, 5000), min_size=2, max_size=4).map(tuple)),
)
numbers = st.integers(0, 999_999_999)
pairs = st.tuples(places, places)


@given(places)
def test_placements_are_read_back(place: Placement) -> None:
    assert placement_of(str(place)) == place


@given(
    st.lists(places, max_size=4).map(tuple),
    st.lists(places, max_size=3).map(tuple),
    st.sampled_from(["", "offset", "combine"]),
)
def test_signatures_are_read_back(inputs: tuple[Placement, ...], outputs: tuple[Placement, ...], need: str) -> None:
    signature = Signature(inputs, outputs, need)  # type: ignore[arg-type]
    assert Signature.parse(str(signature)) == signature


@given(numbers, st.one_of(st.tuples(numbers, numbers), st.just((None, 0))), pairs, st.none() | pairs, st.booleans())
def test_conversions_are_read_back(
    tensor: int,
    reader: tuple[int | None, int],
    value: tuple[Placement, Placement],
    gradient: tuple[Placement, Placement] | None,
    leaves: bool,
) -> None:
    conversion = Conversion(tensor, *reader, value, gradient, leaves and reader[0] is None)
    assert Conversion.parse(str(conversion)) == conversion
    assert Placed.parse(str(Placed(tensor, value[0]))) == Placed(tensor, value[0])


@pytest.mark.parametrize("text", ["", "S", "S-1", "Q", "S0[3]", "P(product)", "S0[0|1]", "R → R", "S0[|]", "S٣"])
def test_what_is_no_placement_is_refused(text: str) -> None:
    with pytest.raises(LayoutError):
        placement_of(text)


# Other models, other plans ---------------------------------------------------------------------------------------


def test_another_length_of_sequence_runs_the_same_program(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, shorter = planned(), decoder(**{**BIG, "sequence": 384})
    expected = [unit.signatures for unit in realise(decoder(**BIG), plan)]
    with_prices(monkeypatch)
    assert [unit.signatures for unit in realise(shorter, plan)] == expected


def another_version(plan: sw.Plan) -> sw.Plan:
    return replace(plan, provenance=replace(plan.provenance, shardwright="0.0.1"))


def test_a_length_that_the_ranks_do_not_divide_is_laid_out_anew_by_the_same_version_alone() -> None:
    plan, odd = planned(sequence_parallel=True), decoder(**{**BIG, "sequence": 510})
    assert len(realise(odd, plan)) == 5
    said = (
        r"unit 0 .*runs other ops than were planned, or at sizes that do not divide: it is laid out .* otherwise than "
        r"0\.0\.1, which made the plan: call plan\.rebind\(graph\)"
    )
    with pytest.raises(PlanError, match=said):
        realise(odd, another_version(plan))
    assert len(realise(odd, another_version(plan).rebind(odd))) == 5


def test_a_plan_of_another_version_runs_the_ops_that_it_was_made_for() -> None:
    graph = decoder(**BIG)
    plan = planned(graph=graph)
    assert realise(graph, another_version(plan)) == realise(graph, plan)


def test_the_twin_in_another_framework_has_a_program_of_its_own() -> None:
    graph = decoder(**BIG)
    plan, other = planned(graph=graph), decoder(**BIG, transposed=True)
    other = replace(other, capabilities=replace(graph.capabilities, framework="other"))
    with pytest.raises(PlanError, match=r"how toy runs on the tensor axis, and not how other does: call plan\.rebind"):
        realise(other, plan)
    both = plan.rebind(other)
    assert [name for name, _ in both.programs] == ["other", "toy"]
    assert realise(graph, both) == realise(graph, plan)
    assert {p.tensor: both.parameter_layouts("other")[p.name] for p in other.parameters} == {
        tensor: layout for unit in realise(other, both) for tensor, layout in unit.parameters
    }


# Edits -----------------------------------------------------------------------------------------------------------


def edit(change: Callable[[dict], None], folder: Path) -> Path:
    """The file of a plan after a change by hand."""
    planned().save(folder / "plan.json")
    document = json.loads((folder / "plan.json").read_text())
    change(document)
    (folder / "plan.json").write_text(json.dumps(document))
    return folder / "plan.json"


def op(document: dict, text: str) -> None:
    document["programs"]["toy"]["forms"][1]["ops"][3] = text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda d: op(d, "R, R → R"),
            r"programs: digest: '\w+' does not belong to this program .* plan\.rebind\(graph\)",
        ),
        (lambda d: op(d, "R, Q → R"), r"programs: 'Q' is no placement: expected R"),
        (lambda d: op(d, "R"), r"programs: 'R' is no signature"),
        (
            lambda d: d["programs"]["toy"]["forms"][0]["conversions"].append("no"),
            r"programs: 'no': expected a conversion",
        ),
        (lambda d: d["programs"]["toy"]["units"].pop(), r"programs"),
        (
            lambda d: d["programs"]["toy"]["units"].__setitem__(0, 7),
            r"programs: units: names a form that the 3 in forms",
        ),
        (lambda d: d["programs"].update(mine=d["programs"].pop("toy")), r"programs: 'mine' is not among the bindings"),
        (lambda d: d.pop("programs"), r"programs: Field required"),
    ],
)
def test_a_program_that_was_edited_is_refused(change: Callable[[dict], None], said: str, tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=said):
        sw.Plan.load(edit(change, tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"sequence_parallel": True},
            r"was made for sequence_parallel=False, and the decision has True: call plan\.reb",
        ),
        ({"layouts": ()}, r"was made for wte\.weight at S0 .* has R: the layouts were edited since; call plan\.rebind"),
    ],
)
def test_a_decision_that_was_edited_needs_another_program(change: dict, said: str) -> None:
    graph = decoder(**BIG)
    plan = planned(graph=graph)
    edited = replace(plan, decision=replace(plan.decision, **change))
    with pytest.raises(PlanError, match=said):
        realise(graph, edited)
    assert realise(graph, edited.rebind(graph)) != realise(graph, plan)
