"""One process, no launcher: the losses of unsplit runs, weights and plans, left in a folder for `semantics.py`."""

import json
import sys
from pathlib import Path

import torch
from models import batch, build
from safetensors.torch import save_file

import shardwright
import shardwright.torch as sw

FOLDER = Path(sys.argv[1])


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def losses(name: str, dropout: float, steps: int) -> list[float]:
    """A world of one with four microbatches."""
    sw.init({"microbatches": 4})
    sw.set_seed(5)
    model = sw.DistributedModel(build(name, dropout))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        found.append(float(train_step(model, batch(name, step)).all_reduce_mean()))
        optimizer.step()
    sw.shutdown()
    return found


def main() -> None:
    found = {f"{name} dropout": losses(name, 0.2, 4) for name in ("gpt2", "bert", "t5")}
    assert found["gpt2 dropout"] != losses("gpt2", 0.0, 4)
    for name in ("gpt2", "llama", "bert"):
        found[name] = losses(name, 0.0, 3)
        model = build(name)
        if name == "llama":
            save_file(model.state_dict(), FOLDER / "llama.safetensors")
        else:
            torch.save(model.state_dict(), FOLDER / f"{name}.pt")
        sample = {key: tensor[:2] for key, tensor in batch(name, 0).items()}
        graph = shardwright.capture(model, sample)
        ranks = [(2, f"{name}.plan.json")] + ([(4, "four.plan.json")] if name == "gpt2" else [])
        for pp, file in ranks:
            cluster = shardwright.Cluster("cpu", nodes=1, devices_per_node=pp)
            plan = shardwright.plan(
                graph, cluster, batch=8, pp=pp, tp=1, dp=1, microbatch=2, schedule="1f1b", recompute="none", shard=0
            )
            plan.save(FOLDER / file)
    (FOLDER / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
