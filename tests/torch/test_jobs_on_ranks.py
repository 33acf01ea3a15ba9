"""Jobs on two ranks: every weight, buffer and state as of training alone, and what ends one job or all."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from shardwright.cli import app
from tests.comparison import Comparison
from tests.torch.launch import Outcome, checks_in, on_ranks, run, without_an_agent
from tests.torch.test_run_jobs import JOBS, MODELS


@pytest.fixture(scope="module")
def launched() -> Outcome:
    return on_ranks("jobs.py", 2, timeout_s=90)


@pytest.mark.parametrize("check", checks_in("jobs.py"))
def test_jobs_on_two_ranks(launched: Outcome, check: str) -> None:
    assert f"ok {check}" in launched.text, launched.text[-6000:]


@pytest.mark.slow  # three interpreters, and a wait until nothing is heard any more
@pytest.mark.parametrize("how", ["exit", "stuck"])
def test_ranks_stop_by_name_where_one_is_gone(how: str) -> None:
    found = without_an_agent("jobs_dying.py", how)
    assert found.codes == [3, 3], found.texts
    for text in found.texts:
        assert "rank 2" in text[text.index("PeerError") :], text[-3000:]
    assert found.seconds < 60.0


@pytest.mark.slow  # four interpreters
def test_the_command_starts_a_process_for_each_device(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    file, plan = tmp_path / "jobs.toml", tmp_path / "jobs.json"
    command = [sys.executable, "-m", "shardwright", "jobs", "run", str(file), "--plan", str(plan), "--json"]
    losses, weights = [], []
    for devices in (1, 2):
        file.write_text(JOBS.format(tmp_path / str(devices)), encoding="utf-8")
        planned = ["jobs", "plan", str(file), "--cluster", "cpu", "--devices-per-node", str(devices), "-o", str(plan)]
        assert CliRunner().invoke(app, planned).exit_code == 0
        ran = run(command, timeout_s=60) if devices > 1 else CliRunner().invoke(app, command[3:])
        text = ran.text if isinstance(ran, Outcome) else ran.stdout
        found = json.loads(text[text.index("{\n") : text.rindex("}") + 1])["jobs"]
        assert [own["failure"] for own in found.values()] == ["", "", ""], text
        losses.append({name: own["losses"] for name, own in found.items()})
        weights.append(
            {name: load_file(tmp_path / str(devices) / "runs" / name / "model.safetensors") for name in ("a", "b")}
        )
    compared = Comparison("jobs run").losses(losses[1], losses[0])
    compared.values(weights[1], weights[0], relative=1e-4, absolute=1e-6, what="weights").require()
