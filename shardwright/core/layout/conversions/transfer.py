"""Conversions between sets of ranks, disjoint, overlapping or equal: a tensor leaves one mesh, arrives on another."""

from dataclasses import dataclass
from itertools import product

import numpy as np

from shardwright.core.errors import LayoutError
from shardwright.core.layout.conversions.path import Conversion, convert
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Placement, Replicate, Split
from shardwright.core.layout.shards import Places, common, entries, held


@dataclass(frozen=True, slots=True)
class Transfer:
    """Three parts: ``leave`` on the ranks that have it, messages pair by pair, ``arrive`` on the ranks that want it."""

    source_ranks: tuple[int, ...]
    """The rank in the world of every rank of the source mesh."""
    target_ranks: tuple[int, ...]
    leave: Conversion
    arrive: Conversion
    sent_bytes: int
    """What crosses from set to set: what each receiving rank lacks, once."""

    @property
    def moved_bytes(self) -> int:
        return self.leave.moved_bytes + self.sent_bytes + self.arrive.moved_bytes


def transfer(
    shape: tuple[int, ...],
    item_bytes: int,
    source: tuple[Mesh, tuple[int, ...]],
    target: tuple[Mesh, tuple[int, ...]],
    before: Layout,
    after: Layout,
) -> Transfer:
    """The cheapest transfer in bytes. ``source`` and ``target`` are (mesh, the world's rank of each of its ranks).

    Partial values are reduced before they leave, to whatever is cheapest in all; what arrives is made partial by those
    who receive it. On disjoint sets p1 → p2 this moves OneFlow's |T|·(1 + [to replicate](p2 - 1) + [from partial]
    (p1 - 1)). Raises LayoutError when a mesh and its ranks differ in number, or a rank comes twice.
    """
    for mesh, ranks in (source, target):
        if mesh.size != len(ranks) or len(set(ranks)) != len(ranks):
            raise LayoutError(f"a mesh of {mesh.size} ranks needs as many different ranks of the world: given {ranks}")
    if source == target:
        whole = convert(shape, item_bytes, source[0], before, after)
        return Transfer(source[1], target[1], whole, convert(shape, item_bytes, source[0], after, after), 0)
    best: Transfer | None = None
    for leaving, arriving in product(_without_partial(shape, before), _without_partial(shape, after)):
        leave = convert(shape, item_bytes, source[0], before, leaving)
        arrive = convert(shape, item_bytes, target[0], arriving, after)
        sent = sum(n for *_, n in messages(shape, source, target, leaving, arriving)) * item_bytes
        found = Transfer(source[1], target[1], leave, arrive, sent)
        if best is None or (found.moved_bytes, _steps(found)) < (best.moved_bytes, _steps(best)):
            best = found
    if best is None:
        raise LayoutError(f"no way from {before} to {after}")
    return best


def _steps(found: Transfer) -> int:
    return len(found.leave.steps) + len(found.arrive.steps)


def _without_partial(shape: tuple[int, ...], layout: Layout) -> list[Layout]:
    """The layout with every partial value replaced: by a split of one of the dims, or by whole copies."""
    axes = [axis for axis, p in layout.placements if isinstance(p, Partial)]
    kept = {axis: p for axis, p in layout.placements if not isinstance(p, Partial)}
    blocks = {p.dim: p.blocks for p in kept.values() if isinstance(p, Split)}
    options: list[Placement] = [Split(d, blocks.get(d, ())) for d, size in enumerate(shape) if size > 1]
    options.append(Replicate())
    return [
        Layout.of({**kept, **dict(zip(axes, chosen, strict=True))}) for chosen in product(options, repeat=len(axes))
    ]


def messages(
    shape: tuple[int, ...],
    source: tuple[Mesh, tuple[int, ...]],
    target: tuple[Mesh, tuple[int, ...]],
    before: Layout,
    after: Layout,
) -> list[tuple[int, int, Places, int]]:
    """(sender, receiver, entries sent, how many): every receiver gets each entry that it lacks from one sender. Among
    those that hold the same piece, senders take turns by receiver."""
    had = {world: held(shape, before, source[0], rank) for rank, world in enumerate(source[1])}
    found = []
    for rank, world in enumerate(target[1]):
        wanted = held(shape, after, target[0], rank)
        own = had.get(world)
        if own is not None and common(own, wanted) == entries(wanted):
            continue
        done: set[bytes] = set()
        senders = list(had)
        turn = rank % len(senders)
        for sender in [*senders[turn:], *senders[:turn]]:
            piece = had[sender]
            key = b"|".join(np.sort(of_dim).tobytes() for of_dim in piece)
            if key in done:
                continue
            done.add(key)
            shared = tuple(np.intersect1d(a, b, assume_unique=True) for a, b in zip(piece, wanted, strict=True))
            number = entries(shared)
            if own is not None and number:
                number -= common(own, shared)
            if number and sender != world:
                found.append((sender, world, shared, number))
    return found
