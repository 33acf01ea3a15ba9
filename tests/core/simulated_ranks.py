"""Ranks simulated in one process that carry out conversions on real values, and count what they send."""

from collections.abc import Sequence

import numpy as np

from shardwright.core.layout.conversions import Conversion, Step, Transfer
from shardwright.core.layout.conversions.transfer import messages
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Replicate, Split
from shardwright.core.layout.shards import Places, held
from tests.comparison import Comparison

REDUCE = {
    "sum": lambda terms: np.sum(terms, 0),
    "mean": lambda terms: np.mean(terms, 0),
    "max": lambda terms: np.max(terms, 0),
    "min": lambda terms: np.min(terms, 0),
}
NEUTRAL = {"sum": 0.0, "mean": 0.0, "max": -np.inf, "min": np.inf}


def part(value: np.ndarray, places: Places) -> np.ndarray:
    return value[np.ix_(*places)]


def distribute(value: np.ndarray, layout: Layout, mesh: Mesh, seed: int = 0) -> list[np.ndarray]:
    """What every rank of a mesh holds of a value; terms of partial values are random."""
    draws = np.random.default_rng(seed)
    terms: dict[tuple[int, ...], np.ndarray] = {(): value}
    for axis in mesh.names:
        placement = layout.on(axis)
        size = mesh.axis_size(axis)
        grown = {}
        for place, term in terms.items():
            made = [term] * size
            if isinstance(placement, Partial):
                if placement.op in ("sum", "mean"):
                    made = [draws.integers(-9, 9, value.shape).astype(float) for _ in range(size - 1)]
                    whole = term * (size if placement.op == "mean" else 1)
                    made.append(whole - np.sum(made, 0) if made else whole)
                else:
                    sign = -1 if placement.op == "max" else 1
                    owner = draws.integers(0, size, value.shape)
                    made = [
                        np.where(owner == k, term, term + sign * draws.integers(0, 5, value.shape)) for k in range(size)
                    ]
            grown.update({(*place, k): each for k, each in enumerate(made)})
        terms = grown
    return [
        part(terms[tuple(mesh.coordinates(rank).values())], held(value.shape, layout, mesh, rank))
        for rank in range(mesh.size)
    ]


def assemble(shape: tuple[int, ...], pieces: Sequence[np.ndarray], layout: Layout, mesh: Mesh) -> np.ndarray:
    """The value that the pieces are; asserts that copies agree."""
    full: dict[tuple[int, ...], np.ndarray] = {}
    for rank, piece in enumerate(pieces):
        places = held(shape, layout, mesh, rank)
        assert piece.shape == tuple(len(p) for p in places), (rank, piece.shape, layout)
        whole = np.full(shape, np.nan)
        whole[np.ix_(*places)] = piece
        full[tuple(mesh.coordinates(rank).values())] = whole
    for depth in reversed(range(len(mesh.names))):
        axis = mesh.names[depth]
        placement = layout.on(axis)
        groups: dict[tuple[int, ...], list[np.ndarray]] = {}
        for place, value in sorted(full.items()):
            groups.setdefault(place[:depth], []).append(value)
        full = {}
        for place, values in groups.items():
            if isinstance(placement, Partial):
                full[place] = REDUCE[placement.op](np.array(values))
            elif isinstance(placement, Split):
                whole = values[0].copy()
                for other in values[1:]:
                    assert not np.any(~np.isnan(whole) & ~np.isnan(other)), "pieces overlap"
                    whole = np.where(np.isnan(whole), other, whole)
                full[place] = whole
            else:
                copies = [values[0]] * len(values)
                Comparison(axis).values(values, copies, relative=1e-5, absolute=1e-8, nan_is_nan=True).require()
                full[place] = values[0]
    return full[()]


class Meter:
    """Counts the entries that ranks send each other."""

    def __init__(self) -> None:
        self.entries = 0

    def send(self, value: np.ndarray, padded_to: int | None = None) -> np.ndarray:
        assert padded_to is None or value.size <= padded_to
        self.entries += value.size if padded_to is None else padded_to
        return value


def run(conversion: Conversion, pieces: Sequence[np.ndarray], meter: Meter) -> list[np.ndarray]:
    """Carry a conversion out, step by step, group by group."""
    now = list(pieces)
    for step in conversion.steps:
        for group in conversion.mesh.groups(*step.axes):
            made = _step(step, conversion, group, [now[r] for r in group], meter)
            for rank, value in zip(group, made, strict=True):
                now[rank] = value
    return now


