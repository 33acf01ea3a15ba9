"""Objects in files of `sw.save`, read by `sw.load` under the same partition and others: checks on two ranks."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from launched import chosen, run_checks

import shardwright.torch as sw
from shardwright.core.errors import CheckpointError
from tests.comparison import Comparison


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


class Run:
    def __init__(self, **keys: Any) -> None:
        sw.init({"ddp": True, "microbatches": 2, "log_every": 0, **keys})
        self.model = sw.DistributedModel(models.build("gpt2", layers=2))
        self.optimizer = sw.DistributedOptimizer(torch.optim.AdamW(self.model.parameters(), lr=1e-2))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        share = sw.rdp_rank(), sw.rdp_size()
        train_step(self.model, {k: v.chunk(share[1])[share[0]] for k, v in models.batch("gpt2", number, 8).items()})
        self.optimizer.step()

    def local(self) -> dict[str, Any]:
        return {"model": self.model.local_state_dict(), "optimizer": self.optimizer.local_state_dict(), "epoch": 3}

    def take(self, given: dict[str, Any]) -> None:
        assert given["epoch"] == 3
        self.model.load_state_dict(given["model"])
        self.optimizer.load_state_dict(given["optimizer"])

    def whole(self) -> dict[str, Any]:
        states = self.optimizer.state_dict()["state"]
        found = {f"{name}.{key}": value for name, held in states.items() for key, value in held.items()}
        return {name: value.clone() for name, value in (self.model.state_dict() | found).items()}


def folder() -> Path:
    """A folder that both ranks have."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(made, 0)
    return Path(made[0])


def saved(path: Path, **keys: Any) -> dict[str, Any]:
    """What a run holds after two steps, which is in the file."""
    run = Run(**keys)
    run.step(0)
    run.step(1)
    sw.save(run.local(), path, partial=True)
    sw.barrier()
    found = run.whole()
    sw.shutdown()
    return found


PP, TP = {"pipeline_parallel_degree": 2}, {"tensor_parallel_degree": 2}


def parts_of_stages_load_under_other_partitions() -> None:
    path = folder() / "checkpoint.pt"
    expected = saved(path, **PP)
    assert sorted(one.name for one in path.parent.iterdir()) == ["checkpoint.pt_0_0", "checkpoint.pt_1_0"]
    for keys in (PP, {}, TP, {"shard": 3}):
        run = Run(**keys)
        run.take(sw.load(path))
        weights = run.model.state_dict()
        Comparison(f"{keys}").equal(weights, {name: expected[name] for name in weights}).require()
        if keys is not TP:  # states along a tensor axis are cut, and put together, once a step has run
            Comparison(f"{keys}").equal(run.whole(), expected).require()
        sw.shutdown()


def divided_parts_load_where_they_were_saved() -> None:
    for keys, names in ((TP, ["part_0_0", "part_0_1"]), ({"shard": 3}, ["part_0_0_0", "part_0_0_1"])):
        path = folder() / "part"
        expected = saved(path, **keys)
        assert sorted(one.name for one in path.parent.iterdir()) == names
        run = Run(**keys)
        run.step(5)
        run.take(sw.load(path))
        Comparison(f"{keys}").equal(run.whole(), expected).require()
        sw.shutdown()
        sw.init(PP)
        with pytest.raises(CheckpointError, match=r"sw\.resume_from_checkpoint do that"):
            sw.load(path)
        sw.shutdown()


def whole_objects_are_one_file() -> None:
    path = folder() / "whole.pt"
    run = Run(**PP)
    run.step(0)
    state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict(), "epoch": 3}
    sw.save(state, path, partial=False)
    sw.barrier()
    expected = run.whole()
    sw.shutdown()
    run = Run()
    run.take(sw.load(path, partial=False))
    Comparison().equal(run.whole(), expected).require()
    sw.shutdown()


def values_of_a_rank_are_its_own() -> None:
    path = folder() / "own"
    sw.init(PP)
    sw.save({"rank": sw.rank()}, path)
    sw.barrier()
    assert sw.load(path) == {"rank": sw.rank()}
    sw.shutdown()
    sw.init({"ddp": True})
    with pytest.raises(CheckpointError, match="own/rank: the stages saved different values"):
        sw.load(path)
    sw.shutdown()


def what_is_wrong_is_refused() -> None:
    path = folder() / "wrong"
    sw.init(PP)
    with pytest.raises(CheckpointError, match=r"the object/f is of class .*Path"):
        sw.save({"f": Path()}, path)
    with pytest.raises(CheckpointError, match="there is no such file"):
        sw.load(path)
    sw.barrier()
    assert not list(path.parent.iterdir())
    own = path.with_name(f"wrong_{sw.pp_rank()}_0")
    wrong = (
        (lambda: torch.save({"a": 1}, own), r"no file of sw\.save"),
        (lambda: own.write_bytes(b"broken"), "cannot be read"),
        (lambda: torch.save(Path(), own), "would run what is in them"),
    )
    for write, said in wrong:
        sw.barrier()
        write()
        sw.barrier()
        with pytest.raises(CheckpointError, match=said):
            sw.load(path)
    sw.barrier()
    sw.save({"a": torch.ones(2)}, path)
    sw.barrier()
    assert sw.load(path)["a"].tolist() == [1, 1]
    sw.shutdown()
    assert sorted(os.listdir(path.parent)) == ["wrong_0_0", "wrong_1_0"], "nothing is left aside"


def a_part_of_another_rank_is_no_whole_model() -> None:
    """Replicas that hold the whole model load whole state dicts alone, which they compare."""
    run = Run()
    run.step(0)
    state = run.model.state_dict()
    if sw.rank():
        state = {name: tensor + 1 for name, tensor in state.items()}
    run.model.load_state_dict(state)
    with pytest.raises(sw.ShardwrightError, match="loaded"):
        run.step(1)
    sw.shutdown()


CHECKS: tuple[Callable[[], None], ...] = (
    parts_of_stages_load_under_other_partitions,
    divided_parts_load_where_they_were_saved,
    whole_objects_are_one_file,
    values_of_a_rank_are_its_own,
    what_is_wrong_is_refused,
    a_part_of_another_rank_is_no_whole_model,
)

run_checks(chosen(CHECKS))
