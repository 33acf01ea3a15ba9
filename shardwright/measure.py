"""What the units of a model take on this machine, each run as a stage of its own."""

import copy
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.api import capture, plan
from shardwright.backends import protocol
from shardwright.core.cluster import Cluster
from shardwright.core.fold import fold
from shardwright.core.hardware.device import MeasuredUnit
from shardwright.core.measured import measured_costs

MICROBATCHES = 3
"""Run in one step; their medians count."""


def measure_units(
    model: Any,
    sample: Any,
    loss: Callable[..., Any] | None = None,
    *,
    microbatches: Sequence[int] = (1, 4),
    ranks: int = 1,
    steps: int = 5,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> tuple[MeasuredUnit, ...]:
    """Train a copy of the model for a few steps with every unit as a pipeline stage, all on one device, in fp32.

    Args:
        model, sample, loss: as `shardwright.capture` takes them; the sample has real values.
        microbatches: the sizes to run.
        ranks: processes that measure together, each a replica: what they take of each other is then measured too.
        steps: for each size, after one to warm up.
        progress: called with (what is measured, how much is done, how much there is).
        options: for the backend's `compile`.

    Raises what `capture` and `compile` raise.
    """
    graph = capture(model, sample, loss)
    backend = protocol.load(graph.framework)
    stages = len(fold(graph).units)
    found = []
    for done, size in enumerate(microbatches):
        if progress is not None:
            progress(f"{graph.model_name}, microbatches of {size}", done, len(microbatches))
        batch = _resized(sample, graph.sample_batch, MICROBATCHES * size)
        each_a_stage = plan(
            graph,
            Cluster("cpu", devices_per_node=ranks),
            batch=MICROBATCHES * size * ranks,
            pp=1, tp=1, dp=ranks, microbatch=size, virtual_stages=stages, stage_starts=range(stages),
            schedule="interleaved-1f1b" if stages > 1 else "1f1b", recompute="none", shard=0, precision="fp32",
        )  # fmt: skip
        running = backend.compile(each_a_stage, copy.deepcopy(model), loss=loss, **options)
        running.step(batch)
        costs = measured_costs(running.timelines(batch, steps))
        taken: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
        for unit, unit_class in enumerate(each_a_stage.model.unit_classes):
            backward = costs.input_grad_s[unit] + costs.weight_grad_s[unit]
            taken[unit_class].append((costs.forward_s[unit], backward))
        for unit_class, seconds in sorted(taken.items()):
            forward, backward = (statistics.median(part) for part in zip(*seconds, strict=True))
            digest = each_a_stage.model.digest
            found.append(MeasuredUnit(digest, unit_class, "fp32", size, forward, backward))
    return tuple(found)


def _resized(sample: Any, given: int, wanted: int) -> Any:
    """The sample with its rows repeated or left out, so that there are ``wanted``."""
    if isinstance(sample, Mapping):
        return type(sample)({key: _resized(value, given, wanted) for key, value in sample.items()})  # type: ignore[call-arg]
    if isinstance(sample, (tuple, list)):
        return type(sample)(_resized(value, given, wanted) for value in sample)
    shape = getattr(sample, "shape", ())
    return sample[np.arange(wanted) % given] if shape and shape[0] == given else sample
