"""The tensors of a job in a file that several processes map: what one puts, the others have."""

import errno
import os
import random
import tempfile
from pathlib import Path

import pytest
import torch

from shardwright.backends.torch.jobs import shared_tensors
from shardwright.backends.torch.jobs.journal import Journal
from shardwright.backends.torch.jobs.shared_tensors import SharedTensors
from shardwright.backends.torch.machine.host_store import is_in_file
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison

DTYPES = (torch.float32, torch.int64, torch.bool, torch.bfloat16)


def views(folder: Path, count: int) -> list[SharedTensors]:
    """Views of one job's tensors, as processes have them; each has opened the files by itself."""
    paths = [folder / "tensors", folder / "journal"]
    for path in paths:
        path.touch()
    files = [[os.open(path, os.O_RDWR) for path in paths] for _ in range(count)]
    for path in paths:
        path.unlink()
    return [SharedTensors(held, Journal(told), str(folder)) for held, told in files]


def test_views_hold_the_same_whatever_was_put_and_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_tensors, "SEGMENT_BYTES", 1 << 14)
    draw, own = random.Random(3), views(tmp_path, 3)
    wanted: dict[str, torch.Tensor] = {}
    noted: dict[str, object] = {}
    compared = Comparison("views")
    for turn in range(60):
        mine = draw.choice(own)
        mine.read()
        for _ in range(draw.randrange(6)):
            key = f"key {draw.randrange(12)}"
            if draw.random() < 0.2:
                mine.drop(key)
                wanted.pop(key, None)
            elif draw.random() < 0.2:
                noted[key] = [turn, 0.1 * turn, None]
                mine.note(key, noted[key])
            else:
                shape = [draw.randrange(40) for _ in range(draw.randrange(4))]
                tensor = torch.randn(shape).to(draw.choice(DTYPES))
                tensor = tensor.transpose(0, -1) if tensor.dim() > 1 and draw.random() < 0.5 else tensor
                wanted[key] = tensor
                put = mine.put(key, tensor)
                assert put.stride() == tensor.stride() or not tensor.numel()
                assert not put.numel() or is_in_file(put.untyped_storage())
        mine.tell()
        other = draw.choice(own)
        other.read()
        compared.where = f"turn {turn}"
        found = {key: other.get(key).float() for key in wanted if wanted[key].numel()}
        compared.equal(found, {key: value.float() for key, value in wanted.items() if value.numel()})
        assert all(not other.has(f"key {n}") for n in range(12) if f"key {n}" not in wanted)
        assert all(other.noted(key) == value for key, value in noted.items())
    compared.require()


def test_sums_grow_in_place_and_writes_are_private_once_kept_apart(tmp_path: Path) -> None:
    one, other = views(tmp_path, 2)
    one.add("sum", torch.ones(5))
    one.tell()
    other.read()
    other.add("sum", torch.ones(5))
    Comparison("sum").equal(one.get("sum"), torch.full((5,), 2.0)).require()
    for each in (one, other):
        each.keep_apart()
    one.get("sum").add_(5.0)
    Comparison("apart").equal(other.get("sum"), torch.full((5,), 2.0)).equal(
        one.get("sum"), torch.full((5,), 7.0), what="own"
    ).require()


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (one,) = views(tmp_path, 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ShardwrightError, match="found no room for 16 MiB more"):
        one.put("a", torch.ones(3))


def test_a_line_that_is_not_whole_is_read_when_it_is() -> None:
    with tempfile.TemporaryFile() as file:
        journal, other = Journal(file.fileno()), Journal(file.fileno())
        journal.append(["a", 0.1], {"b": None})
        os.pwrite(file.fileno(), b'["c"', os.fstat(file.fileno()).st_size)
        assert other.read() == [["a", 0.1], {"b": None}]
        assert other.has_news
        os.pwrite(file.fileno(), b"]\n", os.fstat(file.fileno()).st_size)
        assert other.read() == [["c"]]
        assert not other.has_news
        assert other.read() == []
