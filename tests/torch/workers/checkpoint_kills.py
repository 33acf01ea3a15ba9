"""A run that saves after every step and goes on from the newest checkpoint; it may kill one of its ranks.

Usage: checkpoint_kills.py FOLDER OUT.json STEPS DEGREES [RANK:EVENT:NUMBER[:DELAY_S]]

DEGREES is JSON for `sw.init`. EVENT is a function of `os` that saving calls (fsync, replace), or step, or save, the
call of `sw.save_checkpoint`. The rank ends by SIGKILL where it comes to the NUMBERth of them, or so much later.
"""

import json
import os
import signal
import sys
import threading
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


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def deadly(number: int, delay_s: float, call: Any) -> Any:
    """The function, which ends the process the ``number``th time, or so many seconds later."""
    left = [number]

    def counted(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and delay_s:
            threading.Timer(delay_s, die).start()
        elif left[0] == 0:
            die()
        return call(*args, **options)

    return counted


def main() -> None:
    folder, out, steps, degrees, *kills = sys.argv[1:]
    dist.init_process_group("gloo")
    sw.init({"microbatches": 2, "ddp": True, "log_every": 0, **json.loads(degrees)})
    model = sw.DistributedModel(models.build("gpt2", dropout=0.1, layers=2))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    first = 0
    content = sw.resume_from_checkpoint(folder, missing_ok=True)
    if content is not None:
        first = content["step"]
    calls: dict[str, Any] = {"step": lambda: None, "save": sw.save_checkpoint}
    for kill in kills:
        rank, event, number, *delay = kill.split(":")
        if int(rank) != sw.rank():
            continue
        chosen = int(number), float(delay[0] if delay else 0)
        if event in calls:
            calls[event] = deadly(*chosen, calls[event])
        else:
            setattr(os, event, deadly(*chosen, getattr(os, event)))
    share = sw.rdp_rank(), sw.rdp_size()
    for step in range(first, int(steps)):
        calls["step"]()
        optimizer.zero_grad()
        own = {key: tensor.chunk(share[1])[share[0]] for key, tensor in models.batch("gpt2", step, 8).items()}
        train_step(model, own)
        optimizer.step()
        calls["save"](
            folder, f"step_{step + 1}", user_content={"step": step + 1}, num_kept_partial_checkpoints=2,
            background=step % 2 == 1,
        )  # fmt: skip
    state = model.state_dict()
    digest = digest_of(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    sw.shutdown()
    kept = [tag for tag, _ in folders.complete(Path(folder))]
    leave({"first": first, "digest": digest, "kept": kept}, out)


main()
