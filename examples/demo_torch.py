"""The PyTorch half of the demo: every rank runs this, and rank 0 prints one line of JSON for each step.

torchrun --nproc-per-node 4 examples/demo_torch.py PLAN.json STEPS
"""

import json
import sys
from collections.abc import Iterator

import numpy as np
import torch
import twins

import shardwright.torch as sw


def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(), lr=twins.LEARNING_RATE, eps=twins.EPSILON, weight_decay=twins.WEIGHT_DECAY
    )


def reference(batches: np.ndarray) -> Iterator[float]:
    """Plain PyTorch in one process: the unsplit model, one microbatch after the other."""
    model = twins.torch_model()
    adamw = optimizer(model)
    for batch in batches:
        adamw.zero_grad()
        losses = []
        for tokens in twins.microbatches(batch):
            loss = model(**twins.torch_batch(tokens)).loss
            (loss * twins.MICROBATCH / twins.BATCH).backward()
            losses.append(loss.item())
        adamw.step()
        yield float(np.mean(losses))


@sw.step
def train_step(model: sw.DistributedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def planned(plan: str, batches: np.ndarray) -> Iterator[float]:
    """The same under the plan: this rank holds its stage, and takes its replica's share of every batch."""
    sw.init(plan=plan)
    model = sw.DistributedModel(twins.torch_model())
    adamw = sw.DistributedOptimizer(optimizer(model))
    share = twins.BATCH // sw.dp_size()
    for batch in batches:
        mine = batch[sw.dp_rank() * share : (sw.dp_rank() + 1) * share]
        adamw.zero_grad()
        loss = train_step(model, twins.torch_batch(mine))
        adamw.step()
        yield float(loss.all_reduce_mean())


def main() -> None:
    plan, steps = sys.argv[1], int(sys.argv[2])
    for step, loss in enumerate(planned(plan, twins.batches(steps))):
        if sw.rank() == 0:
            print(json.dumps({"step": step, "loss": loss}), flush=True)
    sw.shutdown()


if __name__ == "__main__":
    main()
