"""The costs of measured units: the costs that the model of ops predicts, corrected by measured runs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from shardwright.core.cluster.hardware.device import MeasuredUnit
from shardwright.core.cost.unit_seconds import UnitCost

FARTHEST = 8.0
"""The most by which the entries of two units' parameters may differ for the measured time of one to say anything of the
other: caches and launches weigh otherwise."""


def calibrated(
    cost: UnitCost,
    measured: Sequence[MeasuredUnit],
    microbatch: int,
    predicted: Callable[[int], UnitCost],
    *,
    with_collectives: bool = False,
) -> UnitCost:
    """``cost`` with its seconds multiplied by measured over predicted, with the measured time per step added, and with
    the measured shares: of the optimizer's step, and of idle time that is lent.

    Args:
        cost: the cost of one microbatch of ``microbatch`` samples, on the whole unit or on one rank's part of it.
        measured: runs of this class of units, all at one tensor degree; with none, the cost is returned unchanged.
        predicted: the predicted cost of what ran, at a microbatch that was measured.
        with_collectives: whether the runs were at the cost's own tensor degree, with collectives; otherwise
            collectives are left as they are.

    Seconds of several measured microbatches are laid on straight lines, as those of what is predicted for them, and the
    factor is that of the lines: launches take a share of a pass that is the larger, the fewer samples there are, and
    all of a loop over time. Outside of what was measured the nearest line goes on, but for one that says less than
    nothing of no samples, or of a sample; there the factor is that of the nearest microbatch.
    """
    if not measured:
        return cost
    runs = sorted(measured, key=lambda run: run.microbatch)
    said = [predicted(run.microbatch) for run in runs]
    sizes = [run.microbatch for run in runs]

    def factor(taken: list[float], expected: list[float]) -> float:
        seconds, counted = (_on_lines(sizes, values, microbatch) for values in (taken, expected))
        if seconds is None or counted is None:
            return between([t / e if e > 0 else 1.0 for t, e in zip(taken, expected, strict=True)])
        return seconds / counted

    def between(taken: list[float]) -> float:
        return float(np.interp(np.log(microbatch), np.log(sizes), taken))

    forward = factor([run.forward_s for run in runs], [c.forward_s for c in said])
    back = [c.input_grad_s + c.weight_grad_s + c.own_again_s for c in said]
    backward = factor([run.backward_s for run in runs], back)
    entries = max(1, said[0].parameter_elements)
    once = between([run.step_s for run in runs]) * cost.parameter_elements / entries
    passes = 0.0 if with_collectives else cost.collective_s / 2
    return replace(
        cost,
        collective_s=cost.collective_s * (forward + backward) / 2 if with_collectives else cost.collective_s,
        forward_collective_s=cost.forward_collective_s * (forward if with_collectives else 1.0),
        forward_s=_scaled(cost.forward_s, min(passes, cost.forward_s), forward),
        input_grad_s=_scaled(cost.input_grad_s, min(passes, cost.input_grad_s), backward),
        weight_grad_s=cost.weight_grad_s * backward,
        selective_s=cost.selective_s * forward,
        not_again_s=cost.not_again_s * forward,
        own_again_s=cost.own_again_s * backward,
        by_op=cost.by_op.scaled(forward),
        step_s=cost.step_s + once,
        update_share=between([run.update_share for run in runs]),
        idle_lent=between([run.idle_lent for run in runs]),
    )


def runs_of_form(
    measured: Sequence[MeasuredUnit], form: str, precision: str, entries: int, *, in_stages: bool
) -> list[MeasuredUnit]:
    """The measured runs of whole units of a form in another model: of those nearest in the ``entries`` of their
    parameters, at most `FARTHEST` times as large or small, and in stages or not, if there are any.

    They say something of passes alone: what a step takes beside them, and whether parameters stay in a cache, is of
    that model."""
    alike: dict[tuple[str, int], list[MeasuredUnit]] = {}
    for run in measured:
        if (run.form, run.precision, run.tensor_degree) == (form, precision, 1):
            alike.setdefault((run.model, run.unit_class), []).append(run)

    def distance(runs: list[MeasuredUnit]) -> float:
        return abs(math.log(max(1, runs[0].parameter_elements) / max(1, entries)))

    nearest = min(alike.values(), key=distance, default=[])
    if not nearest or distance(nearest) > math.log(FARTHEST):
        return []
    runs = [run for run in nearest if run.in_stages == in_stages] or nearest
    return [replace(run, step_s=0.0, update_share=1.0) for run in runs]


def as_counted(cost: UnitCost, run: MeasuredUnit) -> UnitCost:
    """What was counted for a measured unit of another model, of the same form as that of ``cost``."""
    return replace(
        cost,
        forward_s=run.counted_forward_s,
        input_grad_s=run.counted_backward_s,
        weight_grad_s=0.0,
        parameter_elements=run.parameter_elements,
    )


def _on_lines(sizes: Sequence[int], seconds: Sequence[float], size: int) -> float | None:
    """The seconds of a size, on the straight line through those of the two sizes around it, or of the two nearest ones;
    None where there is no such line with a fixed part and a part for each sample, neither below nothing."""
    known = sorted(dict(zip(sizes, seconds, strict=True)).items())
    if len(known) < 2:
        return None
    after = min(max(1, sum(each < size for each, _ in known)), len(known) - 1)
    (one, taken), (other, more) = known[after - 1 : after + 1]
    slope = (more - taken) / (other - one)
    is_within = one <= size <= other
    fixed = taken - slope * one
    if not is_within and (slope < 0 or fixed < 0):
        return None
    found = fixed + slope * size
    return found if found > 0 else None


def _scaled(seconds: float, collective_s: float, factor: float) -> float:
    return collective_s + (seconds - collective_s) * factor
