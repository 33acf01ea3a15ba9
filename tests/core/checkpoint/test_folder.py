"""Folders of checkpoints: nothing is taken for one that is not complete, and nothing that is complete is lost."""

import json
import os
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint import tensor_file
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.folder import MARKER, Piece, Save
from shardwright.core.checkpoint.other_writers import publishing_alone
from shardwright.core.checkpoint.reader import Reader, require_names
from shardwright.core.checkpoint.writers import writers
from shardwright.core.errors import CheckpointError, PlanWarning
from tests.comparison import Comparison

SHAPE = (6, 4)
WHOLE = np.arange(24, dtype=np.float32).reshape(SHAPE)


def piece(name: str, value: np.ndarray, box: Box | None = None) -> Piece:
    box = box or Box.whole(value.shape)
    own = np.ascontiguousarray(value[box.inside(Box.whole(value.shape))])
    return Piece(name, "F32", value.shape, box, lambda: own.reshape(-1).view(np.uint8))


def of_rank(rank: int, value: np.ndarray) -> dict[str, list[Piece]]:
    """Half of a tensor, and one tensor on rank 0."""
    half = piece("layer.weight", value, Box((3 * rank, 0), (3, 4)))
    return {"model": [half], "optimizer0": [piece("step", np.array(rank + 1.0, dtype=np.float32))][: 1 - rank]}


def write(path: Path, tag: str, value: np.ndarray = WHOLE, ranks: int = 2, **more: Any) -> Save:
    save = folders.begin(path, tag)
    for rank in range(ranks):
        folders.write_rank(save, rank, of_rank(rank, value))
    folders.publish(
        save, 2, 0.2, step=7, framework="torch", content={"a": 1}, plan=None, keep=more.pop("keep", None), **more
    )
    return save


def read(reader: Reader, name: str, box: Box | None = None) -> np.ndarray:
    shape = reader.tensor(name).shape
    box = box or Box.whole(shape)
    found = np.full(box.shape, np.nan, dtype=np.float32)
    for shared, data in reader.boxes(name, box):
        found[shared.inside(box)] = data.view(np.float32)[..., 0]
    return found


def read_all(path: Path) -> None:
    reader = Reader.open(path, "last")
    for name in reader.index.tensors:
        read(reader, name)


@pytest.mark.parametrize("together", [False, True])
def test_what_two_ranks_write_is_read_whole_and_in_parts(tmp_path: Path, together: bool) -> None:
    write(tmp_path, "step_7", together=together)
    reader = Reader.open(tmp_path)
    assert (reader.index.step, reader.index.ranks, reader.names("model")) == (7, 2, ["layer.weight"])
    Comparison().equal(read(reader, "model/layer.weight"), WHOLE).require()
    Comparison().equal(read(reader, "model/layer.weight", Box((2, 1), (2, 2))), WHOLE[2:4, 1:3]).require()
    assert read(reader, "optimizer0/step") == 1.0
    names = sorted(path.name for path in (tmp_path / "step_7").iterdir())
    assert len(names) == (4 if together else 5), names
    if together:
        from safetensors.numpy import load_file

        (file,) = (tmp_path / "step_7").glob("model.*.safetensors")
        Comparison().equal(load_file(file)["layer.weight"], WHOLE).require()


def test_the_newest_complete_one_is_found(tmp_path: Path) -> None:
    write(tmp_path, "b")
    write(tmp_path, "a", WHOLE + 1)
    begun = folders.begin(tmp_path, "c")
    folders.write_rank(begun, 0, of_rank(0, WHOLE))
    assert Reader.open(tmp_path).folder.name == "a"
    assert [tag for tag, _ in folders.complete(tmp_path)] == ["b", "a"]
    Comparison().equal(read(Reader.open(tmp_path, "b"), "model/layer.weight"), WHOLE).require()
    with pytest.raises(
        CheckpointError, match=r"checkpoint 'c' in .* is not complete: its run ended while .*known: a, b"
    ):
        Reader.open(tmp_path, "c")
    with pytest.raises(CheckpointError, match=r"checkpoint 'd' in .* does not exist"):
        Reader.open(tmp_path, "d")
    with pytest.raises(CheckpointError, match="no such folder of checkpoints"):
        Reader.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no complete checkpoint is there"):
        Reader.open(tmp_path / "empty")


