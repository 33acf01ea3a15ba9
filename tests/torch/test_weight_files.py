"""Weights from files and folders of every kind, and what is said of those that are none."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shardwright.backends.torch.state.dcp_writer import write_dcp
from shardwright.backends.torch.state.ownership import Ownership, Placement
from shardwright.backends.torch.state.plain_states import saved_state
from shardwright.backends.torch.state.saved_parts import read_whole
from shardwright.backends.torch.state.weight_files import FileWeights, opened, read_part
from shardwright.backends.torch.state.weights import NamedWeights, materialize
from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint.boxes import Box, Part
from shardwright.core.checkpoint.folder import Piece
from shardwright.core.checkpoint.safetensors_folder import INDEX, SafetensorsModel, write_safetensors_folder
from shardwright.core.errors import CheckpointError, PlanError, ShardwrightError
from shardwright.core.layout.placements import Split
from tests.comparison import Comparison

Weights = dict[str, torch.Tensor]


class Tied(nn.Module):
    """A model whose head is its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight


def model_weights() -> Weights:
    torch.manual_seed(3)
    return {name: value.clone() for name, value in Tied().state_dict().items() if name != "head.weight"}


def in_one_file(path: Path, weights: Weights) -> Path:
    save_file(weights, path / "weights.safetensors")
    return path / "weights.safetensors"


def in_indexed_files(path: Path, weights: Weights) -> Path:
    write_safetensors_folder(saved_state(weights), path / "hub", 100)
    assert (path / "hub" / INDEX).is_file()
    return path / "hub"


def by_an_index(path: Path, weights: Weights) -> Path:
    return in_indexed_files(path, weights) / INDEX


def in_a_folder_with_one_file(path: Path, weights: Weights) -> Path:
    write_safetensors_folder(saved_state(weights), path / "hub")
    return path / "hub"


def in_a_file_of_another_name(path: Path, weights: Weights) -> Path:
    in_one_file(path, weights)
    return path


def by_torch_save(path: Path, weights: Weights) -> Path:
    torch.save(weights, path / "weights.pt")
    return path / "weights.pt"


def in_pickled_files(path: Path, weights: Weights) -> Path:
    names = list(weights)
    parts = {"pytorch_model-1.bin": names[:2], "pytorch_model-2.bin": names[2:]}
    for file, held in parts.items():
        torch.save({name: weights[name] for name in held}, path / file)
    named = {name: file for file, held in parts.items() for name in held}
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": named}))
    return path


def in_one_pickled_file(path: Path, weights: Weights) -> Path:
    torch.save(weights, path / "pytorch_model.bin")
    return path


def by_dcp(path: Path, weights: Weights) -> Path:
    write_dcp(saved_state(weights), path / "dcp")
    return path / "dcp"


