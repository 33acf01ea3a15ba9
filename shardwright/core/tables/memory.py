"""Bytes per rank, by class: parameters, gradients, optimizer state, live activations, buffers."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.errors import PlanError
from shardwright.core.schedule.named_schedule import named_schedule
from shardwright.core.schedule.peak_memory import peak_live
from shardwright.core.tables.optimizers import optimizer_of
from shardwright.core.values.fields import Amount
from shardwright.core.values.recompute_modes import Mode, Recompute, goes_by_op

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
"""In fp8 linear products compute in 8 bits (`core.model.fp8_products`), and everything else is as in bf16."""
SumPrecision = Literal["fp32", "bf16", "fp16"]
"""A precision in which gradients add up."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The peak memory of one rank."""

    parameters_bytes: Amount
    gradients_bytes: Amount
    optimizer_bytes: Amount
    activations_bytes: Amount
    """The activations that are kept for backward passes, of all microbatches under way."""
    buffers_bytes: Amount
    """The memory that a pass holds for a while: values and gradients under way, recomputed values, tensors sent."""
    apart_bytes: Amount = 0
    """The bytes by which the peak is below the sum of the above, because not all exist at once: gradients that the
    first backward makes while it frees activations (`core.schedule.peak_memory`)."""
    host_bytes: Amount = 0
    """What lies in the host's memory, offloaded activations and state; it is not part of the total."""
    batch_bytes: Amount = 0
    """The rank's part of the batch, of all microbatches, which stays all through the step."""
    model_buffers_bytes: Amount = 0
    """The model's buffers, such as running statistics, and what a replica remembers of these."""
    update_bytes: Amount = 0
    """What the optimizer makes for a while as it updates, when activations and buffers are gone."""

    @property
    def classes(self) -> dict[str, int]:
        """The bytes of every class by its name."""
        return {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer states": self.optimizer_bytes,
            "model buffers": self.model_buffers_bytes,
            "batch": self.batch_bytes,
            "activations": self.activations_bytes,
            "buffers": self.buffers_bytes,
        }

    @property
    def total_bytes(self) -> int:
        """The most at once: while passes run, or while the optimizer updates."""
        staying = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        staying += self.model_buffers_bytes + self.batch_bytes
        passing = self.activations_bytes + self.buffers_bytes - self.apart_bytes
        return staying + max(passing, self.update_bytes)


STAYING = ("parameters", "gradients", "optimizer states", "model buffers", "batch")
"""The classes that a schedule does not change."""