def test_a_tag_written_again_stays_readable_until_the_new_one_is_complete(tmp_path: Path) -> None:
    write(tmp_path, "last")
    begun = folders.begin(tmp_path, "last")
    folders.write_rank(begun, 0, of_rank(0, WHOLE + 1))
    Comparison().equal(read(Reader.open(tmp_path, "last"), "model/layer.weight"), WHOLE).require()
    write(tmp_path, "last", WHOLE + 2)
    Comparison().equal(read(Reader.open(tmp_path, "last"), "model/layer.weight"), WHOLE + 2).require()
    folders.abandon(begun)
    assert len(list((tmp_path / "last").iterdir())) == 5, "what was replaced and what was abandoned is gone"


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path, f"step_{number}", keep=2)
    assert [tag for tag, _ in folders.complete(tmp_path)] == ["step_2", "step_3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2", "step_3"]


def test_nothing_is_published_that_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"rank 1 \(1 of 2 ranks\) has written nothing to .* all ranks share"):
        write(tmp_path, "one", ranks=1)
    save = folders.begin(tmp_path, "twice")
    for rank in range(2):
        folders.write_rank(save, rank, {"model": [piece("w", WHOLE)]})
    with pytest.raises(CheckpointError, match=r"model/w of shape \(6, 4\) was not written whole: .* share entries"):
        folders.publish(save, 2, 1, step=0, framework="torch", content={}, plan=None, keep=None)
    save = folders.begin(tmp_path, "half")
    folders.write_rank(save, 0, {"model": [piece("w", WHOLE, Box((0, 0), (6, 3)))]})
    with pytest.raises(CheckpointError, match="of 24 entries, 6 are in no piece"):
        folders.publish(save, 1, 1, step=0, framework="torch", content={}, plan=None, keep=None)
    save = folders.begin(tmp_path, "unlike")
    folders.write_rank(save, 0, {"model": [piece("w", WHOLE)]})
    folders.write_rank(save, 1, {"model": [piece("w", WHOLE[:3])]})
    with pytest.raises(CheckpointError, match=r"rank 1 has model/w in F32 of shape \(3, 4\), and another rank"):
        folders.publish(save, 2, 1, step=0, framework="torch", content={}, plan=None, keep=None)
    assert folders.complete(tmp_path) == []


def test_files_that_vanish_before_the_end_are_missed(tmp_path: Path) -> None:
    save = folders.begin(tmp_path, "shared")
    folders.write_rank(save, 0, {"model": [piece("w", WHOLE)]})
    next((tmp_path / "shared").glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="does another run write to this folder"):
        folders.publish(save, 1, 1, step=0, framework="torch", content={}, plan=None, keep=None)


def test_another_run_that_writes_to_the_folder_is_named(tmp_path: Path) -> None:
    write(tmp_path, "earlier")
    known: dict[Path, set[str]] = {}
    for tag in ("one", "two"):
        save = folders.begin(tmp_path, tag, known)
        for rank in range(2):
            folders.write_rank(save, rank, of_rank(rank, WHOLE))
        folders.publish(save, 2, 1, step=7, framework="torch", content={}, plan=None, keep=None)
    shutil.copytree(tmp_path / "one", tmp_path / "best")
    folders.begin(tmp_path, "three", known)
    write(tmp_path, "of_another_run")
    with pytest.raises(CheckpointError, match=r"another run has written checkpoint 'of_another_run' .* its own"):
        folders.begin(tmp_path, "four", known)
    assert not (tmp_path / "four").exists()
    folders.begin(tmp_path, "four", {})
    folders.begin(tmp_path / "elsewhere", "four", known)


def test_no_two_runs_publish_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCKED_S", 0.1)
    with (
        publishing_alone(tmp_path, 1.0),
        pytest.raises(CheckpointError, match=r"another run publishes a checkpoint to .* folder of its own"),
    ):
        write(tmp_path, "a")
    write(tmp_path, "a")