def checkpoint(path: Path, weights: Weights, tag: str) -> None:
    """A checkpoint in which every tensor lies in two pieces, where it has two rows."""
    save = folders.begin(path, tag)
    state = saved_state(weights)
    pieces = []
    for name in weights:
        told = state.tensor(f"model/{name}")
        rows = told.shape[0] if told.shape else 0
        halves = [(0, rows // 2), (rows // 2, rows)] if rows > 1 else [(0, rows)]
        for first, end in halves:
            box = Box((first, *(0,) * (len(told.shape) - 1)), (end - first, *told.shape[1:])) if rows else Box((), ())
            (held,) = (data for _, data in state.boxes(f"model/{name}", box))
            pieces.append(Piece(name, told.dtype, told.shape, box, lambda held=held: held))  # type: ignore[misc]
    folders.write_rank(save, 0, {"model": pieces})
    content = {"ties": {"head.weight": "table.weight"}, "user": [{"$tensor": "user/0"}]}
    folders.publish(save, 1, 5, step=2, framework="torch", content=content, plan=None, keep=None)


def in_the_newest_checkpoint(path: Path, weights: Weights) -> Path:
    checkpoint(path, {name: torch.zeros_like(value) for name, value in weights.items()}, "step_1")
    checkpoint(path, weights, "step_2")
    return path


def in_one_checkpoint(path: Path, weights: Weights) -> Path:
    checkpoint(path, weights, "step_1")
    checkpoint(path, {name: torch.zeros_like(value) for name, value in weights.items()}, "step_2")
    return path / "step_1"


EVERY = (
    in_one_file, in_indexed_files, by_an_index, in_a_folder_with_one_file, in_a_file_of_another_name, by_torch_save,
    in_pickled_files, in_one_pickled_file, by_dcp, in_the_newest_checkpoint, in_one_checkpoint,
)  # fmt: skip


@pytest.mark.parametrize("write", EVERY)
def test_weights_of_every_kind_are_taken(tmp_path: Path, write: Callable[[Path, Weights], Path]) -> None:
    weights = model_weights()
    path = write(tmp_path, weights)
    with torch.device("meta"):
        model = Tied()
    ownership = Ownership(model, 0)
    names = (*ownership.parameter_names, *ownership.buffer_names)
    placement = Placement(*(dict.fromkeys(held, (0,)) for held in (ownership.parameter_names, ownership.buffer_names)))
    materialize(ownership, ownership.split(placement), str(path), torch.device("cpu"), 0)
    Comparison().equal({name: ownership.tensor(name) for name in names}, {n: weights[n] for n in names}).require()
    assert model.head.weight is model.table.weight, "a head that the file leaves out is tied"
    found = opened(path)
    assert isinstance(found, FileWeights)
    assert found.digest() == opened(path).digest()
    assert found.shape("table.weight") == (10, 4)
    Comparison().equal(read_whole(found.state, "model/table.weight"), weights["table.weight"]).require()


@pytest.mark.parametrize("write", EVERY)
def test_parts_are_those_of_the_whole(tmp_path: Path, write: Callable[[Path, Weights], Path]) -> None:
    weights = model_weights()
    found = opened(write(tmp_path, weights))
    table, same = weights["table.weight"], Comparison()
    for split, ways, span in (
        (Split(1), 2, None),
        (Split(0), 2, (3, 11)),
        (None, 1, (5, 27)),
        (Split(0, (4, 6)), 2, None),
    ):
        part = Part((10, 4), split, ways, ways - 1, span=span)
        shard = table
        if split is not None:
            blocks = table.split(list(split.blocks or (table.shape[split.dim],)), split.dim)
            shard = torch.cat([block.chunk(ways, split.dim)[ways - 1] for block in blocks], split.dim)
        expected = shard.reshape(-1)[slice(*span)] if span else shard
        for dtype in (torch.float32, torch.float64):
            into = torch.full(expected.shape, torch.nan, dtype=dtype)
            read_part(found, "table.weight", part, into)
            same.equal(into, expected.to(dtype), what=f"{split} {span} {dtype}")
    same.require()


def test_no_more_is_read_of_a_file_than_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = opened(in_indexed_files(tmp_path, model_weights()))
    entries: list[int] = []
    boxes = SafetensorsModel.boxes

    def counting(model: SafetensorsModel, name: str, box: Box) -> Any:
        entries.append(box.entries)
        return boxes(model, name, box)

    monkeypatch.setattr(SafetensorsModel, "boxes", counting)
    read_part(found, "table.weight", Part((10, 4), Split(0), 2, 1, span=(3, 11)), torch.empty(8))
    assert sum(entries) == 8


def test_a_digest_tells_contents_apart(tmp_path: Path) -> None:
    weights = model_weights()
    for write in EVERY:
        one, other = tmp_path / f"{write.__name__}-1", tmp_path / f"{write.__name__}-2"
        one.mkdir()
        other.mkdir()
        changed = weights | {"table.weight": weights["table.weight"] + 1}
        assert opened(write(one, weights)).digest() != opened(write(other, changed)).digest(), write.__name__


def other_folder(path: Path) -> Path:
    (path / "notes.txt").touch()
    (path / "logs").mkdir()
    return path


def several_files(path: Path) -> Path:
    for name in ("a.safetensors", "b.safetensors"):
        save_file(model_weights(), path / name)
    return path


def pickled_code(path: Path) -> Path:
    (path / "weights.pt").write_bytes(pickle.dumps({"w": print}))
    return path / "weights.pt"


def not_tensors(path: Path) -> Path:
    torch.save({"model": model_weights()}, path / "weights.pt")
    return path / "weights.pt"


def lost_bin(path: Path) -> Path:
    (in_pickled_files(path, model_weights()) / "pytorch_model-2.bin").unlink()
    return path


def of_jax(path: Path) -> Path:
    save = folders.begin(path, "last")
    state = saved_state(model_weights())
    (held,) = (data for _, data in state.boxes("model/table.weight", Box.whole((10, 4))))
    folders.write_rank(save, 0, {"model": [Piece("w", "F32", (10, 4), Box.whole((10, 4)), lambda: held)]})
    folders.publish(save, 1, 5, step=2, framework="jax", content={}, plan=None, keep=None)
    return path


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path / "nowhere", "there is no such file or folder"),
        (lambda path: path, r"holds nothing, and no weights that can be read: expected a Hugging Face folder \(model"),
        (other_folder, r"holds logs/, notes.txt, and no weights that can be read: expected a Hugging Face folder"),
        (several_files, r"has 2 safetensors files \(a.safetensors first\) and no model.safetensors.index.json"),
        (pickled_code, r"weights.pt is no file of torch.save with tensors alone .*: save model.state_dict\(\)"),
        (not_tensors, r"weights.pt does not hold a state dict \(names and tensors\)"),
        (lost_bin, r"the index names pytorch_model-2.bin, which is not in"),
        (of_jax, r"was written by a jax run, whose names and layouts of weights are others"),
    ],
)
def test_what_holds_no_weights_is_said(tmp_path: Path, make: Callable[[Path], Path], said: str) -> None:
    with pytest.raises(ShardwrightError, match=said):
        opened(make(tmp_path))