def state_bytes(
    elements: int,
    precision: str,
    optimizer: str,
    shard: int,
    ways: int,
    gradient_precision: str | None = None,
    *,
    trained: int | None = None,
    updated: int | None = None,
    sums_from: int = 2,
    masters_alone: bool = False,
    frozen_in_fp32: bool = False,
) -> tuple[int, int, int]:
    """The (parameters, gradients, optimizer) bytes on one rank.

    ``elements`` is the number of parameter entries. ``trained`` of them have gradients (None: all), and ``updated`` of
    them have their optimizer states on this rank (None: all that are trained).
    ``gradient_precision`` is the precision in which gradients add up over microbatches (None: as the parameters). With
    "fp32" beside 16-bit parameters, the 16-bit gradients are freed as soon as they are added (Megatron's main
    gradients). Mixed precision keeps an fp32 master copy with the optimizer's states. ``shard`` is ZeRO's stage (arXiv
    1910.02054, section 5): 1 divides the optimizer's states by ``ways`` ranks, 2 the gradients too, 3 the parameters
    too. ``sums_from``: the stage from which gradients are divided. ``masters_alone``: of divided parameters that are
    trained, nothing is kept beside the master copy. ``frozen_in_fp32``: parameters that are not trained stay in fp32
    too, beside their 16-bit copy, which is gone between calls where ``masters_alone``.
    Raises PlanError for an unknown optimizer.
    """
    kept = optimizer_of(optimizer).states
    width = PRECISION_BYTES[precision]
    master = 4 if width < 4 else 0
    trained = elements if trained is None else trained
    states = (trained if updated is None else updated) * (master + 4 * kept)
    held = elements - trained if masters_alone and shard == 3 and master else elements
    frozen = 4 * (elements - trained) if frozen_in_fp32 and master else 0
    held -= elements - trained if frozen and masters_alone and shard == 3 else 0
    parts = [held * width + frozen, trained * PRECISION_BYTES[gradient_precision or precision], states]
    for level, part in ((3, 0), (sums_from, 1), (1, 2)):
        if shard >= level:
            parts[part] = -(-parts[part] // ways)
    return parts[0], parts[1], parts[2]


def state_bytes_per_element(
    precision: str, optimizer: str, shard: int = 0, ways: int = 1, gradient_precision: str | None = None
) -> float:
    """The bytes of one parameter with its gradient and optimizer state, on one rank: see `state_bytes`."""
    many = 1 << 20
    return sum(state_bytes(many, precision, optimizer, shard, ways, gradient_precision)) / many


def recomputable_units(unit_classes: Sequence[int]) -> tuple[bool, ...]:
    """Whether each unit is recomputed where all are, in full or but for their products: those that have others like
    them, and not the units before and after them, embeddings and head. Of a model in which most units have none like
    them, as of VGG or U-Net, all but the last, whose backward follows its forward at once. Layers of one stack are
    alike."""
    members = Counter(unit_classes)
    repeated = [members[held] > 1 for held in unit_classes]
    if 2 * sum(repeated) >= len(repeated):
        return tuple(repeated)
    return (*[True] * (len(repeated) - 1), False)


def unit_recompute(recompute: Recompute, recomputable: bool) -> Recompute:
    """The recompute mode of one unit: only recomputable units are recomputed in full, or but for their products."""
    return "none" if (recompute == "full" or goes_by_op(recompute)) and not recomputable else recompute


def require_recomputable(units: Sequence[int], recomputable: Sequence[bool]) -> None:
    """Raise PlanError for the first of some units, which another mode of recompute is for, that is not recomputed."""
    for unit in units:
        if not recomputable[unit]:
            raise PlanError(
                f"other_units={list(units)}: unit {unit} has no others like it, as embeddings and heads have not, and "
                f"is kept: leave it out"
            )


def modes_of(
    recompute: Recompute,
    recomputable: Sequence[bool],
    kept: Collection[int],
    offloaded: Collection[int],
    other: tuple[Recompute | None, Collection[int]] = (None, ()),
) -> list[Mode]:
    """The treatment of each unit's activations under the policy of the whole, with the units that differ from it.
    ``recomputable``: as in `recomputable_units`; ``other``: a second mode of recompute, and its units."""
    mode, others = other
    return [
        "offload" if unit in offloaded
        else "none" if unit in kept
        else unit_recompute(mode if mode and unit in others else recompute, again)
        for unit, again in enumerate(recomputable)
    ]  # fmt: skip


def kept_bytes(unit: UnitCost, recompute: Mode, *, beside_recomputed: bool = True) -> int:
    """The bytes of activations that a unit keeps on the device for one microbatch. ``beside_recomputed``: whether other
    units are recomputed, which hold the objects that this one leaves values in."""
    if recompute == "offload":
        return unit.left_bytes[0] if beside_recomputed else 0
    if recompute == "full":
        return unit.entering_bytes
    if goes_by_op(recompute):
        return unit.by_op.saved_bytes(recompute, unit.saved_bytes)
    return unit.saved_selective_bytes if recompute == "selective" else unit.saved_bytes


def left_in_objects(unit: UnitCost, recompute: Mode) -> int:
    """The part of `kept_bytes` that the unit leaves in objects, as a cache of keys and values: it stays for units that
    run again with these objects."""
    if recompute in ("full", "offload"):
        return unit.left_bytes[0]
    return unit.left_bytes[1] if goes_by_op(recompute) else 0


def recomputed_s(unit: UnitCost, recompute: Mode) -> float:
    """Seconds that the backward of one microbatch spends on recomputing."""
    if recompute == "full":
        return unit.forward_s - unit.not_again_s
    if goes_by_op(recompute):
        return unit.by_op.again_s(recompute)
    return max(unit.own_again_s, unit.selective_s) if recompute == "selective" else unit.own_again_s


def collectives_s(unit: UnitCost, recompute: Mode) -> float:
    """Seconds of one microbatch's collectives over the tensor axis, with those that full recompute runs again."""
    return unit.collective_s + (unit.forward_collective_s if recompute == "full" or goes_by_op(recompute) else 0.0)


def live_microbatches(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    """The largest number of live activations of one stage, for each rank; long schedules as in `live_bytes`."""
    return live_bytes(name, ranks, microbatches, virtual_stages, None)


def live_bytes(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    sizes: tuple[int, ...] | None,
    freed_by_input_grad: tuple[int, ...] | None = None,
) -> tuple[int, ...]:
    """The most bytes of activations that each rank keeps at once; the sizes are as in `peak_live`. Schedules settle:
    beyond a few rounds of the pipeline the peak is constant or grows evenly, so long ones are extrapolated from short
    ones."""
    first, second = 4 * ranks, 5 * ranks
    if microbatches <= second:
        return _peaks(name, ranks, microbatches, virtual_stages, sizes, freed_by_input_grad)
    growth = (microbatches - second) / (second - first)
    early, late = (_peaks(name, ranks, count, virtual_stages, sizes, freed_by_input_grad) for count in (first, second))
    return tuple(int(b + (b - a) * growth + 0.5) for a, b in zip(early, late, strict=True))


@lru_cache(maxsize=4096)
def _peaks(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    sizes: tuple[int, ...] | None,
    freed_by_input_grad: tuple[int, ...] | None,
) -> tuple[int, ...]:
    schedule = named_schedule(name, ranks, microbatches, virtual_stages)
    return tuple(peak_live(order, sizes, freed_by_input_grad) for order in schedule.table)
