"""Steps whose batch counts on pipeline rank 0 alone, over two stages of two replicas."""

from collections import UserDict
from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.distributed as dist

import shardwright.compat.modelparallel as smp
import shardwright.torch as sw
from shardwright.core.errors import MissingCapabilityError, PlanWarning, ShardwrightError


@smp.step(non_split_inputs=["scale"])
def train_step(
    model: Any, batch: dict[str, torch.Tensor], scale: torch.Tensor, extra: Any = None, factors: Any = None
) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss * scale * (1 if extra is None else extra)
    if factors is not None:
        loss = loss * torch.from_numpy(factors["of all"]).sum() * float(factors["one"])
    model.backward(loss, reduction="mean")
    return loss


def losses(given: Any, is_last: bool = False) -> list[float]:
    """Those of steps whose batch ``given`` makes of that which counts."""
    smp.init({"partitions": 2, "ddp": True, "microbatches": 2})
    torch.manual_seed(0)
    model = smp.DistributedModel(models.build("gpt2"))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for step in range(3):
        optimizer.zero_grad()
        share = smp.rdp_rank(), smp.rdp_size()
        batch = {key: tensor.chunk(share[1])[share[0]] for key, tensor in models.batch("gpt2", step, 8).items()}
        scale = torch.tensor(2.0)
        if smp.pp_rank():
            batch, scale = {key: given(tensor) for key, tensor in batch.items()}, torch.tensor(float("nan"))
        if step == 2:
            batch = UserDict(batch)  # as tokenizers return
        is_first, factors = smp.pp_rank() == 0, None
        if step:
            of_all = np.full(2 if is_first else 9, step, np.float32)
            factors = {"of all": of_all, "one": np.float64(step / 2 * is_first)}
        found.append(float(train_step(model, batch, scale, 0.5 if is_first else 7.0, factors).reduce_mean()))
        optimizer.step()
    if is_last:
        with pytest.raises(MissingCapabilityError, match="broadcast_buffers=False: the 2 replicas"):
            smp.DistributedModel(torch.nn.BatchNorm1d(2), broadcast_buffers=False)
        with pytest.raises(ShardwrightError, match="another form than on pipeline rank 0"):
            train_step(model, batch if smp.pp_rank() == 0 else {}, scale)
        for unlike in (np.ma.masked_array(of_all, of_all > 9), of_all.view(np.recarray)):
            with pytest.raises(ShardwrightError, match=f"is given a numpy.*{type(unlike).__name__}, of which"):
                train_step(model, batch, scale, 0.5, {"of all": unlike, "one": np.float64(1.0)})
        assert float(train_step(model, batch, scale, 0.5, factors).reduce_mean()) > 0, "and then it goes on"
    sw.shutdown()
    return found


with pytest.warns(PlanWarning, match="detach_outputs=False has no effect"):
    smp.step(detach_outputs=False)
dist.init_process_group("gloo")
expected = losses(lambda tensor: tensor)
assert all(loss == loss for loss in expected), "numbers"
assert expected == losses(lambda tensor: torch.empty(0, 3, 1, dtype=torch.int16))
assert expected == losses(torch.zeros_like, is_last=True)
if dist.get_rank() == 0:
    print("all checked")
