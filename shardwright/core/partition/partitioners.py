"""The partitioners by name, and the measures of a cut: how even its stages are, and how much it sends."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import PlanError, nearest
from shardwright.core.model.fold import Folded
from shardwright.core.partition.blocks import block_cut
from shardwright.core.partition.exact import min_max_cut, range_sums
from shardwright.core.partition.pareto import StageTimes, masked, pareto_cut
from shardwright.core.partition.tasks import Tasks
from shardwright.core.partition.tree import MEMORY_WEIGHT, tree_cut

PARTITIONERS = {
    "exact": "the least largest stage time, by dynamic programming over units",
    "pareto": "the least largest forward + largest backward, by dynamic programming with Pareto states",
    "tree": "SageMaker's: the module tree, a weighted cost of memory and time, D'Hondt (arXiv 2111.05972)",
    "blocks": "RaNNC's: atoms, blocks, stages (arXiv 2103.16063)",
}
DEFAULT = "exact"


def require_partitioner(name: object) -> str:
    """The name, if a partitioner has it. Raises PlanError for an unknown name."""
    if not isinstance(name, str) or name not in PARTITIONERS:
        raise PlanError(f"no partitioner is named {name!r}: {nearest(str(name), PARTITIONERS)}")
    return str(name)


@dataclass(frozen=True, slots=True)
class Units:
    """The units of a model with the figures that partitioners use; one entry per unit, in order."""

    paths: tuple[str, ...]
    """The path of the module around each unit."""
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    state_bytes: tuple[float, ...]
    kept_bytes: tuple[float, ...]
    entering_bytes: tuple[float, ...]
    """The bytes that enter each unit from the units before it, which a cut there sends."""
    entering_s: tuple[float, ...]
    """The seconds of that message."""
    send_s_per_byte: float
    """The seconds per byte of a large message, for partitioners that look inside units."""
    limit_bytes: float
    first_op: tuple[int, ...]
    """The first op of each unit."""

    def __len__(self) -> int:
        return len(self.forward_s)

    def stage_times(self) -> StageTimes:
        """The times of all stages, with the messages that leave forward and those that leave backward."""
        sent = np.array([0.0, *self.entering_s[1:], 0.0])
        return StageTimes(range_sums(self.forward_s) + sent[None, :], range_sums(self.backward_s) + sent[:, None])

    def fits(self, live: Sequence[int]) -> NDArray[np.bool_]:
        """The matrices (stages, n+1, n+1) that say whether a stage with ``live`` microbatches may hold those units."""
        state, kept = range_sums(self.state_bytes), range_sums(self.kept_bytes)
        return np.stack([state + count * kept <= self.limit_bytes for count in live])


@dataclass(frozen=True, slots=True)
class Judged:
    """A cut with its measures."""

    partitioner: str
    starts: tuple[int, ...]
    imbalance: float
    """The largest over the mean stage time, 1 at best."""
    objective_s: float
    """The largest forward + largest backward, messages included."""
    sent_bytes: int
    """The bytes that cross the cuts, forward, in one microbatch."""
    peak_bytes: float
    """The states and activations of the fullest stage."""
    solve_s: float


def paths_of(folded: Folded) -> tuple[str, ...]:
    """The path of the module around each unit: that of its first call, or of its first parameter."""
    found = []
    for unit in folded.units:
        names = [call.path for call in unit.calls if call.path]
        names = names or [folded.graph.parameters[p].name.rpartition(".")[0] for p in unit.parameters]
        found.append(names[0] if names else "")
    return tuple(found)


def cut_units(
    name: str,
    units: Units,
    tasks: Callable[[], Tasks],
    live: Sequence[int],
    memory_weight: float = MEMORY_WEIGHT,
) -> tuple[int, ...] | None:
    """The first unit of every stage (one stage for each entry of ``live``), by the partitioner of that name.

    ``tasks`` gives the ops, for partitioners that look inside units; their stages are rounded to whole units.
    ``memory_weight`` is the module tree's. Returns None where nothing fits. Raises PlanError for an unknown name, or
    fewer units than stages.
    """
    require_partitioner(name)
    stages = len(live)
    times = units.stage_times()
    if name == "tree":
        seconds = [f + b for f, b in zip(units.forward_s, units.backward_s, strict=True)]
        memory = [s + k for s, k in zip(units.state_bytes, units.kept_bytes, strict=True)]
        return tuple(tree_cut(units.paths, memory, seconds, stages, memory_weight))
    if name == "blocks":
        cut = block_cut(
            tasks(),
            stages,
            send_s_per_byte=units.send_s_per_byte,
            limit_bytes=units.limit_bytes,
            live=live,
        )
        return None if cut is None else uncoarsened(whole_units(cut.stage_of, units, tasks(), stages), units, live)
    fits = units.fits(live)
    if name == "exact":
        total = times.forward_s + times.backward_s
        found = min_max_cut(total, range_sums(units.state_bytes), stages, fits)
        return None if found is None else tuple(found)
    stage_times = [masked(times, fit) for fit in fits]
    wide = pareto_cut(lambda device, width: stage_times[device], len(units), stages, stages)
    return None if wide is None else wide.starts


def whole_units(stage_of_task: Sequence[int], units: Units, tasks: Tasks, stages: int) -> tuple[int, ...]:
    """The first unit of every stage when each unit goes where most of its time is; in order, no stage empty."""
    ends = (*units.first_op[1:], len(stage_of_task))
    wanted = []
    for first, end in zip(units.first_op, ends, strict=True):
        seconds = np.zeros(stages)
        for task in range(first, end):
            seconds[stage_of_task[task]] += tasks.forward_s[task] + tasks.backward_s[task]
        wanted.append(int(np.argmax(seconds)))
    count = len(wanted)
    starts = [0]
    for stage in range(1, stages):
        first = next((u for u in range(count) if wanted[u] >= stage), count)
        starts.append(min(max(first, starts[-1] + 1), count - (stages - stage)))
    return tuple(starts)


def uncoarsened(starts: tuple[int, ...], units: Units, live: Sequence[int]) -> tuple[int, ...]:
    """The cut after units are moved over the borders of stages for as long as that gains, as in RaNNC's last step for
    the parts of its blocks."""
    plain, fits = units.stage_times(), units.fits(live)

    def worth(cut: tuple[int, ...]) -> tuple[int, float, float]:
        ends, forward, backward = _stages(cut, plain)
        unfit = sum(not fits[stage, a, b] for stage, (a, b) in enumerate(ends))
        # Among equals the more even cut wins: it may lead to a better one.
        squares = sum((f + b) ** 2 for f, b in zip(forward, backward, strict=True))
        return unfit, round(max(forward) + max(backward), 12), squares

    best = worth(starts)
    while True:
        # A unit of one stage goes to another, all borders between them moving by one.
        shifted = [
            (*starts[:first], *(start + step for start in starts[first:last]), *starts[last:])
            for first in range(1, len(starts))
            for last in range(first + 1, len(starts) + 1)
            for step in (-1, 1)
        ]
        moved = [cut for cut in shifted if all(a < b for a, b in pairwise((*cut, len(units))))]
        found = min(moved, key=worth, default=starts)
        if worth(found) >= best:
            return starts
        starts, best = found, worth(found)


def _stages(cut: Sequence[int], times: StageTimes) -> tuple[list[tuple[int, int]], list[float], list[float]]:
    """The (first unit, end) of every stage of a cut, and the forward and backward seconds of each."""
    ends = list(pairwise((*cut, len(times.forward_s) - 1)))
    return ends, [float(times.forward_s[place]) for place in ends], [float(times.backward_s[place]) for place in ends]


def judge(name: str, units: Units, tasks: Callable[[], Tasks], live: Sequence[int]) -> Judged | None:
    """A partitioner's cut with its measures; None where it finds none."""
    began = time.perf_counter()
    starts = cut_units(name, units, tasks, live)
    solve_s = time.perf_counter() - began
    if starts is None:
        return None
    ends, forward, backward = _stages(starts, units.stage_times())
    total = [f + b for f, b in zip(forward, backward, strict=True)]
    state, kept = range_sums(units.state_bytes), range_sums(units.kept_bytes)
    peak = max(float(state[a, b] + count * kept[a, b]) for (a, b), count in zip(ends, live, strict=True))
    return Judged(
        name,
        starts,
        max(total) * len(total) / sum(total) if sum(total) else 1.0,
        max(forward) + max(backward),
        int(sum(units.entering_bytes[start] for start in starts[1:])),
        peak,
        solve_s,
    )
