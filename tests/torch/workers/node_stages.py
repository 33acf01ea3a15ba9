"""Gathers and sums of four ranks on nodes of their launcher, stage by stage, and small models trained on them.

Usage: node_stages.py OUT.json CASE...
"""

import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from sharded_training import OPTIMIZERS, build, tokens, train_step

import shardwright.torch as sw
from shardwright.backends.torch.machine import data_groups, node_stages
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.machine.node_stages import NodeGrid, StagedCollectives, StageGroups
from tests.comparison import Comparison

STEPS, MICROBATCHES = 3, 2


def nodes() -> tuple[int, ...]:
    return sw.session.current().bound.nodes


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The bytes that this rank sends to its own node and to others by single messages, and those that shards of one
    rank take, over all gathers and sums."""
    found: Counter[str] = Counter()
    isend, gather, sum_shards = dist.isend, DataGroups.gather, DataGroups.sum_shards

    def sent(tensor: torch.Tensor, dst: int, **given: Any) -> Any:
        found["between" if nodes()[dst] != nodes()[dist.get_rank()] else "within"] += tensor.nbytes
        return isend(tensor, dst, **given)

    def gathered(groups: DataGroups, whole: torch.Tensor, shard: torch.Tensor, *given: Any) -> Any:
        found["shards"] += shard.nbytes
        return gather(groups, whole, shard, *given)

    def summed(groups: DataGroups, flat: torch.Tensor, *given: Any) -> Any:
        found["shards"] += flat.nbytes // groups.ways
        return sum_shards(groups, flat, *given)

    dist.isend, DataGroups.gather, DataGroups.sum_shards = sent, gathered, summed
    try:
        yield found
    finally:
        dist.isend, DataGroups.gather, DataGroups.sum_shards = isend, gather, sum_shards


def trained(level: int, *, group: int | None = None, **keys: Any) -> dict[str, Any]:
    """A small model on four replicas, beside torch alone on all their samples."""
    replicas = dist.get_world_size()
    plain, rate = build(), OPTIMIZERS["adamw"]
    plain_optimizer, expected = rate(list(plain.parameters())), []
    for step in range(STEPS):
        plain_optimizer.zero_grad()
        parts = tokens(step).chunk(replicas * MICROBATCHES)
        loss = sum(plain(part) / len(parts) for part in parts)
        loss.backward()
        expected.append(float(loss.detach()))
        if step == 0:
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in plain.named_parameters()}
        plain_optimizer.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        given = {"microbatches": MICROBATCHES, "ddp": True, "shard": level, "shard_group": group, "log_every": 0}
        sw.init(given | {"ddp_dist_backend": "gloo"} | keys)  # by messages, which are counted
        model = sw.DistributedModel(build())
        optimizer = sw.DistributedOptimizer(rate(list(model.parameters())))
        found = []
        with counted() as sent:
            for step in range(STEPS):
                optimizer.zero_grad()
                own = tokens(step).chunk(replicas)[sw.rdp_rank()]
                found.append(float(train_step(model, own).all_reduce_mean()))
                if step == 0:
                    parts, own_gradients = model.runtime.split_model.parts, {}
                    for name, p in sorted(model.local_named_parameters()):
                        grad = torch.empty(0) if p.grad is None else p.grad.clone()
                        used = gradients[name] is not None
                        own_gradients[name] = parts.whole(name, grad) if used else None
                optimizer.step()
    same = Comparison(f"shard {level}").losses(found, expected).gradients(own_gradients, gradients)
    same.values(model.state_dict(), plain.state_dict(), relative=0.0, absolute=1e-4, what="weights")
    digest = [value.double().sum().item() for value in model.state_dict().values()]
    staged = model.runtime.split_model.parts.flat.data.stages
    return {
        "same": same.report(), "sent": dict(sent), "digest": digest, "staged": staged is not None,
        "said": [str(one.message) for one in said if "gathers" in str(one.message)],
    }  # fmt: skip


def sizes(number: int, ways: int, uneven: bool) -> list[int]:
    """The entries of every shard; where they are unequal, that of one rank is empty."""
    return [16 * (number + 1) * ((rank + number) % ways if uneven else 1) for rank in range(ways)]


def made(seed: int, entries: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, which add up exactly."""
    found = torch.randint(-9, 9, (entries,), generator=torch.Generator().manual_seed(seed))
    return found.to(dtype) * (1 + 2j) if dtype.is_complex else found.to(dtype)


