"""`core.layout.conversions` over torch.distributed: every rank runs its part of a conversion's steps.

Exchanges are pair by pair, so that any transport carries them; reductions of partial values add up what arrives. What a
rank sends is counted, padding included, as the core predicts it.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from shardwright.core.errors import LayoutError
from shardwright.core.layout.conversions import Conversion, Step
from shardwright.core.layout.placements import Partial, Replicate
from shardwright.core.layout.shards import Places, common, entries, held

REDUCE: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.amax,
    "min": torch.amin,
}
NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -float("inf"), "min": float("inf")}


class Converter:
    """Runs conversions on one rank. ``sent_bytes`` grows by what this rank sends."""

    def __init__(self, world: Sequence[int] | None = None) -> None:
        """``world`` gives, for every rank of the mesh, its rank in the default process group (default: the same)."""
        self._world = world
        self.sent_bytes = 0

    def run(self, conversion: Conversion, piece: torch.Tensor) -> torch.Tensor:
        """This rank's piece after all steps. Collective: every rank of the mesh calls it. Raises LayoutError when the
        piece has not the shape that the layout gives this rank."""
        here = dist.get_rank()
        me = here if self._world is None else list(self._world).index(here)
        expected = tuple(len(p) for p in held(conversion.shape, conversion.before, conversion.mesh, me))
        if tuple(piece.shape) != expected:
            raise LayoutError(
                f"rank {me} holds a piece of shape {tuple(piece.shape)}; {conversion.before} gives {expected}"
            )
        for step in conversion.steps:
            piece = self._step(step, conversion, me, piece)
        return piece

    def _step(self, step: Step, whole: Conversion, me: int, piece: torch.Tensor) -> torch.Tensor:
        mesh, shape = whole.mesh, whole.shape
        group = mesh.group(me, *step.axes)
        before = [held(shape, step.before, mesh, r) for r in group]
        after = [held(shape, step.after, mesh, r) for r in group]
        at = group.index(me)
        old = step.before.on(step.axes[0])
        match step.kind:
            case "slice":
                return _local(piece, before[at], after[at])
            case "term":
                return _term(step, piece, before[at], after[at], at, len(group))
            case "all-reduce" if isinstance(old, Partial):
                return self._all_reduce(group, at, piece, old)
            case "reduce-scatter" if isinstance(old, Partial):
                largest = max(map(entries, after))
                sent = [_local(piece, before[at], places) for places in after]
                terms = self._swap(group, at, sent, [tuple(sent[at].shape)] * len(group), largest)
                return REDUCE[old.op](torch.stack(terms), 0)
        if step.kind == "all-gather":
            padded: int | None = max(map(entries, before))
        elif step.kind == "all-to-all":
            padded = max(common(a, b) for a in before for b in after)
        else:
            padded = None
        return self._gather(shape, group, at, piece, before, after, padded)

    def _all_reduce(self, group: Sequence[int], at: int, piece: torch.Tensor, old: Partial) -> torch.Tensor:
        """Each rank reduces its chunk, then shows it to the others: what a ring sends, in two exchanges."""
        chunks = list(piece.reshape(-1).tensor_split(len(group)))
        mine = self._swap(group, at, chunks, [tuple(chunks[at].shape)] * len(group), None)
        reduced = REDUCE[old.op](torch.stack(mine), 0)
        parts = self._swap(group, at, [reduced] * len(group), [tuple(c.shape) for c in chunks], None)
        return torch.cat(parts).reshape(piece.shape)

    def _gather(
        self,
        shape: tuple[int, ...],
        group: Sequence[int],
        at: int,
        piece: torch.Tensor,
        before: Sequence[Places],
        after: Sequence[Places],
        padded: int | None,
    ) -> torch.Tensor:
        """Everyone gets what it lacks. Unpadded exchanges send an entry that several have once, from the first."""
        plan = [_sources(shape, before, after[r], r, once=padded is None) for r in range(len(group))]
        lookup = torch.full((int(np.prod(shape)),), -1, dtype=torch.int64)
        lookup[_flat(shape, before[at])] = torch.arange(piece.numel())
        flat = piece.reshape(-1)
        sent = [flat[lookup[plan[r][at]]] for r in range(len(group))]
        got = self._swap(group, at, sent, [(len(ids),) for ids in plan[at]], padded)
        full = torch.zeros(int(np.prod(shape)), dtype=piece.dtype)
        for ids, values in zip(plan[at], got, strict=True):
            full[ids] = values
        return full[_flat(shape, after[at])].reshape([len(p) for p in after[at]])

    def _swap(
        self,
        group: Sequence[int],
        at: int,
        sent: Sequence[torch.Tensor],
        shapes: Sequence[tuple[int, ...]],
        padded: int | None,
    ) -> list[torch.Tensor]:
        """Send the r-th tensor to the r-th member and receive one of each shape; messages are padded to one size."""
        received: list[torch.Tensor] = []
        waiting = []
        for r, rank in enumerate(group):
            if r == at:
                received.append(sent[at].reshape(-1))
                continue
            peer = rank if self._world is None else self._world[rank]
            message = sent[r].reshape(-1).contiguous()
            size = int(np.prod(shapes[r], dtype=np.int64))
            if padded is not None:
                message = torch.nn.functional.pad(message, (0, padded - message.numel()))
            buffer = torch.empty(size if padded is None else padded, dtype=message.dtype)
            received.append(buffer)
            if message.numel():
                waiting.append(dist.isend(message, peer))
                self.sent_bytes += message.numel() * message.element_size()
            if buffer.numel():
                waiting.append(dist.irecv(buffer, peer))
        for work in waiting:
            if work is not None:
                work.wait()
        sizes = [int(np.prod(s, dtype=np.int64)) for s in shapes]
        return [b[:n].reshape(s) for b, n, s in zip(received, sizes, shapes, strict=True)]


def _flat(shape: tuple[int, ...], places: Places) -> torch.Tensor:
    """The places of a piece's entries in the flattened tensor."""
    grid = np.ravel_multi_index(np.ix_(*places), shape) if shape else np.zeros(1, np.int64)
    return torch.from_numpy(np.ascontiguousarray(grid).reshape(-1).astype(np.int64))


