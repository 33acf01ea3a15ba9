"""Trains models under several degrees in one launch, dropout on, and compares every step with an unsplit run.

Usage: tp_training.py FOLDER OUT.json CASE...; a case is model:pp:dp:tp, or model:pp:dp:tp:HOW with a key of `HOW`. The
unsplit run is this library's own in one process, whose masks are those of the logical tensors; `reference` runs it and
leaves its numbers for the launches.

    tp_training.py reference FOLDER MODEL...        (MODEL.bf16, MODEL.fp8: in that)
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launched import largest_share, leave, whole_gradients
from tp_models import batch, build

import shardwright.torch as sw
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.state.parameter_shards import Shards
from tests.comparison import GRADIENT, LOSS, Comparison

STEPS, DROPOUT, GLOBAL_MICROBATCHES = 4, 0.1, 4
IN: dict[str, dict[str, Any]] = {"bf16": {"bf16": True}, "fp8": {"fp8": True, "cluster": "h100"}}
HOW: dict[str, dict[str, Any]] = {
    "apart": {"prescaled_batch": False},  # each rank of the tensor axis has samples of its own
    "memory": {"optimize": "memory"},  # what the tensor axis leaves whole is divided along the sequence
    "speed": {"optimize": "speed"},
    "recompute": {"recompute": "full"},
    "split": {"pipeline": "zb-h1"},  # backward passes in halves: the products keep no sum of their own then
    "bf16": {"bf16": True},
    "bf16-z1": {"bf16": True, "shard": 1},
    "bf16-z3": {"bf16": True, "shard": 3},
    "fp8": IN["fp8"],
    "fp8-z3": IN["fp8"] | {"shard": 3},
    "fp8-split": IN["fp8"] | {"pipeline": "zb-h1"},
    "fp8-recompute": IN["fp8"] | {"recompute": "full"},
    "z1": {"shard": 1},
    "z2": {"shard": 2},
    "z3": {"shard": 3},
    "z3-groups": {"shard": 3, "shard_group": 2},
    "z3-split": {"shard": 3, "pipeline": "zb-h1"},
    "z3-last": {"shard": 3, "reduce_after": "last"},
    "z2-last": {"shard": 2, "reduce_after": "last"},
    "z3-stages": {"shard": 3, "gathered_stages": 1, "reduce_after": "last"},
    "bf16-z3-stages": {"shard": 3, "gathered_stages": 1, "bf16": True},
    "z3-looped": {
        "shard": 3,
        "gathered_stages": 2,
        "reduce_after": "last",
        "pipeline": "looped-bfs",
        "virtual_stages": 2,
    },
    "z3-ahead": {
        "shard": 3,
        "gathered_stages": 2,
        "look_ahead": 0,
        "pipeline": "interleaved-1f1b",
        "virtual_stages": 3,
    },
    "z3-weights": {"shard": 3, "gathered_stages": 2, "pipeline": "interleaved-zb", "virtual_stages": 3},
    "z3-recompute": {"shard": 3, "recompute": "full"},
    "meta": {},  # the model has no data until it is wrapped, and is given a state dict
}


@dataclass(frozen=True)
class Near:
    """How far losses, norms and gradients may be off, relative to themselves, and entries of the weights."""

    loss: float = LOSS
    norm: float = LOSS
    gradient: float = GRADIENT
    weight: float = 1e-4


NEAR = Near()
NEAR_IN_FP8 = Near(loss=5e-4, norm=1e-2, gradient=0.15, weight=1e-2)
"""On a tensor axis sums of bf16 are in another order, and where their last bit differs an operand may become the next
number of 8 bits, which is up to an eighth away. In bf16 itself the bounds would be 1e-4, 2e-3, 1e-2 and 3e-3; weights
are off by as many steps of Adam as they had gradients of another sign."""


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def wrapped(name: str, is_meta: bool) -> sw.DistributedModel:
    if not is_meta:
        return sw.DistributedModel(build(name, DROPOUT))
    with torch.device("meta"):
        bare = build(name, DROPOUT)
    return sw.DistributedModel(bare, weights=build(name, DROPOUT).state_dict())


@contextmanager
def cuts_watched(model: sw.DistributedModel) -> Iterator[list[int]]:
    """How many entries this rank holds whenever it is about to cut its parameters for a recorded step."""
    found: list[int] = []
    cut = Shards.cut

    def watched(shards: Shards, places: Any) -> None:
        found.append(sum(p.numel() for p in model.local_parameters() if not p.is_meta))
        cut(shards, places)

    Shards.cut = watched
    try:
        yield found
    finally:
        Shards.cut = cut


@contextmanager
def traffic_counted() -> Iterator[dict[str, Counter[int]]]:
    """How often each group of sharded parameters is gathered, and its gradients summed, until the counters are
    cleared."""
    counts: dict[str, Counter[int]] = {"gathers": Counter(), "sums": Counter()}
    gather, sum_shards = DataGroups.gather, DataGroups.sum_shards

    def gathered(groups: DataGroups, whole: Any, shard: Any, number: int, borders: Any) -> Any:
        counts["gathers"][number] += 1
        return gather(groups, whole, shard, number, borders)

    def summed(groups: DataGroups, flat: Any, number: int, borders: Any) -> Any:
        counts["sums"][number] += 1
        return sum_shards(groups, flat, number, borders)

    DataGroups.gather, DataGroups.sum_shards = gathered, summed
    try:
        yield counts
    finally:
        DataGroups.gather, DataGroups.sum_shards = gather, sum_shards


def train(name: str, keys: dict[str, Any], replicas: int, is_meta: bool = False) -> dict[str, Any]:
    """Losses, norms, the first step's gradients and the last weights, whole."""
    sw.init({"microbatches": GLOBAL_MICROBATCHES // replicas, "wait_timeout_s": 60.0, **keys})
    sw.set_seed(5)
    model = wrapped(name, is_meta)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    losses, norms, gradients = [], [], {}
    for step in range(STEPS):
        optimizer.zero_grad()
        apart = keys.get("prescaled_batch") is False
        which, of = (sw.dp_rank(), sw.dp_size()) if apart else (sw.rdp_rank(), replicas)
        own = {key: tensor.chunk(of)[which] for key, tensor in batch(name, step).items()}
        with cuts_watched(model) as before, traffic_counted() as counts:
            losses.append(float(train_step(model, own).all_reduce_mean()))
        if step == 0:
            held = max(before) if is_meta else 0
            gradients = whole_gradients(model)
        norms.append(float(model.clip_grad_norm_(1.0)))
        optimizer.step()
    sizes = held_bytes(model, optimizer)
    if "optimize" in keys and model.session.plan is not None:
        assert model.session.plan.decision.sequence_parallel == (keys["optimize"] == "memory")
    state = model.state_dict()
    tensor = model.runtime.tensor
    found = {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "state": {key: value.clone() for key, value in state.items()},
        "bytes": sizes,
        "held": max(held, sum(p.numel() for p in model.local_parameters())),
        "share": largest_share(model),
        "traffic": {kind: max(of_kind.values(), default=0) for kind, of_kind in counts.items()},
        "whole_because": "" if tensor is None else tensor.by_calls_because,
    }
    before = {key: value.clone() for key, value in model.local_state_dict().items() if isinstance(value, torch.Tensor)}
    model.load_state_dict(state)
    again = {key: value for key, value in model.local_state_dict().items() if isinstance(value, torch.Tensor)}
    found["reload"] = Comparison(name).equal(again, before, what="weights that were loaded again").report()
    sw.shutdown()
    return found


def held_bytes(model: sw.DistributedModel, optimizer: Any) -> dict[str, tuple[int, int]]:
    """(found, predicted) bytes of this rank's parameters, gradients and optimizer states; nothing without a plan."""
    plan = model.session.plan
    if plan is None:
        return {}
    own = list(model.local_parameters())
    states = [
        t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor) and t.dim()
    ]
    predicted = plan.predicted.memory_by_stage_rank[sw.pp_rank()]

    def size(tensors: list[torch.Tensor]) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    return {
        "parameters": (size(own), predicted.parameters_bytes),
        "gradients": (size([p.grad for p in own if p.grad is not None]), predicted.gradients_bytes),
        "optimizer": (size(states), predicted.optimizer_bytes),
    }


def compare(case: str, found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    name, pp, _, tp, *kind = case.split(":")
    # A tied table's gradients are summed in bf16 on one rank, and in float32 between two stages.
    near = NEAR_IN_FP8 if kind == ["fp8"] and (tp == "2" or (name == "gpt2" and pp == "2")) else NEAR
    same = Comparison(case).losses(found["losses"], expected["losses"], moving=1e-4, relative=near.loss)
    same.losses(found["norms"], expected["norms"], what="norms", relative=near.norm)
    same.gradients(found["gradients"], expected["gradients"], part=True, relative=near.gradient)
    same.values(found["state"], expected["state"], relative=0.0, absolute=near.weight, what="weights")
    return {
        "case": case,
        "same": same.report(),
        "reload": found["reload"],
        "names": list(found["state"]) == list(expected["state"]),
        "bytes": found["bytes"],
        "held": found["held"],
        "share": found["share"],
        "traffic": found["traffic"],
        "whole": sum(v.numel() for v in expected["state"].values()),
        "whole_because": found["whole_because"],
    }


def main() -> None:
    if sys.argv[1] == "reference":
        for name in sys.argv[3:]:
            model, _, precision = name.partition(".")
            keys = IN[precision] if precision else {}
            torch.save(train(model, keys, 1), Path(sys.argv[2]) / f"{name}.pt")
        return
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    results = []
    for case in sys.argv[3:]:
        name, pp, dp, tp, how = (*case.split(":"), "")[:5]
        keys = {"pipeline_parallel_degree": int(pp), "tensor_parallel_degree": int(tp), "ddp": int(dp) > 1}
        keys |= HOW[how] if how else {}
        precision = next((f".{name}" for name in IN if keys.get(name)), "")
        expected = torch.load(folder / f"{name}{precision}.pt", weights_only=True)
        result = compare(case, train(name, keys, int(dp), how == "meta"), expected)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, result)
        result["held"] = max(other["held"] for other in every)
        for key in ("same", "reload", "bytes", "traffic"):
            result[key] = [other[key] for other in every]
        result["names"] = all(other["names"] for other in every)
        results.append(result)
    leave(results, out)


if __name__ == "__main__":
    main()
