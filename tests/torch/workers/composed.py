"""Blocks computed again and blocks on the host, with divided gradients, stages, replicas and a tensor axis, all at
once: every step beside an unsplit run.

Usage: composed.py FOLDER OUT.json CASE..., on eight ranks; a case is SCHEDULE:VIRTUAL_STAGES:POLICY:SHARD with a key of
`POLICIES`. The unsplit run keeps everything; it is this library's own in one process, whose dropout masks are those of
the logical tensors, and `reference` leaves its numbers for the launches.

    composed.py reference FOLDER
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from launched import leave, whole_gradients

import shardwright as core
import shardwright.torch as sw
from shardwright.backends.torch.memory import weight_gradients
from tests.comparison import Comparison

STEPS, DROPOUT, SAMPLES, LAYERS, DP = 3, 0.1, 16, 4, 2
DEGREES = {"pp": 2, "dp": DP, "tp": 2}
MICROBATCH = 2
POLICIES: dict[str, dict[str, Any]] = {
    "kept": {"recompute": "none"},
    # One block of each stage is on the host, and the other is computed again.
    "mixed": {"recompute": {"transformer.h.[02]": "offload", "transformer.h.[13]": "full"}},
    "full": {"recompute": "full"},
    "offloaded": {"recompute": {"transformer.h.*": "offload"}},
    "elementwise": {"recompute": "elementwise"},
    "two": {"recompute": {"transformer.h.[02]": "full", "transformer.h.[13]": "elementwise"}},
}


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def batch(step: int) -> dict[str, torch.Tensor]:
    return models.batch("gpt2", step, SAMPLES)


def train(share: tuple[int, int]) -> dict[str, Any]:
    """Losses, the first step's gradients and the last weights, whole, of a rank with one share of the batch."""
    sw.set_seed(5)
    model = sw.DistributedModel(models.build("gpt2", DROPOUT, LAYERS))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses: list[float] = []
    gradients: dict[str, torch.Tensor | None] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        own = {key: tensor.chunk(share[1])[share[0]] for key, tensor in batch(step).items()}
        losses.append(float(train_step(model, own).all_reduce_mean()))
        if step == 0:
            gradients = whole_gradients(model)
        optimizer.step()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    return {"losses": losses, "gradients": gradients, "state": state}


def planned(case: str) -> core.Plan:
    schedule, virtual, policy, shard = case.split(":")
    model = models.build("gpt2", DROPOUT, LAYERS)
    sample = {key: value[:MICROBATCH] for key, value in batch(0).items()}
    return core.plan(
        core.capture(model, sample), core.Cluster("cpu", devices_per_node=8), batch=SAMPLES, microbatch=MICROBATCH,
        precision="fp32", schedule=schedule, virtual_stages=int(virtual), shard=int(shard), **DEGREES,
        **POLICIES[policy],
    )  # fmt: skip


@contextmanager
def noting_what_is_put_off() -> Iterator[list[int]]:
    """The number of weight gradients that each W of this rank makes."""
    found: list[int] = []
    multiply = weight_gradients.Deferred.multiply

    def noted(self: weight_gradients.Deferred) -> None:
        found.append(len(self._factors))
        multiply(self)

    weight_gradients.Deferred.multiply = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        weight_gradients.Deferred.multiply = multiply  # type: ignore[method-assign]


def run(case: str, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    path = folder / f"{case}.json"
    if dist.get_rank() == 0:
        planned(case).save(path)
    dist.barrier()
    sw.init(plan=str(path), wait_timeout_s=120.0)
    plan = core.Plan.load(path)
    with noting_what_is_put_off() as put_off:
        found = train((sw.rdp_rank(), DP))
    same = Comparison(case).losses(found["losses"], expected["losses"], moving=1e-4)
    same.gradients(found["gradients"], expected["gradients"], part=True)
    same.values(found["state"], expected["state"], relative=0.0, absolute=1e-4, what="weights")
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, same.report())
    fewest: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fewest, min(put_off, default=0))
    kinds = {part.kind.value for order in plan.build_schedule().table for a in order for part in a.flat}
    sw.shutdown()
    modes = [[plan.unit_modes[unit] for unit in units] for units in plan.stage_units]
    return {"same": every, "modes": modes, "kinds": sorted(kinds), "shard": plan.decision.shard,
            "put off": min(fewest)}  # fmt: skip


def main() -> None:
    if sys.argv[1] == "reference":
        sw.init({"microbatches": SAMPLES // MICROBATCH})
        torch.save(train((0, 1)), Path(sys.argv[2]) / "expected.pt")
        sw.shutdown()
        return
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    expected = torch.load(folder / "expected.pt", weights_only=True)
    leave({case: run(case, folder, expected) for case in sys.argv[3:]}, out)


if __name__ == "__main__":
    main()
