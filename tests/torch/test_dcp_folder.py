"""Folders of torch.distributed.checkpoint: what torch writes is read, what we write torch reads, nothing is run."""

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random as random_of
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from shardwright.backends.torch.state.dcp_folder import open_dcp
from shardwright.backends.torch.state.dcp_writer import write_dcp
from shardwright.backends.torch.state.plain_states import plain_optimizer_state, saved_state
from shardwright.backends.torch.state.saved_parts import read_whole
from shardwright.core.errors import CheckpointError, PlanWarning
from tests.comparison import Comparison

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(10, 4), nn.BatchNorm1d(4)
        self.up = nn.Linear(4, 6, dtype=torch.float32)
        self.down = nn.Linear(6, 4).to(torch.bfloat16)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.down(self.up(self.norm(self.table(ids))).to(torch.bfloat16)).float())
        return found


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    bias = [p for p in model.parameters() if p.dim() < 2]
    rest = [p for p in model.parameters() if p.dim() >= 2]
    return torch.optim.AdamW([{"params": rest}, {"params": bias, "weight_decay": 0.0}], lr=1e-2)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def trained(make: Make = adamw, seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = make(model)
    for step in range(2):
        optimizer.zero_grad()
        (model(torch.arange(step, step + 8)) ** 2).mean().backward()
        optimizer.step()
    return model, optimizer


def names_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of the parameters in the order in which the optimizer has them."""
    named = {parameter: name for name, parameter in model.named_parameters()}
    return [named[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def nested(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optim": of_optimizer, "epoch": 3}


def in_an_app(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"app": nested(model, optimizer)}


def numbered(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def flat_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As TorchTitan has it."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    of_optimizer = get_optimizer_state_dict(model, optimizer, options=options)
    return {**model.state_dict(), "optimizer": of_optimizer, "train_state": {"step": torch.tensor(2)}}


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("layout", [nested, in_an_app, numbered, flat_names])
def test_what_torch_writes_is_read(tmp_path: Path, layout: Callable[..., dict[str, Any]], make: Make) -> None:
    model, optimizer = trained(make)
    dcp.save(layout(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    names = names_of(model, optimizer)
    state = open_dcp(tmp_path, names if layout is numbered else None)
    found = {name: read_whole(state, f"model/{name}") for name in state.names("model")}
    assert found.keys() == model.state_dict().keys()
    Comparison().equal(found, model.state_dict()).require()
    content = state.content(lambda name: read_whole(state, name))
    assert content["optimizers"][0]["class"] == ("AdamW" if make is adamw else "SGD")
    assert (state.step, content["steps"]) == ((2, 2) if make is adamw else (0, 0))
    ours, theirs = plain_optimizer_state(state, names), optimizer.state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    assert {at: held.keys() for at, held in ours["state"].items()} == {
        at: held.keys() for at, held in theirs["state"].items()
    }
    same = Comparison().equal(ours["state"], theirs["state"], what="states")
    if layout is flat_names and make is adamw:
        assert sorted(len(group["params"]) for group in ours["param_groups"]) == [3, 4]
    else:
        assert ours["param_groups"] == theirs["param_groups"]
    same.require()
    if layout is nested:
        assert content["user"] == {"epoch": 3}
    if layout is flat_names:
        Comparison().equal(content["user"], {"train_state.step": torch.tensor(2)}).require()


@pytest.mark.parametrize("make", [adamw, momentum])
def test_what_is_written_torch_reads(tmp_path: Path, make: Make) -> None:
    model, optimizer = trained(make)
    state = saved_state(model.state_dict(), optimizer.state_dict(), names_of(model, optimizer))
    write_dcp(state, tmp_path / "dcp")
    other, fresh = trained(make, seed=1)
    of_model, of_optimizer = get_state_dict(other, fresh)
    dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(other, fresh, model_state_dict=of_model, optim_state_dict=of_optimizer)
    same = Comparison().equal(other.state_dict(), model.state_dict(), what="weights")
    same.equal(fresh.state_dict()["state"], optimizer.state_dict()["state"], what="states").require()
    assert fresh.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    again = open_dcp(tmp_path / "dcp")
    assert plain_optimizer_state(again)["param_groups"] == optimizer.state_dict()["param_groups"]
    with pytest.raises(CheckpointError, match="holds a DCP checkpoint already"):
        write_dcp(state, tmp_path / "dcp")
    state.framework = "jax"
    with pytest.raises(CheckpointError, match="names of a jax run"):
        write_dcp(state, tmp_path / "other")


def test_no_more_than_one_tensor_is_held_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import weakref

    from shardwright.backends.torch.state import dcp_writer

    model, optimizer = trained()
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def watching(state: Any, label: str) -> torch.Tensor:
        nonlocal most
        found = read_whole(state, label)
        alive.append(weakref.ref(found))
        most = max(most, sum(one() is not None for one in alive))
        return found

    monkeypatch.setattr(dcp_writer, "read_whole", watching)
    write_dcp(saved_state(model.state_dict(), optimizer.state_dict(), names_of(model, optimizer)), tmp_path)
    assert len(alive) > 20
    assert most <= 2, "the last one is let go of when the next is there"


class Scaled(nn.Linear):
    """A layer with extra state, of whatever form."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_extra_states_of_modules_are_no_weights(tmp_path: Path, prefix: str) -> None:
    model = nn.Sequential(Scaled(2, 2), Scaled(2, 2), Scaled(2, 2))
    model[0].extra = {"calls": 3, "scale": torch.full((2,), 0.5), "history": [torch.ones(1), {"mean": 1.5}]}
    model[1].extra, model[2].extra = torch.arange(4, dtype=torch.uint8), 7
    state = model.state_dict()
    dcp.save({"model": state} if prefix else state, checkpoint_id=tmp_path / "dcp")
    folder = open_dcp(tmp_path / "dcp")
    assert sorted(folder.names("model")) == sorted(name for name, _ in model.named_parameters())
    extra = folder.content(lambda label: read_whole(folder, label))["extra"]
    assert extra.keys() == {f"{number}._extra_state" for number in range(3)}
    first = extra["0._extra_state"]
    tensors = {"scale": first["scale"], "history": first["history"][0], "bytes": extra["1._extra_state"]}
    wanted = {"scale": torch.full((2,), 0.5), "history": torch.ones(1), "bytes": torch.arange(4, dtype=torch.uint8)}
    Comparison("extra states").equal(tensors, wanted, what="tensors").require("tensors")
    assert (first["calls"], first["history"][1], extra["2._extra_state"]) == (3, {"mean": 1.5}, 7)


def test_numbers_without_names_are_refused_and_weights_are_read(tmp_path: Path) -> None:
    model, optimizer = trained()
    dcp.save(numbered(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    state = open_dcp(tmp_path)
    Comparison().equal(read_whole(state, "model/up.weight"), model.up.weight).require()
    with pytest.raises(CheckpointError, match=r"numbers its 7 parameters, in the order .*give their names"):
        state.content(lambda name: None)
    with pytest.raises(CheckpointError, match=r"numbers 7 parameters, and 2 names are given"):
        open_dcp(tmp_path, ["a", "b"]).content(lambda name: None)
    plain = nn.Linear(3, 2)  # a model of parameters alone: their shapes tell
    alone = torch.optim.AdamW(plain.parameters())
    plain(torch.ones(1, 3)).sum().backward()
    alone.step()
    dcp.save(numbered(plain, alone), checkpoint_id=tmp_path / "plain", no_dist=True)
    found = plain_optimizer_state(open_dcp(tmp_path / "plain"))
    Comparison().equal(found["state"], alone.state_dict()["state"]).require()


@pytest.mark.parametrize(
    ("tree", "names", "user"),
    [
        ({"net": {"w": 1.0, "b": 2.0}, "epoch": 3}, {"b", "w"}, {"epoch"}),
        ({"state_dict": {"model.w": 1.0}, "seen": 2.0}, {"model.w"}, {"seen"}),
        ({"model.w": 1.0, "model.b": 2.0, "head": 3.0}, {"head", "model.b", "model.w"}, set()),
        ({"model.w": 1.0, "lr_scheduler": {"last": 4}}, {"model.w"}, {"lr_scheduler.last"}),
        ({"one": {"w": 1.0}, "two": {"w": 2.0}}, set(), {"one.w", "two.w"}),
    ],
)
def test_what_keys_mean_follows_from_their_paths(
    tmp_path: Path, tree: dict[str, Any], names: set[str], user: set[str]
) -> None:
    def made(held: Any) -> Any:
        if isinstance(held, dict):
            return {key: made(value) for key, value in held.items()}
        return torch.full((2,), held) if isinstance(held, float) else held

    dcp.save(made(tree), checkpoint_id=tmp_path, no_dist=True)
    state = open_dcp(tmp_path)
    assert set(state.names("model")) == names
    assert set(state.content(lambda name: read_whole(state, name))["user"] or ()) == user


@pytest.mark.parametrize(("prefix", "names"), [("model.", {"a", "b.c"}), ("net.", {"net.a", "net.b.c"})])
def test_keys_without_paths_are_told_by_their_dots(tmp_path: Path, prefix: str, names: set[str]) -> None:
    keys = {f"{prefix}{name}": torch.ones(2) for name in ("a", "b.c")} | {
        "optim.state.a.momentum_buffer": torch.ones(2)
    }
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(keys, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    state = open_dcp(tmp_path)
    assert set(state.names("model")) == names
    assert state.names("optimizer0") == ["momentum_buffer/a"]


class Harm:
    """What a pickle can do where it is read: leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_runs_something_does_not(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "object": Harm(tmp_path / "ran")}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    state = open_dcp(tmp_path / "dcp")
    Comparison().equal(read_whole(state, "model/w"), torch.ones(2)).require()
    with pytest.warns(PlanWarning, match="object needs a pickle to be read, which may run anything, and is left out"):
        assert state.content(lambda name: None)["user"] is None
    whole = (tmp_path / "dcp" / ".metadata").read_bytes()
    for harmful in (pickle.dumps(Harm(tmp_path / "ran")), pickle.dumps([pickle.loads(whole), Harm(tmp_path / "ran")])):
        (tmp_path / "dcp" / ".metadata").write_bytes(harmful)
        with pytest.raises(CheckpointError, match=r"\.metadata names \w+\.system, which is none of DCP's records"):
            open_dcp(tmp_path / "dcp")
    for name in ("builtins.eval", "torch.load", "torch.distributed.checkpoint.metadata.os", "collections.Counter"):
        module, _, last = name.rpartition(".")
        (tmp_path / "dcp" / ".metadata").write_bytes(f"c{module}\n{last}\n.".encode())
        with pytest.raises(CheckpointError, match=f"names {name}, which is none of DCP's records"):
            open_dcp(tmp_path / "dcp")
    assert not (tmp_path / "ran").exists()


def test_a_pickle_cannot_change_the_classes_of_torch(tmp_path: Path) -> None:
    before = dict(vars(dcp.Metadata))
    data = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}(X\x08\x00\x00\x00__init__ctorch\nSize\nutb."
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match="no metadata of a DCP folder, or damaged"):
        open_dcp(tmp_path)
    assert dict(vars(dcp.Metadata)) == before


def saved(path: Path) -> Path:
    model, optimizer = trained()
    dcp.save(nested(model, optimizer), checkpoint_id=path, no_dist=True)
    return next(path.glob("*.distcp"))


def changed(path: Path, change: Callable[[Any], None]) -> None:
    found = pickle.loads((path / ".metadata").read_bytes())
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    data = saved(tmp_path / "a")
    data.write_bytes(data.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=rf"{data.name}: the file has 2,000 bytes, and .metadata tells of"):
        open_dcp(tmp_path / "a")
    data.unlink()
    with pytest.raises(CheckpointError, match=rf".metadata names {data.name}, which is not in the folder"):
        open_dcp(tmp_path / "a")
    data = saved(tmp_path / "b")
    before = data.read_bytes()
    data.write_bytes(before + b"\0")
    with pytest.raises(CheckpointError, match=rf"{data.name}: the file has [\d,]+ bytes, and .metadata tells of"):
        open_dcp(tmp_path / "b")
    data.write_bytes(b"\0" * len(before))
    with pytest.raises(CheckpointError, match=rf"{data.name}: the chunk at byte [\d,]+ is damaged"):
        read_whole(open_dcp(tmp_path / "b"), "model/up.weight")
    whole = (tmp_path / "b" / ".metadata").read_bytes()
    for cut in (0, 10, len(whole) // 2):
        (tmp_path / "b" / ".metadata").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match=r"\.metadata: no metadata of a DCP folder, or damaged"):
            open_dcp(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"\.metadata: the metadata of the DCP folder cannot be read: No such"):
        open_dcp(tmp_path / "nowhere")


def test_any_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    """By the checksums of the archives that torch writes; a file without them has zeros in their place."""
    data = saved(tmp_path / "a")
    before, random = data.read_bytes(), random_of(0)
    state = open_dcp(tmp_path / "a")
    labels = [f"{part}/{name}" for part in ("model", "optimizer0") for name in state.names(part)]
    whole = {label: read_whole(state, label) for label in labels}
    found = 0
    for _ in range(150):
        spoilt = bytearray(before)
        spoilt[random.randrange(len(before))] ^= 1 << random.randrange(8)
        data.write_bytes(spoilt)
        refused, same = "", whole
        try:
            state = open_dcp(tmp_path / "a")
            same = {label: read_whole(state, label) for label in labels}
        except CheckpointError as error:
            refused = str(error)
        assert not refused or data.name in refused
        found += bool(refused)
        Comparison("what is not refused").equal(same, whole).require()  # the bit is in what nobody reads
    assert found > 25
    torch.serialization.set_crc32_options(False)
    try:
        saved(tmp_path / "b")
    finally:
        torch.serialization.set_crc32_options(True)
    Comparison().equal(read_whole(open_dcp(tmp_path / "b"), "model/up.weight"), whole["model/up.weight"]).require()


def outside(found: Any) -> None:
    for told in found.storage_data.values():
        told.relative_path = "../elsewhere.distcp"


def on_another(found: Any) -> None:
    one, other = list(found.storage_data.values())[:2]
    one.offset = other.offset


def packed(found: Any) -> None:
    for told in found.storage_data.values():
        told.transform_descriptors = ["zstd"]


def half(found: Any) -> None:
    found.state_dict_metadata["model.up.weight"].chunks[0].sizes = torch.Size((3, 4))


def other_dtype(found: Any) -> None:
    found.state_dict_metadata["model.up.weight"].properties.dtype = torch.int32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (outside, r"a value is said to be in '../elsewhere.distcp', outside of the folder"),
        (on_another, r"tells of two values that share byte"),
        (packed, r"was written through zstd, which is not read here"),
        (half, r"model.up.weight of shape \(6, 4\) is not there whole: of 24 entries, 12 are in no piece"),
        (other_dtype, r"is damaged, or no tensor of torch.save: model/up.weight is not the tensor of I32"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path: Path, change: Callable[[Any], None], said: str) -> None:
    saved(tmp_path)
    changed(tmp_path, change)
    with pytest.raises(CheckpointError, match=said), warnings.catch_warnings():
        read_whole(open_dcp(tmp_path), "model/up.weight")
