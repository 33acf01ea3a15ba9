"""Checkpoints of runs of several processes: `python -m tests.jax.process_checkpoints RANK PROCESSES PORT FOLDER`.

Trains under one plan, saves, and goes on under another; then does wrong what can be done wrong, on one process alone.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import shardwright.jax as sw
from shardwright.core.errors import CheckpointError, DisagreementError
from tests.jax import spmd_model
from tests.jax.process_training import optimizer, spread

BEFORE, AFTER = 2, 3
PLANS: dict[str, dict[str, Any]] = {
    "stages": {"pp": 2, "dp": 2, "schedule": "1f1b"}, "replicas": {"pp": 1, "dp": 4, "shard": 3},
    "one-program": {"pp": 2, "dp": 2, "schedule": "gpipe"},
}  # fmt: skip
"""Stages of one process each; replicas that share their state over both; and stages in one program."""
GOES_ON = {"stages": "replicas", "replicas": "one-program", "one-program": "stages"}
"""The other plan under which each goes on."""


def training(name: str, devices: Any) -> tuple[sw.TrainStep, sw.TrainState]:
    devices = spread(devices) if name == "replicas" else devices
    plan, one_program = spmd_model.plan_of(4, **PLANS[name]), name == "one-program"
    train = sw.train_step(spmd_model.loss_fn, optimizer(), plan, devices=devices, log_every=0, one_program=one_program)
    return train, train.init(spmd_model.maker(4))


def steps(train: sw.TrainStep, state: sw.TrainState, first: int, end: int) -> tuple[list[float], sw.TrainState]:
    losses = []
    for batch in spmd_model.batches(end)[first:]:
        state, loss = train(state, batch)
        losses.append(float(loss))
    return losses, state


def refused(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """Require that a call is refused so."""
    with pytest.raises(kind, match=re.escape(text)):
        call()


def main(rank: int, processes: int, port: int, folder: str) -> None:
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    sw.init(f"127.0.0.1:{port}", processes, rank)
    losses: dict[str, list[float]] = {}
    for name, other in GOES_ON.items():
        train, state = training(name, jax.devices())
        _, state = steps(train, state, 0, BEFORE)
        train.save_checkpoint(folder, name, state, {"seen": np.arange(3), "epoch": 1})
        losses[name], _ = steps(train, state, BEFORE, BEFORE + AFTER)
        for target in (name, other):
            again, empty = training(target, jax.devices())
            state, content = again.resume_from_checkpoint(folder, empty, name)
            assert content["epoch"] == 1
            assert content["seen"].tolist() == [0, 1, 2]
            losses[f"{name} to {target}"], state = steps(again, state, BEFORE, BEFORE + AFTER)
    kind = DisagreementError if rank else CheckpointError
    tag = "no tag" if rank == 0 else "bad"
    refused(kind, "tag='no tag'", lambda: again.save_checkpoint(folder, tag, state))
    kind = CheckpointError if rank else DisagreementError
    given = object() if rank else None
    refused(kind, "class builtins.object", lambda: again.save_checkpoint(folder, "bad", state, given))
    refused(DisagreementError, "process 1 has", lambda: again.save_checkpoint(folder, "bad", state, {"mine": rank}))
    chosen = ("stages", "replicas")[rank]
    refused(
        DisagreementError, "resume_from_checkpoint(tag=", lambda: again.resume_from_checkpoint(folder, state, chosen)
    )
    assert not (Path(folder) / "bad").exists(), "nothing is left of what was refused"
    state, _ = again.resume_from_checkpoint(folder, state, "stages")
    if rank == 0:
        (Path(folder) / "losses.json").write_text(json.dumps(losses), encoding="utf-8")
    sw.shutdown()


if __name__ == "__main__":
    main(*(int(number) for number in sys.argv[1:4]), sys.argv[4])