def test_names_and_shapes_that_differ_are_said(tmp_path: Path) -> None:
    weights = model_weights()
    with torch.device("meta"):
        ownership = Ownership(Tied(), 0)
    lacking = {name: value for name, value in weights.items() if name != "norm.bias"}
    with pytest.raises(PlanError, match=r"the weights have no 'norm.bias'"):
        NamedWeights(ownership, in_one_file(tmp_path, lacking)).require("norm.bias")
    other = weights | {"norm.bias": torch.zeros(5)}
    with pytest.raises(PlanError, match=r"the weights have 'norm.bias' of shape \(5,\): expected \(4,\)"):
        NamedWeights(ownership, in_one_file(tmp_path, other)).require("norm.bias")


@pytest.mark.parametrize("has_head", [True, False])
def test_a_model_with_a_head_takes_the_files_of_one_without_and_back(tmp_path: Path, has_head: bool) -> None:
    class Base(nn.Module):
        base_model_prefix = "base"

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

    class Headed(nn.Module):
        base_model_prefix = "base"

        def __init__(self) -> None:
            super().__init__()
            self.base, self.head = Base(), nn.Linear(2, 2)

    weights = {"inner.weight": torch.ones(2, 2), "inner.bias": torch.zeros(2)}
    if not has_head:
        weights = {f"base.{name}": value for name, value in weights.items()}
    weights["head.weight"] = torch.full((2, 2), 3.0)
    source = NamedWeights(Ownership(Headed() if has_head else Base(), 0), in_one_file(tmp_path, weights))
    name = "base.inner.weight" if has_head else "inner.weight"
    Comparison().equal(source.read(name), torch.ones(2, 2)).require()


def test_transformers_read_a_folder_that_is_written(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    state = saved_state(model.state_dict())
    assert state.values["ties"] == {"lm_head.weight": "transformer.wte.weight"}
    files = write_safetensors_folder(state, tmp_path, 10_000)
    assert len(files) > 3
    config.save_pretrained(tmp_path)
    read = GPT2LMHeadModel.from_pretrained(tmp_path, local_files_only=True)
    Comparison().equal(read.state_dict(), model.state_dict()).require()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=10_000)
    theirs = opened(tmp_path / "theirs")
    expected = {
        name: value for file in (tmp_path / "theirs").glob("*.safetensors") for name, value in load_file(file).items()
    }
    Comparison().equal(dict(theirs), expected).require()


def test_a_state_of_plain_dicts_says_what_it_lacks() -> None:
    weights = model_weights()
    state = saved_state(weights)
    with pytest.raises(CheckpointError, match=r"the state dicts has no tensor 'model/tabel'|has no tensor"):
        state.tensor("model/tabel")
    Comparison().equal(read_whole(state, "model/table.weight"), weights["table.weight"]).require()
    with pytest.raises(CheckpointError, match="expected a model's state dict"):
        saved_state({"a": 3})  # type: ignore[dict-item]
