"""The result of a step, brought from the stages that computed it to every rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import PipelineTransport
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.stage_values import StepValues
from shardwright.backends.torch.program.program import ValueRef
from shardwright.backends.torch.program.stages import Division
from shardwright.core.errors import ShardwrightError


@dataclass(frozen=True, slots=True)
class Returned:
    """One tensor of the step's result.

    Attributes:
        outputs: this replica's value for every microbatch.
        everywhere: for floating scalars, the values of all microbatches of all dp replicas, in order; else None.
        weights: the weight of each entry of ``everywhere`` in their mean, where they differ; else None.
        first: the place of this replica's first microbatch in ``everywhere``.
        are_numbers: whether the body returned numbers of Python, which became tensors.
    """

    outputs: list[torch.Tensor]
    everywhere: torch.Tensor | None
    weights: torch.Tensor | None
    first: int = 0
    are_numbers: bool = False


def as_tensors(numbers: Sequence[float]) -> list[torch.Tensor]:
    """Numbers of Python that microbatches returned, as tensors that hold them exactly."""
    dtype = torch.int64
    if any(isinstance(number, float) for number in numbers):
        dtype = torch.float64
    elif all(isinstance(number, bool) for number in numbers):
        dtype = torch.bool
    return [torch.tensor(number, dtype=dtype) for number in numbers]


@dataclass(frozen=True, slots=True)
class Shares:
    """The number of samples of each microbatch of each replica.

    Attributes:
        samples: for every dp coordinate, one number for each of its microbatches.
        replica: this rank's dp coordinate.
    """

    samples: tuple[tuple[int, ...], ...]
    replica: int

    @property
    def own(self) -> tuple[int, ...]:
        return self.samples[self.replica]

    @property
    def first(self) -> int:
        """The number of this replica's first microbatch among those of all replicas."""
        return sum(len(held) for held in self.samples[: self.replica])

    @property
    def flat(self) -> tuple[int, ...]:
        return tuple(n for held in self.samples for n in held)

    @property
    def equal(self) -> bool:
        """Whether all microbatches of all replicas have the same number of samples."""
        return len(set(self.flat)) == 1


