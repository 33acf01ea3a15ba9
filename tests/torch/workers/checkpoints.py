"""Saves checkpoints under some plans, and goes on from them under others.

Usage: checkpoints.py FOLDER OUT.json save PLAN...
       checkpoints.py FOLDER OUT.json load PLAN... -- SAVED...

A plan is a key of `PLANS`, for the number of ranks of the launch; checkpoints have the tags of the plans that wrote
them. Every run trains `BEFORE` steps, is saved, and trains `AFTER` more: what they leave in FOLDER is what a run that
goes on under another plan is compared with.
"""

import sys
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from launched import leave

import shardwright.torch as sw
from tests.comparison import Comparison

BEFORE, AFTER, SAMPLES, MICROBATCHES = 3, 5, 8, 4
PLANS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp2": {"pipeline_parallel_degree": 2},
    "dp2": {},
    "dp2-s1": {"shard": 1},
    "dp2-s3": {"shard": 3},
    "tp2": {"tensor_parallel_degree": 2},
    "pp2-v2": {"pipeline_parallel_degree": 2, "virtual_stages": 2, "pipeline": "interleaved-1f1b"},
    "pp2-dp2-s2": {"pipeline_parallel_degree": 2, "shard": 2},
    "tp2-dp2-s3": {"tensor_parallel_degree": 2, "shard": 3},
    "pp2-tp2": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2},
    "dp4-s3-groups": {"shard": 3, "shard_group": 2},
    "pp4": {"pipeline_parallel_degree": 4},
    "pp2-tp2-dp2-s1": {"pipeline_parallel_degree": 2, "tensor_parallel_degree": 2, "shard": 1},
}  # fmt: skip


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


class Run:
    """A training run under a plan."""

    def __init__(self, plan: str) -> None:
        own = PLANS[plan]
        split = own.get("pipeline_parallel_degree", 1) * own.get("tensor_parallel_degree", 1)
        # The same microbatches of all replicas together under every plan: their dropout is the same then.
        sw.init({"ddp": True, "microbatches": MICROBATCHES * split // dist.get_world_size(), **own})
        sw.set_seed(5)
        self.model = sw.DistributedModel(models.build("gpt2", dropout=0.1))
        parameters = self.model.parameters()
        self.optimizer = sw.DistributedOptimizer(torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 5], gamma=0.5)

    def loss(self, step: int) -> float:
        """The loss of a step, with gradients."""
        self.optimizer.zero_grad()
        share = sw.rdp_rank(), sw.rdp_size()
        own = {key: tensor.chunk(share[1])[share[0]] for key, tensor in models.batch("gpt2", step, SAMPLES).items()}
        return float(train_step(self.model, own).all_reduce_mean())

    def steps(self, first: int, end: int) -> list[float]:
        losses = []
        for step in range(first, end):
            losses.append(self.loss(step))
            self.optimizer.step()
            self.scheduler.step()
        return losses

    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and states of the optimizer, whole."""
        found = {f"model.{name}": value.clone() for name, value in self.model.state_dict().items()}
        for name, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{key}.{name}": torch.as_tensor(value).clone() for key, value in states.items()}
        return found


def save(plan: str, folder: Path) -> None:
    run = Run(plan)
    run.steps(0, BEFORE)
    user = {"scheduler": run.scheduler.state_dict(), "a tensor": torch.arange(4), "seen": BEFORE * SAMPLES}
    sw.save_checkpoint(folder / "checkpoints", plan, user_content=user, partial=plan != "one")
    state = run.state()
    losses = run.steps(BEFORE, BEFORE + AFTER)
    if sw.rank() == 0:
        torch.save({"state": state, "losses": losses, "last": None}, folder / f"{plan}.pt")
    last = run.state()
    if sw.rank() == 0:
        torch.save({"state": state, "losses": losses, "last": last}, folder / f"{plan}.pt")
    sw.shutdown()


def load(plan: str, saved: str, folder: Path) -> dict[str, Any]:
    expected = torch.load(folder / f"{saved}.pt", weights_only=True)
    run = Run(plan)
    user = sw.resume_from_checkpoint(folder / "checkpoints", saved)
    run.scheduler.load_state_dict(user["scheduler"])
    at_once = {f"model.{name}": value.clone() for name, value in run.model.state_dict().items()}
    run.loss(BEFORE)  # the first step cuts the parameters, and the states with them
    state = run.state()
    run.model.runtime.split_model.steps_run = BEFORE
    losses = run.steps(BEFORE, BEFORE + AFTER)
    last = run.state()
    own = {name: value for name, value in expected["state"].items() if name in at_once}
    result = {
        "weights": all(torch.equal(at_once[name], value) for name, value in own.items()) and len(own) == len(at_once),
        "state": [n for n, value in expected["state"].items() if n not in state or not torch.equal(state[n], value)],
        "more": sorted(set(state) - set(expected["state"])),
        "last": [n for n, value in expected["last"].items() if not torch.equal(last[n], value)],
        "user": user["seen"] == BEFORE * SAMPLES and torch.equal(user["a tensor"], torch.arange(4)),
        "compared": Comparison(f"{saved} to {plan}").losses(losses, expected["losses"], moving=1e-3).report(),
    }
    sw.shutdown()
    return result


def main() -> None:
    folder, out, kind, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    if kind == "save":
        for plan in names:
            save(plan, Path(folder))
    else:
        plans, saved = names[: names.index("--")], names[names.index("--") + 1 :]
        for plan in plans:
            for one in saved:
                results[f"{one} to {plan}"] = load(plan, one, Path(folder))
    leave(results, out)


main()
