"""A run that saves after every step and goes on from the newest checkpoint; it may kill one of its ranks.

Usage: checkpoint_kills.py FOLDER OUT.json STEPS [RANK:EVENT:NUMBER]

EVENT is a function of `os` that saving calls (fsync, replace), or step. The rank ends by SIGKILL where it comes to the
NUMBERth of them.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from launched import leave

import shardwright.torch as sw
from shardwright.core.checkpoint import folder as folders
from shardwright.core.checkpoint.tensor_file import digest_of


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def deadly(number: int, call: Any) -> Any:
    """The function, which ends the process the ``number``th time."""
    left = [number]

    def counted(*args: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args)

    return counted


def main() -> None:
    folder, out, steps, *kills = sys.argv[1:]
    dist.init_process_group("gloo")
    sw.init({"pipeline_parallel_degree": 2, "microbatches": 2, "ddp": True})
    model = sw.DistributedModel(models.build("gpt2", dropout=0.1, layers=2))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    first = 0
    if folders.complete(Path(folder)):
        first = sw.resume_from_checkpoint(folder)["step"]
    begin = [lambda: None]
    for kill in kills:
        rank, event, number = kill.split(":")
        if int(rank) != sw.rank():
            continue
        if event == "step":
            begin[0] = deadly(int(number), begin[0])
        else:
            setattr(os, event, deadly(int(number), getattr(os, event)))
    for step in range(first, int(steps)):
        begin[0]()
        optimizer.zero_grad()
        train_step(model, models.batch("gpt2", step, 4))
        optimizer.step()
        sw.save_checkpoint(
            folder, f"step_{step + 1}", user_content={"step": step + 1}, num_kept_partial_checkpoints=2,
            background=step % 2 == 1,
        )  # fmt: skip
    state = model.state_dict()
    digest = digest_of(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    sw.shutdown()
    kept = [tag for tag, _ in folders.complete(Path(folder))]
    leave({"first": first, "digest": digest, "kept": kept}, out)


main()
