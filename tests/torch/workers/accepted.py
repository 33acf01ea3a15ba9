"""One training step of each model of `accepted_models`, and the loops of `accepted_scripts`, split, against the plain
model in this process.

Usage: accepted.py AXIS:RANKS [NAME...]; prints `ok NAME` for each.
"""

import copy
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
from accepted_models import CASES, Case
from accepted_scripts import SCRIPTS, Kit, Script

import shardwright.torch as sw
from tests.comparison import Comparison
from tests.models.unsplit import seeded_by_rule

MICROBATCHES, WAIT_S = 2, 60.0


def part(batch: dict[str, Any], m: int) -> dict[str, Any]:
    return {k: v.chunk(MICROBATCHES)[m] if isinstance(v, torch.Tensor) and v.dim() else v for k, v in batch.items()}


def plain_step(
    model: torch.nn.Module, batch: dict[str, Any], whole: dict[str, torch.Tensor], case: Case
) -> list[float]:
    losses = []
    for m in range(MICROBATCHES):
        with seeded_by_rule(model, seed=0, step=0, microbatch=m):
            loss = case.loss(model, part(batch, m) | whole)
        (loss / MICROBATCHES).backward()
        losses.append(float(loss.detach()))
    return losses


def check(name: str, case: Case, keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, batch = case.make()
    plain = copy.deepcopy(model)
    whole = case.whole()
    wanted = plain_step(plain, batch, whole, case)
    keys = {"microbatches": MICROBATCHES, "wait_timeout_s": WAIT_S, "pipeline": case.schedule, **keys}
    sw.init(keys)

    @sw.step(non_split_inputs=["whole"])
    def train_step(model: Any, batch: Any, whole: Any) -> Any:
        loss = case.loss(model, batch | whole)
        model.backward(loss, reduction="mean")
        return loss

    split = sw.DistributedModel(model)
    found = [float(loss) for loss in train_step(split, batch, whole).outputs]
    runtime = split.runtime
    shards, tensor = runtime.split_model.parts.tensor, runtime.tensor
    held = {}
    for key, parameter in sorted(split.local_named_parameters()):
        in_pieces = shards is not None and parameter.grad is not None
        held[key] = shards.whole(key, parameter.grad) if in_pieces else parameter.grad
    same = Comparison(f"{name} under {keys}")
    same.losses(found, wanted)
    same.gradients(held, {n: p.grad for n, p in plain.named_parameters()}, part=True)
    reports: list[Any] = [None] * sw.size()
    dist.all_gather_object(reports, same.report())
    Comparison.of_ranks(reports).require("losses", "gradients")
    assert (runtime.messages is None) == (case.mode == "recorded"), runtime.messages
    if tensor is not None:
        assert (not tensor.by_calls_because) == case.on_pieces, tensor.by_calls_because
    sw.shutdown()


def check_script(name: str, script: Script, keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = script.make()
    plain = copy.deepcopy(model)
    wanted = list(script.loop(Kit(plain, is_split=False)))
    sw.init({"microbatches": MICROBATCHES, "wait_timeout_s": WAIT_S, **keys})
    split = sw.DistributedModel(model)
    found = list(script.loop(Kit(split, is_split=True)))
    same = Comparison(f"{name} under {keys}")
    same.losses(found, wanted)
    same.values(split.state_dict(), plain.state_dict(), relative=1e-3, absolute=1e-5, what="weights")
    reports: list[Any] = [None] * sw.size()
    dist.all_gather_object(reports, same.report())
    Comparison.of_ranks(reports).require("losses", "weights")
    assert (split.runtime.messages is None) == (script.mode == "recorded"), split.runtime.messages
    sw.shutdown()


def main() -> None:
    axis, ranks = sys.argv[1].split(":")
    keys: dict[str, Any] = {
        "pp": {"pipeline_parallel_degree": int(ranks)},
        "tp": {"tensor_parallel_degree": int(ranks)},
        "dp": {"ddp": True},
    }[axis]
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    every = {**CASES, **SCRIPTS}
    for name in sys.argv[2:] or [name for name, case in every.items() if axis in case.axes]:
        if name in CASES:
            check(name, CASES[name], keys)
        else:
            check_script(name, SCRIPTS[name], keys)
        if dist.get_rank() == 0:
            print(f"ok {name}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
