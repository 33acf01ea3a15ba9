"""Samples, tokens and FLOPs per second, which follow from a plan's predicted step and the work in it.

Model FLOPs are those of matrix products, forward and backward, whatever is computed again; attention counts whole,
where a mask hides half of it too. MFU is their share of what the devices could do in the time (Chowdhery et al., arXiv
2204.02311, appendix B). Hardware FLOPs have what recompute repeats as well.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.core.values.fields import Amount


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step of a plan does, on all devices together."""

    tokens_of: str = ""
    """The input whose entries are the tokens; empty: the batch has samples only."""
    tokens: Amount = 0
    flops: tuple[tuple[str, Amount], ...] = ()
    """The FLOPs of the model, by precision."""
    recomputed_flops: Amount = 0
    """The FLOPs that recompute repeats."""
    unknown: tuple[str, ...] = ()
    """The ops whose FLOPs are not known and may be a part of them that matters."""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates of a plan.

    Attributes:
        samples_per_s, tokens_per_s: of all devices together; tokens None where the batch has none.
        flops_per_s: FLOPs of the model per second of one device; None where they are not known.
        hardware_flops_per_s: the same with what recompute repeats.
        mfu: model FLOPs over what a device could do; None where its peaks are not known either.
    """

    samples_per_s: float
    tokens_per_s: float | None
    flops_per_s: float | None
    hardware_flops_per_s: float | None
    mfu: float | None


def throughput(work: StepWork, samples: int, step_s: float, devices: int, peaks: Mapping[str, float]) -> Throughput:
    """The rates of a step.

    Args:
        samples: the global batch.
        peaks: FLOPs per second of one device at best, by precision.
    """
    tokens = work.tokens / step_s if work.tokens else None
    flops = hardware = mfu = None
    if work.flops and not work.unknown:
        of_model = sum(count for _, count in work.flops)
        flops = of_model / step_s / devices
        hardware = (of_model + work.recomputed_flops) / step_s / devices
        if all(peaks.get(kind, 0.0) > 0 for kind, _ in work.flops):
            mfu = sum(count / peaks[kind] for kind, count in work.flops) / step_s / devices
    return Throughput(samples / step_s, tokens, flops, hardware, mfu)
