"""Trains a model for 20 steps in one process: under a plan in fp8, by torch alone with its linear layers computed by
hand, and under a plan in bf16. Usage: fp8_training.py MODEL OUT.json
"""

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from models import batch, build
from torch import nn
from transformers.pytorch_utils import Conv1D

import shardwright.torch as sw
from tests import fp8_by_hand as by_hand

STEPS, MICROBATCHES = 20, 2


class ByHand(torch.autograd.Function):
    """The product of rows and a weight [out, in], in NumPy."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, weight)
        return _tensor(by_hand.product(_narrow(rows), _narrow(weight)), rows)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        _, of_rows, of_weight = by_hand.linear(*(t.double().cpu().numpy() for t in (rows, weight, gradient)))
        return _tensor(of_rows, rows), _tensor(of_weight, weight)


def _narrow(tensor: torch.Tensor) -> Any:
    return by_hand.narrow(tensor.double().cpu().numpy(), by_hand.FORWARD)


def _tensor(values: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, like.dtype)


def in_fp8_by_hand(model: nn.Module, head: str = "lm_head") -> nn.Module:
    """The model, whose linear layers but the head compute by hand."""

    def forward_of(layer: Any) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight
            made = ByHand.apply(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)
            return made if layer.bias is None else made + layer.bias

        return forward

    for path, layer in model.named_modules():
        if isinstance(layer, (nn.Linear, Conv1D)) and path != head:
            layer.forward = forward_of(layer)
    return model


def plain_run(name: str) -> list[float]:
    """Torch alone, in bf16 on copies of float32 parameters, with float32 sums."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [{k: v.chunk(MICROBATCHES)[i] for k, v in batch(name, step % 4).items()} for i in range(MICROBATCHES)]
        total = 0.0
        for part in parts:
            inside = in_fp8_by_hand(copy.deepcopy(model))
            for parameter in inside.parameters():  # buffers stay as they are
                parameter.data = parameter.data.to(torch.bfloat16)
            loss = inside(**part).loss
            (loss / MICROBATCHES).backward()
            total += float(loss)
            for own, copied in zip(model.parameters(), inside.parameters(), strict=True):
                added = copied.grad.float()
                own.grad = added if own.grad is None else own.grad.add_(added)
        losses.append(total / MICROBATCHES)
        optimizer.step()
    return losses


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def own_run(name: str, **keys: Any) -> list[float]:
    sw.init({"microbatches": MICROBATCHES, "log_every": 0, "cluster": "h100"} | keys)
    model = sw.DistributedModel(build(name))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(train_step(model, batch(name, step % 4)).all_reduce_mean()))
        optimizer.step()
    sw.shutdown()
    return losses


def main() -> None:
    warnings.simplefilter("ignore")
    name, out = sys.argv[1:]
    ours = own_run(name, fp8=True)
    found = {"ours": ours, "by hand": plain_run(name), "bf16": own_run(name, bf16=True)}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