def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    """Nor is it taken for one without checkpoints, with which a run would begin anew."""
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as made:  # others may not enter pytest's folders
        path = Path(made)
        write(path, "there")
        path.chmod(0o555)
        (path / "there").chmod(0o000)
        if not user:  # root may write anywhere
            os.seteuid(65534)
        try:
            with pytest.raises(CheckpointError, match=r"no checkpoint can be written to .*Permission denied"):
                folders.begin(path / "new", "a")
            for read_it in (lambda: Reader.open(path, "there"), lambda: folders.has_none(path)):
                with pytest.raises(CheckpointError, match=r"there.*cannot be read: Permission denied"):
                    read_it()
            with pytest.raises(CheckpointError, match=r"cannot be read: Permission denied"):
                folders.has_none(path / "there" / "deeper")
        finally:
            os.seteuid(user)
            path.chmod(0o700)
            (path / "there").chmod(0o700)


def test_a_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    with pytest.raises(CheckpointError, match="no checkpoint can be written to"):
        folders.begin(tmp_path / "here", "a")
    for tag in ("", "a/b", "..", ".hidden", 3):
        with pytest.raises(CheckpointError, match="it names a folder"):
            folders.begin(tmp_path, tag)  # type: ignore[arg-type]


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "last")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device; what was there before stays"):
        write(tmp_path, "last", WHOLE + 1)
    monkeypatch.undo()
    Comparison().equal(read(Reader.open(tmp_path), "model/layer.weight"), WHOLE).require()
    assert len(list((tmp_path / "last").iterdir())) == 5


@pytest.mark.parametrize(("count", "seed"), [(100, 0), pytest.param(1000, 1, marks=pytest.mark.slow)])
def test_every_corruption_is_refused_by_the_name_of_the_file(tmp_path: Path, count: int, seed: int) -> None:
    """Seeded ones: truncated, flipped, missing, of another checkpoint. None loads wrong data."""
    draw = random.Random(seed)
    other = folders.begin(tmp_path / "other", "last")
    for rank in range(2):
        folders.write_rank(other, rank, of_rank(rank, WHOLE + 1) | {"optimizer0": [piece("step", WHOLE[:1, 0])][rank:]})
    folders.publish(other, 2, 1, step=7, framework="torch", content={"a": 2}, plan=None, keep=None)
    for number in range(count):
        path = tmp_path / f"{number}"
        write(path, "last")
        victim = draw.choice(sorted((path / "last").iterdir()))
        kind = draw.choice(["truncated", "flipped", "missing", "foreign"])
        data = victim.read_bytes()
        if kind == "truncated":
            victim.write_bytes(data[: draw.randrange(len(data))])
        elif kind == "flipped":
            at = draw.randrange(len(data))
            victim.write_bytes(data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :])
        elif kind == "missing":
            victim.unlink()
        else:
            part = victim.name.split(".")[0]
            victim.write_bytes(next((tmp_path / "other" / "last").glob(f"{part}.*")).read_bytes())
        with pytest.raises(CheckpointError) as caught:
            read_all(path)
        named = victim.name if not (kind == "missing" and victim.name == MARKER) else "'last'"
        assert named in str(caught.value) or kind == "foreign", f"{kind} {victim.name}: {caught.value}"
        shutil.rmtree(path)


def test_a_newer_format_and_other_files_are_named(tmp_path: Path) -> None:
    write(tmp_path, "last")
    marker = tmp_path / "last" / MARKER
    document = json.loads(marker.read_text())
    marker.write_text(json.dumps(document | {"version": 2}))
    with pytest.raises(CheckpointError, match=r"version 2 is newer than this Shardwright reads \(1\)"):
        Reader.open(tmp_path, "last")
    marker.write_text(json.dumps({"step": 1}))
    with pytest.raises(CheckpointError, match="no part of a checkpoint"):
        Reader.open(tmp_path, "last")
    with (
        pytest.warns(PlanWarning, match="no part of a checkpoint: .* this checkpoint is left out"),
        pytest.raises(CheckpointError, match="no complete checkpoint is there"),
    ):
        Reader.open(tmp_path)
    with pytest.warns(PlanWarning, match="this checkpoint is left out"):
        write(tmp_path, "next", keep=1)
    assert Reader.open(tmp_path, "next").index.step == 7


def test_what_is_published_is_never_abandoned(tmp_path: Path) -> None:
    save = write(tmp_path, "last")
    folders.abandon(save)
    Comparison().equal(read(Reader.open(tmp_path), "model/layer.weight"), WHOLE).require()


