"""What goes wrong around checkpoints on two ranks: each check wants the error that says so, on every rank.

Usage: checkpoint_misuse.py FOLDER
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from launched import run_checks

import shardwright.torch as sw
from shardwright.core.checkpoint import folder as folders
from shardwright.core.errors import CheckpointError, DisagreementError, ShardwrightError
from shardwright.torch import session as sessions

FOLDER = Path(sys.argv[1])


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def start(name: str = "gpt2", layers: int = 2, kind: Any = torch.optim.AdamW, **config: Any) -> tuple[Any, Any]:
    sw.init({"ddp": True, "microbatches": 2, **config})
    model = sw.DistributedModel(models.build(name, layers=layers))
    return model, sw.DistributedOptimizer(kind(model.parameters(), lr=1e-3))


def step(model: Any, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    train_step(model, models.batch("gpt2", number, 4))
    optimizer.step()


def refused(call: Callable[[], Any], *said: str, error: type[Exception] = ShardwrightError) -> None:
    with pytest.raises(error) as found:
        call()
    missing = [text for text in said if text not in str(found.value)]
    assert not missing, f"{missing} not in: {found.value}"


def saved() -> None:
    refused(lambda: sw.save_checkpoint(FOLDER, "a"), "not initialised")
    sw.init({"ddp": True})
    refused(lambda: sw.save_checkpoint(FOLDER, "a"), "wrap the model first")
    sw.shutdown()
    model, optimizer = start()
    step(model, optimizer)
    sw.save_checkpoint(FOLDER, "good", model=model, optimizer=optimizer, user_content={"epoch": 1})
    mine = {"seed": sw.rank()}
    refused(lambda: sw.save_checkpoint(FOLDER, "a", user_content=mine), "user_content", "0", error=DisagreementError)
    refused(lambda: sw.save_checkpoint(FOLDER, f"of-{sw.rank()}"), "save_checkpoint", error=DisagreementError)
    refused(lambda: sw.save_checkpoint(FOLDER, "a/b"), "names a folder")
    refused(lambda: sw.save_checkpoint(FOLDER, "a", user_content=object()), "only a pickle would hold")
    refused(lambda: sw.save_checkpoint(FOLDER, "a", model=models.build("gpt2")), "expected the sw.DistributedModel")
    plain = torch.optim.SGD(model.local_parameters(), lr=1.0)
    refused(lambda: sw.save_checkpoint(FOLDER, "a", optimizer=plain), "wrap it")
    refused(lambda: sw.save_checkpoint("/dev/null/here", "a"), "no checkpoint can be written" if not sw.rank() else "")
    assert [tag for tag, _ in folders.complete(FOLDER)] == ["good"]
    assert sw.resume_from_checkpoint(FOLDER) == {"epoch": 1}
    sw.shutdown()


def one_rank_fails() -> None:
    model, optimizer = start()
    step(model, optimizer)
    before = folders.write_rank

    def full(*args: Any) -> None:
        raise CheckpointError("No space left on device")

    folders.write_rank = full if sw.rank() == 1 else before
    said = "No space left on device"
    refused(lambda: sw.save_checkpoint(FOLDER, "full"), said, error=CheckpointError if sw.rank() else DisagreementError)
    sw.barrier()
    assert not any(FOLDER.glob("full/*")), "nothing of it is left"
    pending = sw.save_checkpoint(FOLDER, "full", background=True)
    session = sessions.current()
    session.config = dataclasses.replace(session.config, wait_timeout_s=1.0)
    folders.write_rank = before
    refused(pending.wait, "No space left", "" if sw.rank() else "rank 1 could not write", error=CheckpointError)
    refused(pending.wait, "No space left", error=CheckpointError)
    sw.resume_from_checkpoint(FOLDER, "good")
    sw.shutdown()


def of_something_else() -> None:
    start("gpt2", layers=3)
    refused(lambda: sw.resume_from_checkpoint(FOLDER, "good"), "lacks transformer.h.2")
    sw.shutdown()
    model, _ = start("gpt2", layers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused(lambda: sw.resume_from_checkpoint(FOLDER, "good", strict=False), "group 0 of the optimizer")
    sw.resume_from_checkpoint(FOLDER, "good", strict=False, load_optimizer=False)
    after = model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any(name.startswith("transformer.h.2.") for name in changed)
    sw.shutdown()
    start("gpt2", kind=torch.optim.SGD)
    refused(lambda: sw.resume_from_checkpoint(FOLDER, "good"), "AdamW", "SGD", "load_optimizer=False")
    refused(lambda: sw.resume_from_checkpoint(FOLDER, "god"), "did you mean 'good'")
    refused(lambda: sw.resume_from_checkpoint(FOLDER / "nowhere"), "no such folder")
    sw.shutdown()


def damaged_on_one_rank() -> None:
    """A damaged file is found by the rank that reads it, and no rank goes on."""
    model, optimizer = start(pipeline_parallel_degree=2)
    step(model, optimizer)
    sw.save_checkpoint(FOLDER, "damaged")
    if sw.rank() == 0:
        (file,) = (FOLDER / "damaged").glob("model-00001.*")
        data = bytearray(file.read_bytes())
        data[-3] ^= 16
        file.write_bytes(data)
    dist.barrier()
    refused(lambda: sw.resume_from_checkpoint(FOLDER, "damaged"), "are not those that were written", "model-00001")
    sw.shutdown()


def in_the_background() -> None:
    """What is saved is the state of the call, though training goes on; the next one waits for it."""
    model, optimizer = start(pipeline_parallel_degree=2, shard=0)
    step(model, optimizer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    before = folders.write_rank

    def slow(*args: Any) -> None:
        time.sleep(0.5)
        before(*args)

    folders.write_rank = slow
    pending = sw.save_checkpoint(FOLDER, "behind", background=True)
    for number in range(3):
        step(model, optimizer, number)
    folders.write_rank = before
    sw.resume_from_checkpoint(FOLDER, "good")  # waits
    assert pending.is_done
    sw.resume_from_checkpoint(FOLDER, "behind")
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    pending = sw.save_checkpoint(FOLDER, "last", background=True, num_kept_partial_checkpoints=2)
    sw.shutdown()
    assert pending.is_done
    if int(os.environ["RANK"]) == 0:
        assert [tag for tag, _ in folders.complete(FOLDER)] == ["behind", "last"]


def on_the_meta_device() -> None:
    """A model without memory takes its weights from the checkpoint, under another plan."""
    model, _ = start(pipeline_parallel_degree=2)
    sw.resume_from_checkpoint(FOLDER, "last")
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    sw.shutdown()
    for config in ({"pipeline_parallel_degree": 2}, {"shard": 3}):
        sw.init({"ddp": True, "microbatches": 2, **config})
        with sw.delay_param_initialization():
            built = models.build("gpt2", layers=2)
        model = sw.DistributedModel(built)
        sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        sw.resume_from_checkpoint(FOLDER, "last")
        train_step(model, models.batch("gpt2", 0, 4))
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items()), config
        sw.shutdown()


CHECKS = (
    saved,
    one_rank_fails,
    of_something_else,
    damaged_on_one_rank,
    in_the_background,
    on_the_meta_device,
)


run_checks(CHECKS)
