"""`shardwright rescore`: edits of a plan file and by `--set`, counted anew or refused."""

import json
import warnings
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.core.errors import PlanWarning
from shardwright.core.layout.placements import Layout, Split
from tests.cli.conftest import run


def test_an_edited_file_is_counted_anew_and_saved(plans: dict[str, Path], tmp_path: Path) -> None:
    document = json.loads(plans["pipeline"].read_text())
    document["decision"]["microbatch"] = 4
    path, counted = tmp_path / "edited.json", tmp_path / "counted.json"
    path.write_text(json.dumps(document))
    with pytest.warns(PlanWarning, match="microbatch 2 → 4"):
        shown, simulated = run("show", path), run("simulate", path, "--json").document
    assert shown.out.count("before the edit") >= 3
    assert simulated["makespan_s"] == run("simulate", plans["pipeline"], "--json").document["makespan_s"]
    assert "before it was edited" in simulated["note"]
    with pytest.warns(PlanWarning):
        compared = run("compare", plans["pipeline"], path, "--json").document
    assert "microbatch 2 → 4" in compared["notes"][0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ran = run("rescore", path, "-o", counted)
        assert ran.code == 0
        assert f"saved to {counted}" in ran.out
        assert "before the edit" not in run("show", counted).out
        assert run("compare", plans["pipeline"], counted, "--json").document["notes"] == []
        assert sw.Plan.load(counted) == sw.rescore(sw.Plan.load(plans["pipeline"]), microbatch=4)
        assert run("simulate", counted, "--json").document["note"] is None


def test_changes_by_name(plans: dict[str, Path]) -> None:
    before = sw.Plan.load(plans["tensor"])
    texts = ["microbatch=4", "recompute=full", "kept_units=1,2", "shard_group=null", "layouts.1/w2=S0",
             "placement_order=DPT"]  # fmt: skip
    ran = run("rescore", plans["tensor"], "--json", *(word for text in texts for word in ("--set", text)))
    assert ran.code == 0, ran.out
    expected = sw.rescore(
        before, microbatch=4, recompute="full", kept_units=[1, 2], shard_group=None, placement_order="DPT",
        layouts={"1/w2": Layout.of(tp=Split(0))},
    )  # fmt: skip
    assert ran.document["predicted"]["step_time_s"] == expected.predicted.step_time_s
    assert ran.document["decision"]["layouts"]["1/w2"] == {"tp": {"split": 0}}
    assert ran.document["decision"]["kept_units"] == [1, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("microbach=2", "did you mean 'microbatch'"),
        ("microbatch", "expected NAME=VALUE"),
        ("microbatch=two", "microbatch='two': expected a whole number"),
        ("stage_starts=0,x", "expected whole numbers with commas"),
        ("sequence_parallel=yes", "expected True or False"),
        ("layouts=S0", "one slot at a time"),
        ("layouts.9/w9=S0", "slot '9/w9', which the model lacks"),
        ("layouts.1/w0=Q", "Q"),
        ("pp=4", "are 16 ranks, and the plan is for the 4 devices"),
    ],
)
def test_a_change_that_cannot_be_is_refused(plans: dict[str, Path], text: str, said: str) -> None:
    ran = run("rescore", plans["tensor"], "--set", text)
    assert ran.code == 2
    assert said in ran.flat_err
    document = run("rescore", plans["tensor"], "--set", text, "--json").document
    assert said in document["error"]["message"]


def test_a_change_is_given_once(plans: dict[str, Path]) -> None:
    ran = run("rescore", plans["tensor"], "--set", "microbatch=2", "--set", "microbatch=4")
    assert (ran.code, "given twice" in ran.flat_err) == (2, True)
