"""Files of tensors: those of the safetensors library, and checked chunk by chunk."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shardwright.core.checkpoint import tensor_file
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.tensor_file import TensorFile, ToWrite, Written, write_path
from shardwright.core.errors import CheckpointError
from tests.comparison import Comparison

DRAW = np.random.default_rng(0)
TENSORS: dict[str, np.ndarray] = {
    "a.weight": DRAW.standard_normal((7, 5)).astype(np.float32),
    "an empty one": np.zeros((0, 3), dtype=np.int64),
    "a number": np.array(3.5),
    "ünicode": DRAW.integers(0, 255, (3, 1, 4), dtype=np.uint8),
}
NAMES = {"float32": "F32", "int64": "I64", "float64": "F64", "uint8": "U8"}


def to_write(name: str, value: np.ndarray) -> ToWrite:
    return ToWrite(name, NAMES[str(value.dtype)], value.shape, lambda: np.frombuffer(value.tobytes(), dtype=np.uint8))


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Written]:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 64)
    path = tmp_path / "some.safetensors"
    return path, write_path(path, [to_write(name, value) for name, value in TENSORS.items()])


def test_the_library_reads_what_is_written(written: tuple[Path, Written]) -> None:
    found = load_file(written[0])
    assert set(found) == set(TENSORS)
    for name, value in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
    Comparison().equal(found, TENSORS).require()
    assert written[1].size_bytes == written[0].stat().st_size


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "np"})
    file = TensorFile(tmp_path / "theirs.safetensors")
    for name, value in TENSORS.items():
        assert file.read(name).tobytes() == value.tobytes()


def test_a_box_of_a_tensor_is_read(written: tuple[Path, Written]) -> None:
    data = TensorFile(*written).read("a.weight", Box((2, 1), (3, 4)))
    Comparison().equal(data.view(np.float32)[..., 0], TENSORS["a.weight"][2:5, 1:5]).require()
    with pytest.raises(CheckpointError, match=r"a.weight' has shape \(7, 5\), without \[6:8, 0:5\]"):
        TensorFile(*written).read("a.weight", Box((6, 0), (2, 5)))
    with pytest.raises(CheckpointError, match="no tensor 'b'"):
        TensorFile(*written).read("b")


def read_all(path: Path, known: Written) -> None:
    file = TensorFile(path, known)
    for name in TENSORS:
        file.read(name)


def test_any_flipped_bit_is_found_where_it_is_read(written: tuple[Path, Written]) -> None:
    path, known = written
    sound = path.read_bytes()
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ (1 << (at % 8))]) + sound[at + 1 :])
        with pytest.raises(CheckpointError, match=r"some.safetensors: bytes [\d,]+ to [\d,]+ are not those"):
            read_all(path, known)


@pytest.mark.parametrize(
    "spoilt",
    [lambda data: data[:-1], lambda data: data + b"\0", lambda data: b"", lambda data: data[:4]],
)
def test_another_size_is_refused(written: tuple[Path, Written], spoilt: Callable[[bytes], bytes]) -> None:
    path, known = written
    path.write_bytes(spoilt(path.read_bytes()))
    with pytest.raises(CheckpointError, match=r"some.safetensors: the file has [\d,]+ bytes, and was written with"):
        TensorFile(path, known)


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"{", b'{"a": 3}', b"\xff\xfe", b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_files_of_others_are_checked_too(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "theirs.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match=r"theirs\.safetensors: the header of the safetensors file is damaged"):
        TensorFile(path)


def test_a_header_that_is_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.safetensors"
    path.write_bytes((1 << 62).to_bytes(8, "little") + json.dumps({}).encode())
    with pytest.raises(CheckpointError, match="its header would have"):
        TensorFile(path)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        TensorFile(tmp_path / "nothing")
