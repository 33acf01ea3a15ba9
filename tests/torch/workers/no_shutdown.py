"""A script that ends without sw.shutdown(); what is left of its process group is printed last."""

import atexit
import sys

import torch
import torch.distributed as dist

import shardwright.torch as sw

atexit.register(lambda: print(f"in a group at the end: {dist.is_initialized()}", flush=True))
sw.init({})
model = sw.DistributedModel(torch.nn.Linear(4, 4))


@sw.step
def train_step(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss


train_step(model, torch.ones(2, 4))
if sys.argv[1:] == ["fail"]:
    raise ValueError("as a user's script may")
