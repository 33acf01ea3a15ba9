"""Models in safetensors files and indexes: read by others as they read, written as they want, refused by name."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.safetensors_folder import INDEX, ONE_FILE, SafetensorsModel, write_safetensors_folder
from shardwright.core.checkpoint.tensor_file import Bytes
from shardwright.core.errors import CheckpointError
from tests.comparison import Comparison

TENSORS = {
    "embedding": np.arange(24, dtype=np.float32).reshape(6, 4),
    "block.weight": np.arange(20, dtype=np.float16).reshape(4, 5),
    "count": np.array(7, dtype=np.int64),
    "empty": np.empty((0, 3), dtype=np.float32),
}
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def indexed(path: Path) -> Path:
    """A folder of two files and an index."""
    path.mkdir(exist_ok=True)
    parts = {FIRST: ["embedding"], SECOND: ["block.weight", "count", "empty"]}
    for file, names in parts.items():
        save_file({name: TENSORS[name] for name in names}, path / file)
    named = {name: file for file, names in parts.items() for name in names}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 144}, "weight_map": named}))
    return path


def read(model: Any, name: str, box: Box | None = None) -> np.ndarray:
    told = model.tensor(f"model/{name}")
    box = box or Box.whole(told.shape)
    kind = {"F32": np.float32, "F16": np.float16, "I64": np.int64}[told.dtype]
    found = np.full(box.shape, 99, dtype=kind)
    for shared, data in model.boxes(f"model/{name}", box):
        found[shared.inside(box)] = data.view(kind)[..., 0]
    return found


def test_an_index_and_its_files_are_one_model(tmp_path: Path) -> None:
    model = SafetensorsModel.of_index(indexed(tmp_path) / INDEX)
    assert sorted(model.names("model")) == sorted(TENSORS)
    assert model.names("optimizer0") == []
    assert (model.framework, model.step, model.has("model/count"), model.has("count")) == ("torch", 0, True, False)
    same = Comparison().equal({name: read(model, name) for name in TENSORS}, TENSORS)
    same.equal(read(model, "embedding", Box((1, 2), (3, 2))), TENSORS["embedding"][1:4, 2:], what="a box").require()
    assert [file.name for file in model.files] == [INDEX, FIRST, SECOND]
    with pytest.raises(CheckpointError, match=r"has no tensor 'embeding': did you mean 'embedding'\?"):
        model.tensor("model/embeding")


def lose_file(path: Path) -> None:
    (path / SECOND).unlink()


def lose_tensor(path: Path) -> None:
    save_file({"count": TENSORS["count"]}, path / SECOND)


def damage_header(path: Path) -> None:
    data = (path / SECOND).read_bytes()
    (path / SECOND).write_bytes(data[:9] + b"}" + data[10:])


def cut_file(path: Path) -> None:
    (path / SECOND).write_bytes((path / SECOND).read_bytes()[:-8])


def empty_file(path: Path) -> None:
    (path / SECOND).write_bytes(b"")


def no_json(path: Path) -> None:
    (path / INDEX).write_text('{"weight_map": {"a": ')


def no_map(path: Path) -> None:
    (path / INDEX).write_text('{"metadata": {}}')


def no_names(path: Path) -> None:
    (path / INDEX).write_text('{"weight_map": {}}')


def from_outside(path: Path) -> None:
    (path / INDEX).write_text('{"weight_map": {"a": "../secret.safetensors"}}')


def add_tensor(path: Path) -> None:
    save_file({name: TENSORS[name] for name in ("block.weight", "count", "empty", "embedding")}, path / SECOND)


def other_precision(path: Path) -> None:
    save_file({"embedding": TENSORS["embedding"].astype(np.float16)}, path / FIRST)


def longer_file(path: Path) -> None:
    (path / SECOND).write_bytes((path / SECOND).read_bytes() + b"\0" * 8)


def shift_tensors(path: Path) -> None:
    """The bytes of a tensor are missing before another, and there are as many more behind it."""
    data = (path / SECOND).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    last = max(header.values(), key=lambda entry: entry["data_offsets"][0] if entry["shape"] != [0, 3] else -1)
    last["data_offsets"] = [at + 2 for at in last["data_offsets"]]
    text = json.dumps(header).encode()
    (path / SECOND).write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :] + b"\0\0")


def name_twice(path: Path) -> None:
    data = (path / FIRST).read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + length].rstrip()
    twice = text[:-1] + b"," + text[1:]
    (path / FIRST).write_bytes(len(twice).to_bytes(8, "little") + twice + data[8 + length :])


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (add_tensor, rf"{SECOND}: the file has a tensor 'embedding', which .*{INDEX} does not place there"),
        (other_precision, rf"{INDEX}: the index tells of 144 bytes of tensors .* the files have 96 \({FIRST} "),
        (longer_file, rf"{SECOND}: the header .* is damaged: the tensors end at byte [\d,]+, and the file has"),
        (shift_tensors, rf"{SECOND}: the header .* is damaged: tensor '.*' begins at byte"),
        (name_twice, rf"{FIRST}: the header .* is damaged: '.*' is there twice"),
        (lose_file, rf"{INDEX}: the index names {SECOND} \(1 of 2 files\), which is not in .*complete the download"),
        (lose_tensor, rf"{INDEX}: tensor 'block.weight' should be in {SECOND}, which lacks it"),
        (damage_header, rf"{SECOND}: the header of the safetensors file is damaged"),
        (cut_file, rf"{SECOND}: the header of the safetensors file is damaged: a tensor of .* does not lie in bytes"),
        (empty_file, rf"{SECOND}: no safetensors file: it has 0 bytes"),
        (no_json, rf"{INDEX}: no index of safetensors files: expected JSON with a 'weight_map'"),
        (no_map, rf"{INDEX}: no index of safetensors files: expected JSON with a 'weight_map'"),
        (no_names, rf"{INDEX}: the index names no tensors"),
        (from_outside, rf"{INDEX}: the index names a file '../secret.safetensors': expected the name of one beside it"),
    ],
)
def test_what_is_wrong_with_a_folder_is_said_by_name(tmp_path: Path, harm: Callable[[Path], None], said: str) -> None:
    harm(indexed(tmp_path))
    with pytest.raises(CheckpointError, match=said):
        SafetensorsModel.of_index(tmp_path / INDEX)


def test_any_cut_and_any_other_file_is_refused_by_its_name(tmp_path: Path) -> None:
    """Files of others have no digests: what is found is everything but changed entries."""
    random = np.random.default_rng(0)
    other = {name: np.zeros((*held.shape, 2), held.dtype) for name, held in TENSORS.items()}
    seen = set()
    for case in range(120):
        indexed(tmp_path)
        file = (FIRST, SECOND)[case % 2]
        kind = ("cut", "longer", "header", "missing", "of another model")[case % 5]
        data = bytearray((tmp_path / file).read_bytes())
        text = 8 + int.from_bytes(data[:8], "little")
        if kind == "cut":
            del data[int(random.integers(0, len(data))) :]
        elif kind == "longer":
            data += bytes(int(random.integers(1, 40)))
        elif kind == "header":
            data[int(random.integers(0, text))] ^= 1 << int(random.integers(0, 8))
        (tmp_path / file).write_bytes(data)
        if kind == "missing":
            (tmp_path / file).unlink()
        elif kind == "of another model":
            names = ["embedding"] if file == FIRST else ["block.weight", "count", "empty"]
            save_file({name: other[name] for name in names}, tmp_path / file)
        with pytest.raises(CheckpointError, match=f"{file}"):
            SafetensorsModel.of_index(tmp_path / INDEX)
        seen.add((file, kind))
    assert len(seen) == 10


def test_an_older_writers_count_of_bools_is_known(tmp_path: Path) -> None:
    save_file({"mask": np.ones((3, 3), bool), "weight": np.ones(2, np.float32)}, tmp_path / FIRST)
    index = {"metadata": {"total_size": 9 / 8 + 8}, "weight_map": dict.fromkeys(("mask", "weight"), FIRST)}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert sorted(SafetensorsModel.of_index(tmp_path / INDEX).names("model")) == ["mask", "weight"]


@pytest.mark.parametrize("most_bytes", [5e9, 100, 1])
def test_a_folder_that_is_written_is_read_by_others(tmp_path: Path, most_bytes: float) -> None:
    model = SafetensorsModel.of_index(indexed(tmp_path / "from") / INDEX)
    written = write_safetensors_folder(model, tmp_path / "to", most_bytes)
    names = sorted(path.name for path in (tmp_path / "to").iterdir())
    assert names == sorted(path.name for path in written)
    if most_bytes == 5e9:
        assert names == [ONE_FILE]
        files = [tmp_path / "to" / ONE_FILE]
    else:
        index = json.loads((tmp_path / "to" / INDEX).read_text())
        assert written[-1].name == INDEX
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in TENSORS.values())
        files = written[:-1]
        assert sorted(set(index["weight_map"].values())) == [file.name for file in files]
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        assert index["weight_map"].keys() == TENSORS.keys()
    found = {name: value for file in files for name, value in load_file(file).items()}
    assert found.keys() == TENSORS.keys()
    Comparison().equal(found, TENSORS).require()
    assert b'"__metadata__":{"format":"pt"}' in files[0].read_bytes()[:100]
    with pytest.raises(CheckpointError, match=r"has model.* already: name a folder without a model"):
        write_safetensors_folder(model, tmp_path / "to", most_bytes)
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == names, "what was there stays"


def test_no_more_than_one_tensor_is_held_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class InRows:
        """A state whose tensors come in pieces of a row, so that each is put together."""

        framework, step = "torch", 0

        def __init__(self) -> None:
            self.model = SafetensorsModel.of_index(indexed(tmp_path / "from") / INDEX)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

        def boxes(self, name: str, box: Box) -> Iterator[tuple[Box, Bytes]]:
            rows = box.shape[0] if box.shape else 1
            for row in range(rows):
                part = Box((row, *box.start[1:]), (1, *box.shape[1:])) if box.shape else box
                yield from self.model.boxes(name, part)

    made: list[int] = []
    empty = np.empty

    def counting(shape: Any, *given: Any, **named: Any) -> Any:
        found = empty(shape, *given, **named)
        made.append(found.nbytes)
        return found

    monkeypatch.setattr(np, "empty", counting)
    write_safetensors_folder(InRows(), tmp_path / "to", 1)
    monkeypatch.undo()
    assert max(made) == TENSORS["embedding"].nbytes
    found = {name: value for file in (tmp_path / "to").glob("*.safetensors") for name, value in load_file(file).items()}
    Comparison().equal(found, TENSORS).require()


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SafetensorsModel.of_index(indexed(tmp_path / "from") / INDEX)
    sync, calls = os.fsync, [0]

    def full(number: int) -> None:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(28, "No space left on device")
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="cannot be written there: No space left on device"):
        write_safetensors_folder(model, tmp_path / "to", 1)
    assert list((tmp_path / "to").iterdir()) == []
    with pytest.raises(CheckpointError, match="expected a number of bytes above 0"):
        write_safetensors_folder(model, tmp_path / "other", 0)
    model.framework = "jax"
    with pytest.raises(CheckpointError, match="has the names of a jax run"):
        write_safetensors_folder(model, tmp_path / "other")