def even_split(total: int, parts: int) -> tuple[int, ...]:
    """The number of samples of each of ``parts`` microbatches: the first ones have one more where it does not
    divide."""
    return tuple(total // parts + (m < total % parts) for m in range(parts))


def total_weight(
    divisions: Sequence[Division],
    values: StepValues,
    stage_rank: Sequence[int],
    bound: BoundMesh,
    transport: PipelineTransport,
    shares: Shares,
) -> tuple[float | None, torch.Tensor | None]:
    """The sum of the weights of all microbatches of all replicas, and the weight of each; None, None when none were
    given.

    Raises ShardwrightError when they add up to zero.
    """
    losses = divisions[0].program.losses
    if not losses or losses[0].weight is None:
        return None, None
    own = torch.zeros(len(shares.own), dtype=torch.float64)
    home = stage_rank[divisions[0].loss_stage[0]]
    if bound.coordinate("pp") == home:
        given = values.loss_weights[0]
        own = torch.stack(
            [torch.as_tensor(given[m], dtype=torch.float64).cpu().reshape(()) for m in range(len(shares.own))]
        )
    own = own.to(bound.device, torch.float32)
    every = over_dp(transport.spread(own, home, "the weights of the losses"), bound, transport.watchdog, shares)
    total = float(every.sum())
    if total == 0.0:
        raise ShardwrightError(
            f"the weights given to model.backward add up to 0 over all {every.numel()} microbatches: "
            f"there is nothing to take the mean of"
        )
    return total, every


def share(
    divisions: Sequence[Division],
    values: StepValues,
    stage_rank: Sequence[int],
    bound: BoundMesh,
    transport: PipelineTransport,
    shares: Shares,
    weights: torch.Tensor | None,
    loss_shares: Sequence[Sequence[float] | None] = (),
) -> dict[int, Returned]:
    """Give every rank every tensor of the result, by its position among the leaves. Every rank calls this together.

    Args:
        divisions: for each microbatch.
        weights: those of the losses, if any were given.
        loss_shares: for each loss the shares of all microbatches, where no weights were given.
    """
    first = divisions[0]
    outputs = _outputs(divisions, values, stage_rank, bound, transport)
    losses = {loss.value: number for number, loss in enumerate(first.program.losses)}
    by_samples = None
    if not shares.equal:
        by_samples = torch.tensor(shares.flat, dtype=torch.float32, device=bound.device)
    found: dict[int, Returned] = {}
    for position, tensors in outputs.items():
        leaf = first.program.result.leaves[position]
        everywhere = None
        if tensors[0].numel() == 1 and tensors[0].is_floating_point():
            everywhere = over_dp(torch.stack(tensors).reshape(-1), bound, transport.watchdog, shares)
        own_weights, number = by_samples, losses.get(leaf.value) if isinstance(leaf, ValueRef) else None
        if number is not None and weights is not None:
            own_weights = weights
        elif number is not None and number < len(loss_shares) and (given := loss_shares[number]) is not None:
            equal = len(set(given)) == 1
            own_weights = None if equal else torch.tensor(given, dtype=torch.float32, device=bound.device)
        is_number = position in first.program.numbers
        found[position] = Returned(tensors, everywhere, own_weights, shares.first, is_number)
    return found


def homes_of(division: Division, stage_rank: Sequence[int]) -> set[int]:
    """The pp ranks that send a result or weights to all others at the end of a step."""
    told = {stage_rank[stage] for stage in division.result_stage if stage is not None}
    losses = division.program.losses
    return told | {stage_rank[division.loss_stage[0]]} if losses and losses[0].weight is not None else told


def _outputs(
    divisions: Sequence[Division],
    values: StepValues,
    stage_rank: Sequence[int],
    bound: BoundMesh,
    transport: PipelineTransport,
) -> dict[int, list[torch.Tensor]]:
    """The value of each tensor of the result in every microbatch, on every rank. One message carries all tensors of one
    dtype from one rank."""
    me, count = bound.coordinate("pp"), len(divisions)
    together: dict[tuple[int, torch.dtype], list[int]] = {}
    found: dict[int, list[torch.Tensor]] = {}
    for position, stage in enumerate(divisions[0].result_stage):
        if stage is None:
            continue
        leaf = divisions[0].program.result.leaves[position]
        if bound.size("pp") == 1:
            found[position] = [values.results[position][m] for m in range(count)]
        elif isinstance(leaf, ValueRef):
            key = (stage_rank[stage], divisions[0].program.values[leaf.value].dtype)
            together.setdefault(key, []).append(position)
        else:
            raise ShardwrightError("a step returns a parameter or buffer of a split model: use model.state_dict()")
    for (home, dtype), positions in sorted(together.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        shapes = [_shape_of(division, position) for position in positions for division in divisions]
        if me == home:
            made = [values.results[p][m] for p in positions for m in range(count)]
            packed = torch.stack(made) if not any(shapes) else torch.cat([tensor.reshape(-1) for tensor in made])
        else:
            packed = torch.empty(sum(map(math.prod, shapes)), dtype=dtype, device=bound.device)
        transport.spread(packed, home, "the results of the step")
        if any(shapes):
            cut = packed.split([math.prod(shape) for shape in shapes])
            pieces = [piece.view(shape) for piece, shape in zip(cut, shapes, strict=True)]
        else:
            pieces = list(packed.unbind())
        for number, position in enumerate(positions):
            found[position] = pieces[number * count : (number + 1) * count]
    return dict(sorted(found.items()))


def _shape_of(division: Division, position: int) -> tuple[int, ...]:
    leaf = division.program.result.leaves[position]
    assert isinstance(leaf, ValueRef)
    return division.program.values[leaf.value].shape


def over_dp(tensor: torch.Tensor, bound: BoundMesh, watchdog: Watchdog, shares: Shares, what: str = "") -> torch.Tensor:
    """The values of all microbatches of all replicas along dim 0, from those of this one; ``what`` is waited for, in
    words."""
    size = bound.size("dp")
    if size == 1:
        return tensor
    most = max(len(held) for held in shares.samples)
    own = tensor.new_zeros(most, *tensor.shape[1:])
    own[: len(shares.own)] = tensor
    every = [torch.empty_like(own) for _ in range(size)]
    with watchdog.waiting(what or f"the results of dp peers, ranks {list(bound.groups['dp'])}"):
        dist.all_gather(every, own, group=bound.handles["dp"])
    return torch.cat([row[: len(held)] for row, held in zip(every, shares.samples, strict=True)])
