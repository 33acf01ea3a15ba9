"""`shardwright convert`: checkpoints in other formats and under the other framework's names, from files alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardwright.core.checkpoint.copied import write_copy
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.checkpoint.translated import COUNTS
from tests.cli.conftest import run
from tests.comparison import Comparison
from tests.core.checkpoint.saved_arrays import SavedArrays, read

NAMES = """
torch_only = ["mask"]

[relations]
"{m...}.weight[out, in]" = "{m...}.kernel[in, out]"
"{m...}.bias" = "{m...}.bias"
"""


def array(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture
def torch_run() -> SavedArrays:
    """The state of a run in PyTorch: a linear layer and AdamW after nine steps."""
    arrays = {"model/up.weight": array(3, 5), "model/up.bias": array(3, seed=1), "model/mask": array(2)}
    for name in ("up.weight", "up.bias"):
        shape = arrays[f"model/{name}"].shape
        arrays |= {f"optimizer0/{key}/{name}": array(*shape, seed=len(key)) for key in ("exp_avg", "exp_avg_sq")}
        arrays[f"optimizer0/step/{name}"] = np.array(9, dtype=np.float32)
    groups = [{"lr": 0.1, "params": ["up.weight", "up.bias"]}]
    told = {"class": "AdamW", "steps": 9, "loss_scale": None, "groups": groups}
    content = {"user": {"epoch": 2}, "steps": 9, "steps_begun": 9, "seed": 5, "ties": {}, "optimizers": [told]}
    return SavedArrays("torch", arrays, content, step=9)


@pytest.fixture
def folder(tmp_path: Path, torch_run: SavedArrays) -> Path:
    """A folder with a checkpoint of that run, and a map of names beside it."""
    write_copy(torch_run, tmp_path, "step_9")
    (tmp_path / "names.toml").write_text(NAMES, encoding="utf-8")
    return tmp_path


def require_equal(found: Any, wanted: dict[str, Any]) -> None:
    comparison = Comparison()
    for label, values in wanted.items():
        comparison.equal({label: read(found, label)}, {label: values})
    comparison.require()


def test_a_run_goes_to_jax_and_back(folder: Path, torch_run: SavedArrays) -> None:
    ran = run("convert", folder, folder / "away", "--to", "jax", "--names", folder / "names.toml")
    assert ran.code == 0, ran.err
    assert "torch checkpoint" in ran.out
    assert "2 weights" in ran.out
    assert "4 states of optimizer0" in ran.out
    away = Reader.open(folder, "away")
    assert (away.framework, away.step) == ("jax", 9)
    content = away.content(lambda name: name)
    assert content["user"] == {"epoch": 2}
    assert content[COUNTS] == {"step": 9, "schedule": 9}
    own = torch_run.arrays
    require_equal(away, {
        "model/up.kernel": own["model/up.weight"].T, "model/up.bias": own["model/up.bias"],
        "optimizer0/exp_avg/up.kernel": own["optimizer0/exp_avg/up.weight"].T,
    })  # fmt: skip
    run("convert", folder / "away", folder / "back", "--to", "torch", "--names", folder / "names.toml")
    back = Reader.open(folder, "back")
    require_equal(back, {label: values for label, values in own.items() if label != "model/mask"})


def test_weights_go_to_safetensors_and_come_from_there(folder: Path, torch_run: SavedArrays) -> None:
    document = run("convert", folder, folder / "hf", "--tag", "step_9", "--to", "safetensors", "--json").document
    assert document["written"] == {"model": 3}
    found = load_file(folder / "hf" / "model.safetensors")
    own = {f"model/{name}": held for name, held in found.items()}
    Comparison().equal(own, {n: held for n, held in torch_run.arrays.items() if n.startswith("model/")}).require()
    run("convert", folder / "hf", folder / "from_hf", "--to", "jax", "--names", folder / "names.toml")
    require_equal(Reader.open(folder, "from_hf"), {"model/up.kernel": torch_run.arrays["model/up.weight"].T})


def test_a_dcp_folder_holds_what_the_checkpoint_does(folder: Path, torch_run: SavedArrays) -> None:
    run("convert", folder, folder / "dcp", "--tag", "step_9", "--to", "dcp")
    run("convert", folder / "dcp", folder / "from_dcp")
    found = Reader.open(folder, "from_dcp")
    require_equal(found, torch_run.arrays)
    assert found.content(lambda name: name)["optimizers"][0]["groups"][0]["lr"] == 0.1


def test_an_orbax_folder_holds_what_the_checkpoint_does(folder: Path, torch_run: SavedArrays) -> None:
    """Where optax.adamw has it; and from there a checkpoint of JAX, and of PyTorch."""
    names = ("--names", folder / "names.toml")
    assert run("convert", folder, folder / "orbax", "--tag", "step_9", "--to", "orbax", *names).code == 0
    assert run("convert", folder / "orbax", folder / "from_orbax", "--to", "jax").code == 0
    own = torch_run.arrays
    found = Reader.open(folder, "from_orbax")
    assert found.step == 9
    require_equal(found, {
        "model/up.kernel": own["model/up.weight"].T, "optimizer0/0.mu/up.kernel": own["optimizer0/exp_avg/up.weight"].T,
        "optimizer0/0.nu/up.bias": own["optimizer0/exp_avg_sq/up.bias"],
    })  # fmt: skip
    assert run("convert", folder / "orbax", folder / "torch", "--to", "torch", *names).code == 0
    require_equal(
        Reader.open(folder, "torch"), {label: values for label, values in own.items() if label != "model/mask"}
    )


WRONG = {
    "no source": (["nowhere", "out"], "no such file or folder"),
    "nothing there": (["empty", "out"], "expected a checkpoint"),
    "no map": ([".", "out", "--to", "jax"], "give --names"),
    "needless map": ([".", "out", "--names", "gpt2"], "leave it out"),
    "target": ([".", "out", "--to", "onnx"], "known: dcp, jax, orbax, safetensors, torch"),
    "map of another": ([".", "out", "--to", "jax", "--names", "gpt2"], "the map of gpt2 has no relation for"),
    "no such map": ([".", "out", "--to", "jax", "--names", "none.toml"], "cannot read the map of names"),
    "there already": ([".", "step_9"], "is a checkpoint already"),
    "tag": ([".", "step 9"], "names a folder"),
    "unknown tag": ([".", "out", "--tag", "step_8"], "did you mean 'step_9'"),
    "tag of a file": (["names.toml", "out", "--tag", "a"], "no folder of checkpoints"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(folder: Path, case: str) -> None:
    (folder / "empty").mkdir()
    (source, target, *more), said = WRONG[case]
    ran = run("convert", folder / source, folder / target, *more)
    assert ran.code == 2
    assert said in ran.err.replace("\n", " ")
    assert not (folder / "out").exists(), "nothing is left of what failed"


def test_a_damaged_file_is_refused_by_name(folder: Path) -> None:
    victim = next((folder / "step_9").glob("model-*"))
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    ran = run("convert", folder, folder / "out", "--to", "jax", "--names", folder / "names.toml")
    assert ran.code == 2
    assert victim.name in ran.err.replace("\n", "")
    assert not (folder / "out").exists()


def test_a_file_of_torch_save_is_a_source(folder: Path) -> None:
    import torch

    torch.save({"up.weight": torch.from_numpy(array(3, 5)), "up.bias": torch.zeros(3)}, folder / "model.pt")
    run("convert", folder / "model.pt", folder / "some", "--to", "jax", "--names", folder / "names.toml")
    require_equal(Reader.open(folder, "some"), {"model/up.kernel": array(3, 5).T})


def test_a_file_of_another_writer_is_a_source(folder: Path) -> None:
    save_file({"up.weight": array(3, 5), "up.bias": array(3)}, folder / "some.safetensors")
    run("convert", folder / "some.safetensors", folder / "some", "--to", "jax", "--names", folder / "names.toml")
    require_equal(Reader.open(folder, "some"), {"model/up.kernel": array(3, 5).T})
