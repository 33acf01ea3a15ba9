"""Which of two plans is the simpler: an order by the mechanisms that a plan leans on, the rarest first.

Of plans whose predicted times lie closer together than predictions can tell apart, the simplest is the answer. What
counts first is what a team would rather do without: another axis, then a rare schedule, then offloading, and so on down
to the placement on the ranks. The order is lexicographic: one mechanism less is simpler, whatever comes after it. The
size of a microbatch is not in it, since no size is simpler than another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shardwright.core.plan.decision import Decision
from shardwright.core.search.space import ORDERS, Pipelining, Policy, Shape
from shardwright.core.values.recompute_modes import MODES, kind_of

SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved-1f1b",
    "simple",
    "interleaved",
    "eager-1f1b",
    "looped-bfs",
    "zb-h1",
    "interleaved-zb",
    "zb-h2",
    "zbv",
    "v-half",
    "v-min",
    "dualpipev",
)
"""Schedules from plain to rare, by how many systems have them: 1F1B, GPipe and the interleaved form (Megatron-LM,
DeepSpeed, PyTorch), SageMaker's two, orders of whole backwards, then split backwards, those in V shape last. What is
not named, "auto" among it, comes after all of these."""


class Simplicity(NamedTuple):
    """The place of a plan in the order; the smaller is the simpler."""

    axes: int
    """Axes in use beside the data axis, which every training system has."""
    schedule: int
    """The place in `SCHEDULES`; 0 without a pipeline."""
    offload: int
    """How many of two go to the host: activations, states."""
    stagewise: int
    """How many of two are asked of the schedule: to gather sharded parameters, to sum gradients after the last
    microbatch where they are divided."""
    virtual_stages: int
    pp: int
    tp: int
    shard_groups: bool
    """Whether replicas share shards in groups smaller than the data axis."""
    shard: int
    recompute: int
    """The place in `MODES`."""
    order: bool
    """Whether the axes lie on the ranks in another order than the usual one."""


WORDS = {
    "axes": "axes beside data",
    "stagewise": "gathers or sums by the schedule",
    "virtual_stages": "virtual stages",
    "shard_groups": "shard groups",
    "order": "placement order",
}
"""What the entries are called whose fields have other names."""


def simplicity(decision: Decision) -> Simplicity:
    """The place of a decision in the order."""
    d = decision
    return Simplicity(
        axes=(d.pp > 1) + (d.tp > 1),
        schedule=_plainness(d.schedule) if d.pp > 1 else 0,
        offload=bool(d.offloaded_units) + (d.offload_states != "none"),
        stagewise=(d.gathered_stages is not None) + (d.reduce_after is not None),
        virtual_stages=d.virtual_stages,
        pp=d.pp,
        tp=d.tp,
        shard_groups=d.shard_group is not None and d.shard_group < d.dp,
        shard=d.shard,
        recompute=MODES.index(kind_of(d.recompute)),
        order=d.placement_order != ORDERS[0],
    )


def least_simplicity(
    shape: Shape, policies: Sequence[Policy] = (), pipelinings: Sequence[Pipelining] = (), *, offload: bool = False
) -> Simplicity:
    """What no plan of a choice gets below, entry by entry and so in the order: that of its only plan where one policy
    and one pipelining are left. Without ``policies`` or ``pipelinings``, any may come."""
    pp, dp, tp = shape.degrees
    none, plain = Policy("none", 0, None), Pipelining(SCHEDULES[0], 1)
    policies, pipelinings = policies or (none,), pipelinings or (plain,)
    return Simplicity(
        axes=(pp > 1) + (tp > 1),
        schedule=min(_plainness(each.schedule) for each in pipelinings) if pp > 1 else 0,
        offload=int(offload) + min(p.offload_states != "none" for p in policies),
        stagewise=min((p.gathered_stages is not None) + (p.reduce_after is not None) for p in policies),
        virtual_stages=min(each.virtual_stages for each in pipelinings),
        pp=pp,
        tp=tp,
        shard_groups=all(p.shard_group is not None and p.shard_group < dp for p in policies),
        shard=min(p.shard for p in policies),
        recompute=min(MODES.index(kind_of(p.recompute)) for p in policies),
        order=shape.order != ORDERS[0],
    )


def why_less_simple(simple: Decision, other: Decision) -> str:
    """The first thing in the order that makes the other decision the less simple one: ``schedule zbv for 1f1b``; empty
    where neither is simpler."""
    mine, theirs = simplicity(simple), simplicity(other)
    first = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b), None)
    if first is None:
        return ""
    name = Simplicity._fields[first]
    shown = {
        "schedule": (simple.schedule if simple.pp > 1 else "no pipeline", other.schedule),
        "recompute": (simple.recompute, other.recompute),
        "order": (simple.placement_order, other.placement_order),
        "offload": ("nothing", "units or states"),
        "shard_groups": ("none", f"of {other.shard_group}"),
    }
    a, b = shown.get(name, (mine[first], theirs[first]))
    return f"{WORDS.get(name, name)} {b} for {a}"


def _plainness(schedule: str) -> int:
    return SCHEDULES.index(schedule) if schedule in SCHEDULES else len(SCHEDULES)
