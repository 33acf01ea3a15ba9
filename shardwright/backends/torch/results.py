"""What a step returns, brought from the stages that computed it to every rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwright.backends.torch.mesh import BoundMesh
from shardwright.backends.torch.pipeline import StepValues
from shardwright.backends.torch.program import ValueRef
from shardwright.backends.torch.stages import Division
from shardwright.backends.torch.transfer import as_carried
from shardwright.backends.torch.watch import Watch
from shardwright.core.errors import ShardwrightError


@dataclass(frozen=True, slots=True)
class Returned:
    """One tensor of the step's result.

    Attributes:
        outputs: this replica's value for every microbatch.
        everywhere: for floating scalars, the values of all microbatches of all dp replicas, in order; else None.
        weights: the weight of each entry of ``everywhere`` when this is a loss that was given weights; else None.
    """

    outputs: list[torch.Tensor]
    everywhere: torch.Tensor | None
    weights: torch.Tensor | None


def total_weight(
    division: Division, values: StepValues, stage_rank: Sequence[int], bound: BoundMesh, watch: Watch, microbatches: int
) -> tuple[float | None, torch.Tensor | None]:
    """The sum of the weights of all microbatches of all replicas, and each of them; None, None when none were given.

    Raises ShardwrightError when they add up to zero.
    """
    losses = division.program.losses
    if not losses or losses[0].weight is None:
        return None, None
    own = torch.zeros(microbatches, dtype=torch.float64)
    home = stage_rank[division.loss_stage[0]]
    if bound.coordinate("pp") == home:
        own = torch.stack([torch.as_tensor(w, dtype=torch.float64).cpu().reshape(()) for w in _given(values)])
    every = _over_dp(_from_home(own.to(bound.device, torch.float32), home, bound, watch), bound, watch)
    total = float(every.sum())
    if total == 0.0:
        raise ShardwrightError(
            f"the weights given to model.backward add up to 0 over all {every.numel()} microbatches: "
            f"there is nothing to take the mean of"
        )
    return total, every


def _given(values: StepValues) -> list[torch.Tensor | float]:
    return [w for w in values.loss_weights[0] if w is not None]


def share(
    division: Division,
    values: StepValues,
    stage_rank: Sequence[int],
    bound: BoundMesh,
    watch: Watch,
    microbatches: int,
    weights: torch.Tensor | None,
) -> dict[int, Returned]:
    """Give every rank every tensor of the result, by its position among the leaves. Every rank calls this together."""
    program = division.program
    loss_values = {loss.value for loss in program.losses}
    found: dict[int, Returned] = {}
    me = bound.coordinate("pp")
    for position, stage in enumerate(division.result_stage):
        if stage is None:
            continue
        home = stage_rank[stage]
        leaf = program.result.leaves[position]
        is_value = isinstance(leaf, ValueRef)
        if bound.size("pp") == 1:
            outputs = values.results[position]
        elif isinstance(leaf, ValueRef):
            shape, dtype = program.values[leaf.value].shape, program.values[leaf.value].dtype
            if me == home:
                packed = torch.stack([t.contiguous() for t in values.results[position]])
            else:
                packed = torch.empty((microbatches, *shape), dtype=dtype, device=bound.device)
            outputs = list(_from_home(packed, home, bound, watch))
        else:
            raise ShardwrightError("a step returns a parameter or buffer of a split model: use model.state_dict()")
        everywhere = None
        if outputs[0].numel() == 1 and outputs[0].is_floating_point():
            everywhere = _over_dp(torch.stack([t.reshape(()) for t in outputs]), bound, watch)
        is_loss = is_value and isinstance(leaf, ValueRef) and leaf.value in loss_values
        found[position] = Returned(outputs, everywhere, weights if is_loss else None)
    return found


def _from_home(tensor: torch.Tensor, home: int, bound: BoundMesh, watch: Watch) -> torch.Tensor:
    if bound.size("pp") == 1:
        return tensor
    source = bound.peer("pp", home)
    with watch.waiting(f"the results of the step from rank {source}"):
        dist.broadcast(as_carried(tensor), source, group=bound.handles["pp"])
    return tensor


def _over_dp(tensor: torch.Tensor, bound: BoundMesh, watch: Watch) -> torch.Tensor:
    size = bound.size("dp")
    if size == 1:
        return tensor
    every = [torch.empty_like(tensor) for _ in range(size)]
    with watch.waiting(f"the results of dp peers, ranks {list(bound.groups['dp'])}"):
        dist.all_gather(every, tensor.contiguous(), group=bound.handles["dp"])
    return torch.cat(every)


def compare_over_pp(numbers: Mapping[str, int], bound: BoundMesh, watch: Watch) -> dict[str, list[int]]:
    """For each name the ranks among the pp peers whose number differs from that of the peer at coordinate 0."""
    if bound.size("pp") == 1 or not numbers:
        return {}
    own = torch.tensor(list(numbers.values()), dtype=torch.int64, device=bound.device)
    every = [torch.empty_like(own) for _ in range(bound.size("pp"))]
    with watch.waiting(f"pp peers, ranks {list(bound.groups['pp'])}, to compare what they were given"):
        dist.all_gather(every, own, group=bound.handles["pp"])
    table = torch.stack(every).tolist()
    return {
        name: [bound.peer("pp", c) for c, row in enumerate(table) if row[column] != table[0][column]]
        for column, name in enumerate(numbers)
        if any(row[column] != table[0][column] for row in table)
    }