def exact(
    groups: DataGroups, ways: int, dtype: torch.dtype = torch.float32, *, shuffled: bool = False, uneven: bool = False
) -> str:
    """Begins gathers and sums, where ``shuffled`` in an order of its own between the two kinds and with pauses, and
    says what they made that is not what they should."""
    counts, begun, me = 6, [], groups.coordinate
    chance = random.Random(dist.get_rank() if shuffled else 0)
    kinds = ["gather"] * counts + ["sum"] * counts
    chance.shuffle(kinds)
    numbers: Counter[str] = Counter()
    groups.tags.begin()
    for kind in kinds:
        number = numbers[kind]
        numbers[kind] += 1
        each = sizes(number, ways, uneven)
        borders = [0, *accumulate(each)]
        if shuffled:
            time.sleep(chance.random() / 50)
        if kind == "gather":
            whole = torch.zeros(borders[-1], dtype=dtype)
            own = made(100 * number + me, each[me], dtype)
            expected = torch.cat([made(100 * number + rank, each[rank], dtype) for rank in range(ways)])
            begun.append((kind, number, whole, groups.gather(whole, own, number, borders), expected))
        else:
            terms = [
                [made(100 * number + rank + 10 * to, each[to], dtype) for to in range(ways)] for rank in range(ways)
            ]
            expected = sum(term[me] for term in terms)
            begun.append((kind, number, None, groups.sum_shards(torch.cat(terms[me]), number, borders), expected))
    if shuffled:
        chance.shuffle(begun)
    wrong = []
    for kind, number, whole, wait, expected in begun:
        found = wait()
        found = whole if kind == "gather" else found
        if found.dtype is not dtype or not torch.equal(found, expected):
            wrong.append(f"{kind} {number}")
    return ", ".join(wrong)


def messages(dtype: str, **how: bool) -> dict[str, Any]:
    sw.init({"ddp": True, "shard": 3})
    bound, ways = sw.session.current().bound, dist.get_world_size()
    groups = DataGroups.bind(bound, ways, sw.session.current().watchdog, hierarchical=True)
    return {"wrong": exact(groups, ways, getattr(torch, dtype), **how), "staged": groups.stages is not None}


def collectives() -> dict[str, Any]:
    """The stages as GPUs take them, by collectives of Gloo, which wait for each other as they begin."""
    sw.init({"ddp": True, "shard": 3})
    bound, ways = sw.session.current().bound, dist.get_world_size()
    kind = node_stages.StagedMessages

    class OnCpu:
        def __new__(cls, grid: NodeGrid, ranks: tuple[int, ...], _: Any) -> StagedCollectives:
            of_use = [data_groups._stage_groups(grid, ranks, use) for use in ("gathers", "sums")]
            assert all(isinstance(one, StageGroups) for one in of_use)
            return StagedCollectives(grid, *of_use, torch.device("cpu"))

    data_groups.StagedMessages = OnCpu
    try:
        groups = DataGroups.bind(bound, ways, sw.session.current().watchdog, hierarchical=True)
    finally:
        data_groups.StagedMessages = kind
    wrong = [exact(groups, ways, dtype) for dtype in (torch.float32, torch.bfloat16, torch.complex64)]
    return {"wrong": ", ".join(filter(None, wrong)), "staged": groups.stages is not None}


def unequal_collectives() -> dict[str, Any]:
    """Unequal shards as GPUs gather and sum them."""
    sw.init({"ddp": True, "shard": 3})
    ways = dist.get_world_size()
    groups = DataGroups.bind(sw.session.current().bound, ways, sw.session.current().watchdog)
    each = sizes(0, ways, uneven=True)
    whole = [made(rank, each[rank], torch.float32) for rank in range(ways)]
    parts = [part.clone() if rank == groups.coordinate else torch.zeros_like(part) for rank, part in enumerate(whole)]
    groups._finish(groups._broadcasts(parts))
    terms = [[made(rank + 10 * to, each[to], torch.float32) for to in range(ways)] for rank in range(ways)]
    sums = [term.clone() for term in terms[groups.coordinate]]
    groups._finish(groups._reduces(sums))
    same = all(map(torch.equal, parts, whole))
    same &= torch.equal(sums[groups.coordinate], sum(term[groups.coordinate] for term in terms))
    return {"wrong": "" if same else "parts", "staged": True}


def after_a_failure() -> dict[str, Any]:
    """A step that one rank does not begin, and one after it."""
    sw.init({"ddp": True, "shard": 3})
    bound, ways = sw.session.current().bound, dist.get_world_size()
    groups = DataGroups.bind(bound, ways, sw.session.current().watchdog, hierarchical=True)
    groups.tags.begin()
    if dist.get_rank() != 3:
        whole = torch.zeros(ways * 16)
        borders = range(0, 16 * ways + 1, 16)
        groups.gather(whole, torch.ones(16), 0, borders)
        groups.sum_shards(torch.ones(ways * 16), 0, borders)
    groups.tags.begin(failed=True)
    return {"wrong": exact(groups, ways, shuffled=True), "staged": groups.stages is not None}


CASES = {
    "level 1": lambda: trained(1), "level 2": lambda: trained(2), "level 3": lambda: trained(3),
    "level 3, bf16": lambda: trained(3, bf16=True), "asked": lambda: trained(3, sdp_hierarchical_allgather=True),
    "flat": lambda: trained(3, sdp_hierarchical_allgather=False), "groups": lambda: trained(3, group=2),
    "messages": lambda: messages("float32"), "shuffled": lambda: messages("float32", shuffled=True),
    "complex": lambda: messages("complex64", shuffled=True, uneven=True),
    "unequal": lambda: messages("float32", shuffled=True, uneven=True), "collectives": collectives,
    "unequal collectives": unequal_collectives, "after a failure": after_a_failure,
}  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for case in sys.argv[2:]:
        found = CASES[case]()
        sw.shutdown()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        results[case] = every
    leave(results, sys.argv[1])


if __name__ == "__main__":
    main()
