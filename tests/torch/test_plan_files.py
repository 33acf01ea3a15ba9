"""A plan file trains the identical program whatever the solver has come to think since."""

import json
from pathlib import Path

import shardwright as sw
from tests.torch.launch import on_ranks, single


def test_a_plan_file_runs_the_same_program_after_a_change_of_prices(tmp_path: Path) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "out.json"
    made = single("plan_files.py", str(file), timeout_s=60)
    assert made.code == 0, made.text[-4000:]
    outcome = on_ranks("plan_files.py", 2, str(file), str(out), timeout_s=120)
    assert outcome.code == 0, outcome.text[-4000:]
    ranks = json.loads(out.read_text())
    assert len({run["layouts"] for rank in ranks for run in rank}) == 1
    planned = dict(sw.Plan.load(file).programs)["torch"].digest
    for before, after in ranks:
        assert before["losses"] == after["losses"]
        assert before["solved"] == planned != after["solved"]
