"""Trains twins of JAX models, and goes on from checkpoints of JAX runs.

Usage: crossing.py FOLDER OUT.json start STEPS DEGREES MODEL...
       crossing.py FOLDER OUT.json back STEPS DEGREES MODEL...

``start`` trains STEPS steps, writes a checkpoint MODEL-torch, and trains twice as many more. ``back`` compares
MODEL-jax with the state that MODEL-torch was written from, and goes on from MODEL-away. DEGREES is JSON for `sw.init`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launched import leave

import shardwright.torch as sw
from tests.comparison import Comparison
from tests.twins import crossing
from tests.twins.crossing import NAMES


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)["loss"]
    model.backward(loss)
    return loss


class Run:
    def __init__(self, name: str, degrees: dict[str, Any]) -> None:
        sw.init({"ddp": True, "microbatches": 2, "log_every": 0, **degrees})
        self.name = name
        self.model = sw.DistributedModel(crossing.torch_model(name))
        plain = torch.optim.AdamW(
            self.model.parameters(), lr=crossing.RATE, betas=crossing.BETAS, eps=crossing.EPSILON,
            weight_decay=crossing.DECAY,
        )  # fmt: skip
        self.optimizer = sw.DistributedOptimizer(plain)

    def steps(self, first: int, end: int) -> list[float]:
        losses = []
        share = sw.rdp_rank(), sw.rdp_size()
        for step in range(first, end):
            self.optimizer.zero_grad()
            own = {k: v.chunk(share[1])[share[0]] for k, v in crossing.torch_inputs(self.name, step).items()}
            losses.append(float(train_step(self.model, own).all_reduce_mean()))
            self.optimizer.step()
        return losses

    def state(self) -> dict[str, Any]:
        found = {f"model.{key}": value.clone() for key, value in self.model.state_dict().items()}
        for key, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{key}.{kind}": torch.as_tensor(value).clone() for kind, value in states.items()}
        return found


dist.init_process_group("gloo")
folder, out, mode, given, degrees, *models = sys.argv[1:]
steps = int(given)
results: dict[str, Any] = {}
for name in models:
    run = Run(name, json.loads(degrees))
    if mode == "start":
        run.steps(0, steps)
        kept = run.state()
        sw.save_checkpoint(folder, f"{name}-torch", user_content={"data": torch.arange(3)})
        if sw.rank() == 0:
            torch.save(kept, Path(folder) / f"{name}.pt")
        results[name] = run.steps(steps, 3 * steps)
    else:
        user = sw.resume_from_checkpoint(folder, f"{name}-jax", names=NAMES[name])
        found, kept = run.state(), torch.load(Path(folder) / f"{name}.pt", weights_only=True)
        assert found.keys() == kept.keys(), found.keys() ^ kept.keys()
        comparison = Comparison(f"{name}, there and back").equal(found, kept)
        assert user["data"].tolist() == [0, 1, 2]
        if name in crossing.OPTIONS_CROSS:
            for group in run.optimizer.param_groups:
                group |= {"lr": 0.5, "betas": (0.5, 0.5), "eps": 0.1, "weight_decay": 0.9}
        sw.resume_from_checkpoint(folder, f"{name}-away", names=NAMES[name])
        results[name] = {"losses": run.steps(2 * steps, 3 * steps), "state": comparison.report()}
    sw.shutdown()
leave(results, out)
