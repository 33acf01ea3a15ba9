"""The share of every microbatch in the loss and the gradient of the whole batch, determined before a step is run."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from shardwright.backends.torch.loss.read import LossReading, StepReading
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.step_results import Shares, over_dp
from shardwright.backends.torch.program.program import Literal, Loss
from shardwright.core.errors import LossError
from shardwright.core.model.loss import Finding, shares_of_microbatches

LossShares = tuple[tuple[float, ...] | None, ...]
"""The share of every microbatch of every replica in each loss of a step; None where the step gives weights."""


def of_own(found: LossShares, shares: Shares) -> list[list[float | None]]:
    """The share of each microbatch of this replica in each loss."""
    return [[None if every is None else every[shares.first + m] for every in found] for m in range(len(shares.own))]


OF_REPLICAS = "mean over replicas of sums over microbatches"
OF_RANKS = "mean over ranks of sums over microbatches"
"""Reductions of SageMaker's: of ranks, where a microbatch holds samples of all peers of the tensor axis."""
REMEMBERED = 256
"""The number of readings of steps that are kept."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One of this replica's microbatches: its inputs, and a function that reads its step."""

    inputs: Sequence[torch.Tensor]
    key: Hashable
    read: Callable[[], StepReading]


class LossSemantics:
    """The relations of the losses of steps to their batches.

    Args:
        scope: whether an op that couples samples is meant to see a microbatch by itself ("replica") or those of all
            replicas ("global"); None: the user has not said.
    """

    def __init__(self, bound: BoundMesh, watchdog: Watchdog, scope: str | None) -> None:
        self.bound, self.watchdog, self.scope = bound, watchdog, scope
        self._read: dict[Hashable, StepReading] = {}

    def shares(
        self, losses: Sequence[Loss], microbatches: Sequence[Microbatch], shares: Shares, steps_name: str
    ) -> LossShares:
        """The shares of the microbatches in every loss. Every rank calls this together.

        Raises:
            LossError: the loss of the batch does not follow from those of its microbatches, and the step does not say
                how it is meant.
        """
        found: list[tuple[float, ...] | None] = []
        readings: list[Sequence[LossReading]] | None = None
        by_samples = tuple(n / sum(shares.flat) for n in shares.flat)
        for number, loss in enumerate(losses):
            if loss.weight is not None:
                found.append(None)
            elif loss.reduction == "sum":
                found.append((1.0,) * len(shares.flat))
            elif loss.reduction in (OF_REPLICAS, OF_RANKS):
                divisor = self.bound.size("dp")
                if loss.reduction == OF_RANKS:
                    own = [self.reading(microbatch).losses[number] for microbatch in microbatches]
                    divisor *= self._peers_in(own, steps_name)
                found.append((1.0 / divisor,) * len(shares.flat))
            elif loss.reduction == "mean" or len(shares.flat) == 1:
                found.append(by_samples)
            else:
                if readings is None:
                    readings = [self.reading(microbatch).losses for microbatch in microbatches]
                own = [reading[number] for reading in readings]
                found.append(self._of_loss(own, microbatches, shares, by_samples, steps_name))
        return tuple(found)

    def _peers_in(self, readings: Sequence[LossReading], steps_name: str) -> int:
        """How often a loss over the samples of all peers of the tensor axis has the mean of those over the samples of
        each: once in a mean, and in a sum as often as there are peers. Raises LossError for another loss."""
        kinds = {reading.verdict.reduction for reading in readings}
        if kinds == {"mean"}:
            return 1
        if kinds == {"sum"}:
            return self.bound.size("tp")
        raise LossError(
            f"average_grads_across_microbatches=False: the loss of {steps_name} is {' or '.join(sorted(kinds))}, and "
            f"how the loss of each rank of the tensor axis follows from that of all its peers' samples is known of a "
            f"mean and of a sum: set prescaled_batch=True and give these ranks the same batch"
        )

    def losses_of(self, microbatch: Microbatch) -> list[Loss] | None:
        """The losses of a step that is not recorded; None where it cannot be run to read them."""
        found = self.reading(microbatch).losses
        if not all(r.was_run for r in found):
            return None
        return [Loss(n, Literal(None) if r.has_weight else None, r.reduction) for n, r in enumerate(found)]

    def reading(self, microbatch: Microbatch) -> StepReading:
        """The reading of a microbatch's step."""
        known = self._read.get(microbatch.key)
        if known is None:
            self.watchdog.doing("reading the loss of the step")
            if len(self._read) >= REMEMBERED:
                self._read.pop(next(iter(self._read)))
            known = self._read[microbatch.key] = microbatch.read()
        return known

    def _of_loss(
        self, readings: Sequence[LossReading], microbatches: Sequence[Microbatch], shares: Shares,
        by_samples: tuple[float, ...], steps_name: str,
    ) -> tuple[float, ...]:  # fmt: skip
        verdict = readings[0].verdict
        other = next((r.verdict for r in readings if r.verdict.reduction != verdict.reduction), None)
        finding = next((r.verdict.finding for r in readings if r.verdict.finding is not None), None)
        if finding is None and other is not None:
            finding = Finding(
                "mixed", f"it is a {verdict.reduction} in one microbatch and a {other.reduction} in another"
            )
        if finding is not None:
            if self.scope == "replica" and finding.kind == "coupled":
                return by_samples
            raise LossError(_question(finding, shares, self.scope, steps_name))
        counts: dict[int, list[float]] = {}
        if verdict.needs_counts:
            own = [r.counted(m.inputs) for r, m in zip(readings, microbatches, strict=True)]
            every = self._of_all_replicas(own, shares)
            counts = {number: [row[number] for row in every] for number in range(len(every[0]))}
        return tuple(shares_of_microbatches(verdict.combinations, verdict.constant, shares.flat, counts))

    def _of_all_replicas(self, own: list[list[float]], shares: Shares) -> list[list[float]]:
        """The counts of all microbatches of all replicas."""
        if self.bound.size("dp") == 1:
            return own
        self.watchdog.doing("the start of the step")
        mine = torch.tensor(own, dtype=torch.float64).to(self.bound.device)
        what = f"dp peers, ranks {list(self.bound.groups['dp'])}, to tell what their losses count"
        every: list[list[float]] = over_dp(mine, self.bound, self.watchdog, shares, what).tolist()
        return every


def _question(finding: Finding, shares: Shares, scope: str | None, steps_name: str) -> str:
    """The text of an error: the problem, and the ways to say what is meant."""
    replicas = len(shares.samples)
    among = f"{len(shares.flat)} microbatches" + (f" on {replicas} replicas" if replicas > 1 else "")
    ways = [
        "model.backward(loss, weight=count) with the number that the loss is divided by",
        "model.backward(loss, reduction='mean') for the mean of the microbatches' losses by their samples, or 'sum'",
    ]
    if finding.kind == "coupled" and scope is None:
        ways.append(
            "'loss_scope': 'replica' in the configuration, if every microbatch is meant to be taken by itself, as when "
            "gradients are accumulated ('global' lets batch norm see the microbatches of all replicas together)"
        )
    if finding.kind == "coupled" and scope == "global":
        ways.append("'loss_scope': 'replica', since 'global' is carried out for batch norm alone")
    if finding.kind == "mixed":
        ways.append("one call of model.backward for each term")
    return (
        f"the loss of {steps_name} cannot be had from those of its {among}: {finding.reason}. Say what is meant by "
        f"{'; or '.join(ways)}. With one microbatch on one replica nothing has to be said"
    )
