"""The makespans of one schedule under the costs of many cuts at once.

The order in which ranks run actions and links carry tensors is that of the table, whatever the costs, so a makespan is
a fixed sequence of sums and maxima. Here each of them is done for all cuts together: the same steps as those of the
event engine (`core.schedule.run`), on arrays.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import ScheduleError
from shardwright.core.schedule.actions import Action, B, F, I, W
from shardwright.core.schedule.schedule import Schedule
from shardwright.core.schedule.simulate import simulate_schedule

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The seconds of one microbatch for many cuts into stages.

    Args:
        forward, input_grad, weight_grad: of shape (stages, cuts).
        transfer: of shape (stages - 1, cuts), for the boundary after each stage.
    """

    forward: Seconds
    input_grad: Seconds
    weight_grad: Seconds
    transfer: Seconds


@dataclass(frozen=True, slots=True)
class Makespans:
    """A schedule, as the order in which its actions can be timed."""

    schedule: Schedule
    order: tuple[tuple[int, Action], ...]
    """The (rank, action) of every action, each after all that it waits for."""

    @classmethod
    def of(cls, schedule: Schedule) -> "Makespans":
        """The makespans of a schedule of compute actions alone, without a bound on its buffers.

        Raises ScheduleError for a schedule with sends and receives, credits or slices, or one that does not end.
        """
        if schedule.slices > 1:
            raise ScheduleError(f"{schedule.name} runs slices of sequences: makespans of many cuts are counted without")
        compute = all(part.kind in (F, B, I, W) for order in schedule.table for action in order for part in action.flat)
        if schedule.credits is not None or not compute:
            raise ScheduleError(
                f"{schedule.name}: makespans of many cuts are counted for schedules of forwards and backwards alone, "
                f"without credits; use simulate"
            )
        # With a second for every action, all that an action waits for starts before it.
        starts = simulate_schedule(schedule).start_s
        moments = [
            (float(at), rank, action)
            for rank, (order, times) in enumerate(zip(schedule.table, starts, strict=True))
            for action, at in zip(order, times, strict=True)
        ]
        moments.sort(key=lambda row: row[0])  # stable, so that a rank's actions stay in order
        return cls(schedule, tuple((rank, action) for _, rank, action in moments))

    def seconds(self, costs: StageSeconds) -> Seconds:
        """The makespan for each cut, of shape (cuts,). Overlapped pairs take as long as one action after the other."""
        schedule, placement = self.schedule, self.schedule.placement
        last, none = schedule.stages - 1, np.zeros(costs.forward.shape[1])
        lengths = {
            F: costs.forward, I: costs.input_grad, W: costs.weight_grad, B: costs.input_grad + costs.weight_grad
        }  # fmt: skip
        clock = [none] * schedule.ranks
        arrived: dict[tuple[bool, int, int | None], Seconds] = {}
        free: dict[tuple[int, int], Seconds] = {}
        for rank, action in self.order:
            now = clock[rank]
            for part in action.flat:
                if part.kind is not W:
                    entering = arrived.pop((part.kind is F, part.stage, part.microbatch), None)
                    if entering is not None:
                        now = np.maximum(now, entering)
            for part in action.flat:
                now = now + lengths[part.kind][part.stage]
            clock[rank] = now
            for part in action.flat:
                forward, to = part.kind is F, part.stage + (1 if part.kind is F else -1)
                if part.kind is W or not 0 <= to <= last:
                    continue
                target, there = placement[to], now
                if target != rank:
                    there = np.maximum(now, free.get((rank, target), now)) + costs.transfer[min(part.stage, to)]
                    free[rank, target] = there
                arrived[forward, to, part.microbatch] = there
        makespan: Seconds = np.maximum.reduce(clock)
        return makespan