def test_links_and_copies_are_the_users_own(tmp_path: Path) -> None:
    write(tmp_path, "a")
    shutil.copytree(tmp_path / "a", tmp_path / "best")
    (tmp_path / "latest").symlink_to(tmp_path / "a")
    write(tmp_path, "b", keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "best", "latest"]
    Comparison().equal(read(Reader.open(tmp_path, "best"), "model/layer.weight"), WHOLE).require()
    assert Reader.open(tmp_path).folder.name == "b"


def test_what_a_killed_save_left_under_another_tag_goes_where_not_all_are_kept(tmp_path: Path) -> None:
    def left(tag: str, *, extra: bool = False) -> Path:
        save = folders.begin(tmp_path, tag)
        folders.write_rank(save, 0, of_rank(0, WHOLE))
        if extra:
            (save.folder / "notes.txt").write_text("mine")
        return save.folder

    dead, users = left("step_1"), left("step_2", extra=True)
    write(tmp_path, "step_3")
    assert dead.exists(), "all are kept"
    time.sleep(0.02)
    save = folders.begin(tmp_path, "step_4")
    for rank in range(2):
        folders.write_rank(save, rank, of_rank(rank, WHOLE))
    time.sleep(0.02)
    other = left("of_another_run")
    folders.publish(save, 2, 1, step=4, framework="torch", content={}, plan=None, keep=1)
    assert not dead.exists()
    assert {path.name for path in users.iterdir()} > {"notes.txt"}, "something else is in it"
    assert other.exists(), "it is being written"
    assert [tag for tag, _ in folders.complete(tmp_path)] == ["step_4"]


@pytest.mark.parametrize("keep", [0, -1, 2.0, "3", True])
def test_a_number_to_keep_is_a_whole_one(keep: Any) -> None:
    with pytest.raises(CheckpointError, match="at least 1, or None for all; given"):
        folders.require_keep(keep)


def test_a_rank_without_space_is_heard_of_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = folders.begin(tmp_path, "one")
    folders.write_rank(save, 0, of_rank(0, WHOLE))

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    folders.tell_failure(save, 1, CheckpointError("no room"))
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="rank 1 could not write its part: there was no space to say why"):
        folders.publish(save, 2, 60, step=0, framework="torch", content={}, plan=None, keep=None)


def test_the_wrong_folder_is_not_one_without_checkpoints(tmp_path: Path) -> None:
    write(tmp_path, "step_7")
    (tmp_path / "notes.txt").touch()
    for path, said in (
        (tmp_path / "step_7", "is itself a checkpoint.*tag='step_7'"),
        (tmp_path / "notes.txt", "is a file"),
    ):
        with pytest.raises(CheckpointError, match=said):
            folders.has_none(path)
        with pytest.raises(CheckpointError, match=said):
            Reader.open(path)
    assert folders.has_none(tmp_path / "nowhere")


def test_a_rank_that_fails_is_heard_of_at_once(tmp_path: Path) -> None:
    save = folders.begin(tmp_path, "one")
    folders.write_rank(save, 0, of_rank(0, WHOLE))
    folders.tell_failure(save, 1, CheckpointError("no room"))
    with pytest.raises(CheckpointError, match="rank 1 could not write its part: CheckpointError: no room"):
        folders.publish(save, 2, 60, step=0, framework="torch", content={}, plan=None, keep=None)
    folders.abandon(save)
    assert not list(tmp_path.iterdir())


def test_some_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file.TensorFiles, "MOST_OPEN", 1)
    write(tmp_path, "last")
    Comparison().equal(read(Reader.open(tmp_path), "model/layer.weight"), WHOLE).require()


def test_names_that_differ_are_told_with_the_nearest() -> None:
    require_names(["a.weight"], ["a.weight"], "the model")
    with pytest.raises(CheckpointError, match=r"lacks b\.weight .*it has b\.weigth, which is not here"):
        require_names(["a.weight", "b.weight"], ["a.weight", "b.weigth"], "the model")


def test_copies_write_about_as_many_bytes() -> None:
    sizes = {f"w{n}": 10 + n for n in range(20)}
    found = writers(sizes, 3)
    loads = [sum(sizes[name] for name, copy in found.items() if copy == number) for number in range(3)]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert found == writers(dict(reversed(sizes.items())), 3)
