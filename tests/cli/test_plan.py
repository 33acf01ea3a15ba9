"""`shardwright plan`: models in both frameworks, clusters by name and by file, and what it says to bad input."""

import json
import sys
from pathlib import Path

import pytest

import shardwright as sw
from tests.cli.conftest import run

FOUR = ("--cluster", "a100-80gb", "--devices-per-node", 4, "--batch", 16)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_model_is_planned_and_saved(models: Path, tmp_path: Path, framework: str) -> None:
    saved = tmp_path / "plan.json"
    ran = run("plan", f"{models}/{framework}_models.py:with_loss", *FOUR, "--pp", 2, "--dp", 2, "-o", saved)
    assert ran.code == 0, ran.err
    plan = sw.Plan.load(saved)
    assert (plan.decision.pp, plan.decision.dp, plan.decision.tp, plan.decision.batch) == (2, 2, 1, 16)
    assert plan.provenance.captured_from == framework
    assert "pp 2 × dp 2 × tp 1" in ran.out
    assert f"saved to {saved}\n" in ran.out
    assert "made by with_loss" not in ran.out


def test_every_option_reaches_the_plan(models: Path) -> None:
    ran = run(
        "plan", f"{models}/torch_models.py:with_scalar_output", "--cluster", "h100", "--nodes", 2,
        "--devices-per-node", 4, "--batch", 32, "--pp", 2, "--tp", 1, "--dp", 4, "--microbatch", 2, "--schedule",
        "gpipe", "--recompute", "full", "--shard", 1, "--precision", "fp32", "--optimizer", "sgd", "--loss-scope",
        "global", "--gradient-precision", "fp32", "--stage-starts", "0, 1", "--no-sequence-parallel", "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.out
    decision = ran.document["decision"]
    given = {
        "pp": 2, "tp": 1, "dp": 4, "batch": 32, "microbatch": 2, "schedule": "gpipe", "recompute": "full", "shard": 1,
        "precision": "fp32", "optimizer": "sgd", "loss_scope": "global", "virtual_stages": 1,
        "gradient_precision": "fp32", "stage_starts": [0, 1], "sequence_parallel": False,
    }  # fmt: skip
    assert {name: decision[name] for name in given} == given
    assert ran.document["provenance"]["world_size"] == 8


def test_virtual_stages(models: Path) -> None:
    ran = run(
        "plan", f"{models}/torch_models.py:with_loss", "--cluster", "cpu", "--devices-per-node", 2, "--batch", 8,
        "--pp", 2, "--microbatch", 1, "--schedule", "interleaved-1f1b", "--virtual-stages", 2, "--json",
    )  # fmt: skip
    assert ran.code == 0, ran.out
    assert len(ran.document["decision"]["stage_starts"]) == 4


def test_json_on_stdout_is_a_plan_file(models: Path, tmp_path: Path) -> None:
    ran = run("plan", f"{models}/torch_models.py:with_loss", *FOUR, "--json")
    again = tmp_path / "again.json"
    again.write_text(ran.out)
    assert sw.Plan.load(again).decision.batch == 16
    assert "made by with_loss" in ran.err  # what a model prints must not get into the JSON


def test_a_cluster_file(models: Path, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    sw.Cluster("h200", nodes=2, devices_per_node=2).save(path)
    model = f"{models}/torch_models.py:with_loss"
    ran = run("plan", model, "--cluster", path, "--batch", 16, "--json")
    assert ran.document["provenance"]["cluster"] == "2 × 2 h200"
    twice = run("plan", model, "--cluster", path, "--nodes", 4, "--batch", 16)
    assert twice.code == 2
    assert "leave out --nodes" in twice.flat_err


def test_a_hardware_profile_file(models: Path, tmp_path: Path) -> None:
    import shardwright.core.cluster.hardware as hardware

    own = (Path(hardware.__file__).parent / "profiles" / "h100.toml").read_text().replace('"h100"', '"mine"')
    path = tmp_path / "mine.toml"
    path.write_text(own)
    ran = run("plan", f"{models}/torch_models.py:with_loss", "--cluster", path, "--nodes", 2, "--batch", 4, "--json")
    assert ran.code == 0, ran.out
    assert ran.document["provenance"]["cluster"] == "2 × 1 mine"


BAD = [
    (["--cluster", "a100-80g", "--batch", 16], "did you mean 'a100-80gb'?"),
    (["--cluster", "nowhere.toml", "--batch", 16], "nowhere.toml"),
    (["--cluster", "cpu", "--nodes", 0, "--batch", 16], "nodes must be an integer of at least 1"),
    ([*FOUR, "--schedule", "1f1"], "did you mean '1f1b'?"),
    ([*FOUR, "--recompute", "selektive"], "did you mean 'selective'?"),
    ([*FOUR, "--precision", "fp8x"], "precision='fp8x'"),
    ([*FOUR, "--optimizer", "adanw"], "did you mean 'adamw'?"),
    ([*FOUR, "--loss-scope", "globl"], "did you mean 'global'?"),
    ([*FOUR, "--pp", 2, "--stage-starts", "0;1"], "--stage-starts '0;1': expected whole numbers with commas"),
    ([*FOUR, "--stage-starts", "0,1"], "stage_starts are given without pp"),
    ([*FOUR, "--sequence-parallel", "--tp", 1], "sequence_parallel=True and tp=1"),
    ([*FOUR, "--pp", 3], "the degrees must divide 4; nearest for pp: 4"),
    ([*FOUR, "--pp", 2, "--dp", 2, "--tp", 2], "the degrees must multiply to 4"),
    (["--cluster", "cpu", "--devices-per-node", 4, "--batch", 10, "--dp", 4], "batch=10 is not a multiple of dp = 4"),
    (["--cluster", "cpu", "--batch", 0], "batch=0"),
    ([*FOUR, "-o", "no/such/folder/plan.json"], "there is no folder no/such/folder"),
]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("options", "said"), BAD)
def test_bad_options_are_one_clear_message(models: Path, options: list[object], said: str, as_json: bool) -> None:
    ran = run("plan", f"{models}/torch_models.py:with_loss", *options, *(["--json"] if as_json else []))
    assert ran.code == 2
    if as_json:
        assert said in ran.document["error"]["message"]
    else:
        assert ran.out == ""
        assert said in ran.flat_err
        assert "error: " in ran.err
        assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("torch_models.py", "a model is FILE.py:FUNCTION"),
        ("torch_model.py:with_loss", "torch_models.py'? known:"),
        ("torch_models.py:with_los", "did you mean 'with_loss'?"),
        ("torch_models.py:torch", "is a module, not a function"),
        ("torch_models.py:no_pair", "returned a Net: expected (model, sample) or (model, sample, loss)"),
        ("torch_models.py:loss_is_no_function", "a loss that is a float, not a function"),
        ("torch_models.py:no_model", "a str is not a model"),
        ("torch_models.py:broken", "RuntimeError: no weights here"),
        ("torch_models.py:leaves", "SystemExit: usage: train.py --data DIR"),
        ("torch_models.py:needs_size", "needs size: a model function is called without arguments"),
        ("does_not_parse.py:model", "SyntaxError"),
        ("does_not_import.py:model", "No module named 'a_module_that_is_not_there'"),
    ],
)
def test_bad_models_are_one_clear_message(models: Path, target: str, said: str) -> None:
    ran = run("plan", f"{models}/{target}", *FOUR)
    assert ran.code == 2
    assert ran.out == ""
    assert said in ran.flat_err
    assert "Traceback" not in ran.err