def _sources(
    shape: tuple[int, ...], before: Sequence[Places], wanted: Places, me: int, *, once: bool
) -> list[torch.Tensor]:
    """Which entries a member takes from each other: its own first, then from whoever has them."""
    left = np.zeros(int(np.prod(shape)), bool)
    left[_flat(shape, wanted).numpy()] = True
    found: list[torch.Tensor] = [torch.empty(0, dtype=torch.int64)] * len(before)
    order = [me, *(r for r in range(len(before)) if r != me)] if once else list(range(len(before)))
    for r in order:
        theirs = _flat(shape, before[r]).numpy()
        taken = np.sort(theirs[left[theirs]])
        if once:
            left[taken] = False
        found[r] = torch.from_numpy(taken)
    return found


def _local(piece: torch.Tensor, has: Places, wants: Places) -> torch.Tensor:
    for dim, (a, b) in enumerate(zip(has, wants, strict=True)):
        order = np.argsort(a)
        piece = piece.index_select(dim, torch.from_numpy(order[np.searchsorted(a[order], b)]))
    return piece


def _term(step: Step, piece: torch.Tensor, before: Places, after: Places, at: int, count: int) -> torch.Tensor:
    old, new = step.before.on(step.axes[0]), step.after.on(step.axes[0])
    if not isinstance(new, Partial):
        raise LayoutError(f"{step} makes no partial value")
    if isinstance(old, Partial):
        return piece * (count if (old.op, new.op) == ("sum", "mean") else 1 / count)
    if isinstance(old, Replicate):
        return piece if new.op != "sum" or at == 0 else torch.zeros_like(piece)
    out = torch.full([len(p) for p in after], NEUTRAL[new.op], dtype=piece.dtype)
    index = []
    for a, b in zip(before, after, strict=True):
        order = np.argsort(b)
        index.append(torch.from_numpy(order[np.searchsorted(b[order], a)]))
    out[torch.meshgrid(*index, indexing="ij")] = piece * (count if new.op == "mean" else 1)
    return out