def _step(
    step: Step, whole: Conversion, group: tuple[int, ...], had: list[np.ndarray], meter: Meter
) -> list[np.ndarray]:
    mesh, shape = whole.mesh, whole.shape
    before = [held(shape, step.before, mesh, r) for r in group]
    after = [held(shape, step.after, mesh, r) for r in group]
    old = step.before.on(step.axes[0])
    count = len(group)
    match step.kind:
        case "all-reduce":
            assert isinstance(old, Partial)
            reduced = REDUCE[old.op](np.array(had)).reshape(-1)
            chunks = np.array_split(reduced, count)
            for chunk in chunks:  # a ring: every chunk goes round once to be reduced and once to be shared
                for _ in range(2 * (count - 1)):
                    meter.send(chunk)
            return [reduced.reshape(had[0].shape)] * count
        case "reduce-scatter":
            assert isinstance(old, Partial)
            largest = max(int(np.prod([len(p) for p in places])) for places in after)
            made = []
            for me, places in enumerate(after):
                terms = []
                for other in range(count):
                    wanted = _local(had[other], before[other], places)
                    terms.append(wanted if other == me else meter.send(wanted, largest))
                made.append(REDUCE[old.op](np.array(terms)))
            return made
        case "all-gather":
            largest = max(piece.size for piece in had)
            made = []
            for me, places in enumerate(after):
                out = np.full([len(p) for p in places], np.nan)
                for other in range(count):
                    value = had[other] if other == me else meter.send(had[other], largest)
                    out[np.ix_(*_where(before[other], places))] = value
                made.append(out)
            return made
        case "all-to-all":
            largest = max(
                int(np.prod([len(np.intersect1d(a, b)) for a, b in zip(x, y, strict=True)]))
                for x in before
                for y in after
            )
            made = []
            for me, places in enumerate(after):
                out = np.full([len(p) for p in places], np.nan)
                for other in range(count):
                    shared = tuple(np.intersect1d(a, b) for a, b in zip(before[other], places, strict=True))
                    value = _local(had[other], before[other], shared)
                    out[np.ix_(*_where(shared, places))] = value if other == me else meter.send(value, largest)
                made.append(out)
            return made
        case "exchange":
            return _exchange(shape, before, after, had, meter)
        case "slice":
            return [_local(value, b, a) for value, b, a in zip(had, before, after, strict=True)]
        case "term":
            return [
                _term(step, value, b, a, me, count)
                for me, (value, b, a) in enumerate(zip(had, before, after, strict=True))
            ]


def _term(step: Step, value: np.ndarray, before: Places, after: Places, me: int, count: int) -> np.ndarray:
    """Local: a whole value, a piece or a term of another reduction becomes a term."""
    axis = step.axes[0]
    old, new = step.before.on(axis), step.after.on(axis)
    assert isinstance(new, Partial)
    if isinstance(old, Partial):
        return value * (count if (old.op, new.op) == ("sum", "mean") else 1 / count)
    if isinstance(old, Replicate):
        return value if new.op != "sum" or me == 0 else np.zeros_like(value)
    out = np.full([len(p) for p in after], NEUTRAL[new.op])
    out[np.ix_(*_where(before, after))] = value * (count if new.op == "mean" else 1)
    return out


def _exchange(
    shape: tuple[int, ...], before: list[Places], after: list[Places], had: list[np.ndarray], meter: Meter
) -> list[np.ndarray]:
    """Every rank gets each entry that it lacks from one rank that has it."""
    made = []
    for me, places in enumerate(after):
        out = np.full(shape, np.nan)
        out[np.ix_(*before[me])] = had[me]
        wanted = np.zeros(shape, bool)
        wanted[np.ix_(*places)] = True
        for other in range(len(had)):
            theirs = np.full(shape, np.nan)
            theirs[np.ix_(*before[other])] = had[other]
            lacking = wanted & np.isnan(out) & ~np.isnan(theirs)
            out[lacking] = meter.send(theirs[lacking])
        made.append(part(out, places))
    return made


def _where(inner: Places, outer: Places) -> Places:
    """Positions of some entries within a piece."""
    found = []
    for a, b in zip(inner, outer, strict=True):
        order = np.argsort(b)
        found.append(order[np.searchsorted(b[order], a)])
    return tuple(found)


def _local(value: np.ndarray, has: Places, wants: Places) -> np.ndarray:
    return value[np.ix_(*_where(wants, has))]


def run_transfer(found: Transfer, pieces: Sequence[np.ndarray], meter: Meter) -> list[np.ndarray]:
    """Carry a transfer out between two sets of ranks."""
    left = run(found.leave, pieces, meter)
    shape = found.leave.shape
    source = (found.leave.mesh, found.source_ranks)
    target = (found.arrive.mesh, found.target_ranks)
    arrived = []
    for rank, world in enumerate(found.target_ranks):
        places = held(shape, found.arrive.before, found.arrive.mesh, rank)
        out = np.full(shape, np.nan)
        if world in found.source_ranks:
            mine = found.source_ranks.index(world)
            out[np.ix_(*held(shape, found.leave.after, found.leave.mesh, mine))] = left[mine]
        for sender, receiver, shared, _ in messages(shape, source, target, found.leave.after, found.arrive.before):
            if receiver != world:
                continue
            which = found.source_ranks.index(sender)
            has = held(shape, found.leave.after, found.leave.mesh, which)
            theirs = np.full(shape, np.nan)
            theirs[np.ix_(*shared)] = _local(left[which], has, shared)
            lacking = np.isnan(out) & ~np.isnan(theirs)
            out[lacking] = meter.send(theirs[lacking])
        arrived.append(part(out, places))
    return run(found.arrive, arrived, meter)