def test_a_failing_model_says_where(models: Path) -> None:
    line = next(i for i, text in enumerate((models / "torch_models.py").read_text().splitlines(), 1) if "raise" in text)
    assert f"line {line})" in run("plan", f"{models}/torch_models.py:broken", *FOUR).flat_err
    assert "line 2)" in run("plan", f"{models}/does_not_import.py:model", *FOUR).flat_err


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_missing_framework_is_named_with_its_extra(
    models: Path, monkeypatch: pytest.MonkeyPatch, framework: str
) -> None:
    monkeypatch.setitem(sys.modules, framework, None)  # how Python marks a module that is not to be imported
    ran = run("plan", f"{models}/{framework}_models.py:with_loss", *FOUR)
    assert ran.code == 2
    assert f"pip install 'shardwright[{framework}]'" in ran.flat_err


def test_a_model_that_does_not_fit_says_by_how_much(models: Path, tmp_path: Path) -> None:
    source = (models / "torch_models.py").read_text().replace("Linear(16, 16)", "Linear(65536, 65536, device='meta')")
    path = tmp_path / "big.py"
    path.write_text(source.replace("torch.zeros(2, 16)", "torch.zeros(2, 65536, device='meta')"))
    ran = run("plan", f"{path}:with_loss", "--cluster", "v100", "--batch", 4)
    assert ran.code == 2
    assert "does not fit" in ran.flat_err
    assert "GiB more than the" in ran.flat_err


def test_a_wrong_option_is_json_too() -> None:
    ran = run("plan", "a.py:b", "--cluster", "cpu", "--batch", "many", "--json")
    assert ran.code == 2
    assert "--batch" in ran.document["error"]["message"]


def test_the_bar_is_for_what_takes_long() -> None:
    import io
    import time

    from rich.console import Console

    from shardwright.commands.progress import DelayedProgress

    def shown(seconds: float) -> str:
        console = Console(file=io.StringIO(), force_terminal=True, width=80)
        with DelayedProgress(delay_s=0.2, console=console) as bar:
            bar.stage("searching")
            bar.update(3, 4)
            time.sleep(seconds)
        written = console.file
        assert isinstance(written, io.StringIO)
        return written.getvalue()

    assert "searching" not in shown(0.0)
    assert "searching" in shown(0.6)


def test_models_can_import_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "sizes_beside.py").write_text("WIDTH = 16\n")
    (tmp_path / "model.py").write_text(
        "import torch\nfrom sizes_beside import WIDTH\n"
        "def model():\n    return torch.nn.Linear(WIDTH, 1), torch.zeros(2, WIDTH), lambda y: y.mean()\n"
    )
    before = list(sys.path)
    ran = run("plan", f"{tmp_path}/model.py:model", "--cluster", "cpu", "--batch", 2, "--json")
    sys.path[:] = before
    assert ran.code == 0, ran.out
    assert json.loads(ran.out)["model"]["parameter_count"] == 17
