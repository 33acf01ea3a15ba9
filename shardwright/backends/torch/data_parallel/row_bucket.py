"""A table of which gradients of rows are made, in the place of a bucket: summed over replicas as rows, or whole, by
which moves fewer bytes (`row_gradients`)."""

from collections.abc import Callable

import torch
from torch import nn

from shardwright.backends.torch.data_parallel.row_gradients import sum_as_made
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.state.gradient_hook import HALF, GradientHook, RowSums
from shardwright.core.cost.row_gradients import Policy


class RowBucket:
    """One table, with the parts of a `Bucket` that an exchange calls. Its sum is made in one go, at the end of a step:
    ranks tell each other first how many rows they have.

    Attributes:
        policy: the form in which the gradient travels.
    """

    group = None

    def __init__(self, name: str, parameter: nn.Parameter, groups: DataGroups, policy: Policy) -> None:
        self.parameters, self.names = {name: parameter}, (name,)
        self.groups, self.policy, self.device = groups, policy, parameter.device
        self._sums = RowSums(torch.float32 if parameter.dtype in HALF else parameter.dtype)
        self._total: torch.Tensor | None = None
        self.present: set[int] = set()

    def hook(self, index: int, tell: Callable[[str], None], is_active: Callable[[], bool]) -> GradientHook:
        """The hook of the table."""
        return GradientHook(self.names[index], index, self._sums, tell, is_active, keeps_data=True)

    @property
    def is_sent(self) -> bool:
        """Whether the sum was made in this step."""
        return self._total is not None

    def send(self) -> None:
        """Sum the gradient over the replicas."""
        own = self._collect()
        if own is not None:
            self.present.add(0)
        else:
            (parameter,) = self.parameters.values()
            rows, width = parameter.shape[0], parameter.shape[1:]
            none = torch.empty(1, 0, dtype=torch.int64, device=self.device)
            values = torch.empty(0, *width, dtype=self._sums.dtype, device=self.device)
            own = torch.sparse_coo_tensor(none, values, (rows, *width), is_coalesced=True, check_invariants=False)
        self._total = sum_as_made(own, self.policy, self.groups.group)

    def _collect(self) -> torch.Tensor | None:
        """The gradient so far, with what autograd left at the table, as steps by messages do."""
        (parameter,) = self.parameters.values()
        if parameter.grad is not None:
            self._sums.add(0, parameter.grad)
            parameter.grad = None
        return self._sums.take()

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a gradient of the table."""
        self._sums.add(index, gradient)

    def take(self) -> dict[str, torch.Tensor]:
        """The gradient of this replica alone, if it has any."""
        own = self._collect()
        self.abandon()
        return {} if own is None else {self.names[0]: own}

    def finish(self) -> list[torch.Tensor]:
        """The gradient of the table."""
        assert self._total is not None
        total, self._total = self._total, None
        return [total]

    def abandon(self) -> None:
        """Forget the step."""
        self._total = None
        self._sums.take()

    def begin(self, *, leaves_each: bool) -> None:
        """Begin a step."""
        self.abandon()
        self.present.clear()
