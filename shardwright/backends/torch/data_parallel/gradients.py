"""Gradients over the data axis and over the holders of tied parameters, and the norm of all of them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from shardwright.backends.torch.data_parallel.comm_hook import CommHook
from shardwright.backends.torch.data_parallel.overlap import Exchange
from shardwright.backends.torch.data_parallel.row_gradients import row_tables
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.pipeline_messages import as_carried
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.flat_shards import FlatShards
from shardwright.backends.torch.state.gradient_hook import added, entries_of
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.backends.torch.state.parts import Parts
from shardwright.core.cost.row_gradients import Policy
from shardwright.core.errors import ShardwrightError

_DOUBLES = (torch.float64, torch.complex128)
"""The dtypes whose norm is taken in float64."""


class Gradients:
    """The gradients of one step, taken from what the backward passes left to those that the unsplit model would
    have.

    Attributes:
        parts: the parts of parameters that this rank holds.
        data: the ranks of the data axis; those that share the shards of parameters, where these are sharded over it.
        passes_per_step: the number of training steps after which gradients are summed over replicas; those before add
            up on every replica by themselves.
        is_held: whether gradients are not to be summed, whatever the number of the step.
    """

    def __init__(self, ownership: Ownership, bound: BoundMesh, watchdog: Watchdog, parts: Parts) -> None:
        self.ownership, self.bound, self.watchdog, self.parts = ownership, bound, watchdog, parts
        self.data: DataGroups | None = None
        self.passes_per_step, self.is_held = 1, False
        self._passes = 0
        self._held: dict[str, torch.Tensor] = {}
        """The whole gradients of this replica of the steps that were not summed, divided as they are to be."""
        self._has_held_back = False
        """Whether the step before held gradients back: on all replicas, though some may have had none."""
        self._looks: RemovableHandle | None = None
        self._before: dict[str, torch.Tensor] = {}
        self._order: tuple[str, ...] = ()
        self._exchange: Exchange | None = None
        self._exchanged: tuple[tuple[str, ...], FlatShards | None] = (), None
        """The parameters and the sharded ones that the exchange was made for."""
        self._under_way = False
        self.bucket_bytes: int | None = None
        """The size of a bucket of whole gradients, where a plan says it."""
        self.row_policy: Policy = "auto"
        """The form in which gradients of rows travel between replicas."""
        self.comm_hook: CommHook | None = None
        """The user's hook in the place of the sums over replicas."""
        self.is_clipped = False
        """Whether the gradients of the last step were clipped by `clip_once`."""
        self.last_norm: torch.Tensor | None = None
        """The norm of the gradients of the last step, where it was asked for."""

    def begin(self, order: Sequence[str] | None = None, reduces_each: bool | None = None) -> Exchange | None:
        """Set aside the gradients that earlier steps accumulated: they are reduced already.

        With ``order``, the names of this rank's parameters in the order in which their gradients become whole, returns
        the exchange to tell of that, so that sums over dp begin at once; None where there is nothing to sum. The first
        order that is given is kept: buckets are the same on all replicas, whatever the sizes of their batches.
        ``reduces_each``: whether gradients leave after each microbatch; None: as the level of sharding has it.
        """
        self._before, self.last_norm, self.is_clipped = {}, None, False
        for name, parameter in self.ownership.local_parameters().items():
            if parameter.grad is not None:
                self._before[name] = parameter.grad
                parameter.grad = None
        if order is None or not self._exchanges:
            return None
        self._order = self._order or tuple(order)
        exchange = self._exchange_of(self._trainable())
        if self.data is not None:
            self.data.tags.begin()
        exchange.begin(holds_back=self.holds_back or self._has_held_back, each_microbatch=reduces_each)
        self._under_way = True
        return exchange

    @property
    def holds_back(self) -> bool:
        """Whether the gradients of the next training step stay on their replicas."""
        return self._exchanges and (self.is_held or (self._passes + 1) % self.passes_per_step > 0)

    def forget_held(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let go of what was held back for these parameters."""
        for name in [self.ownership.name_of(parameter) for parameter in parameters] if self._held else ():
            self._held.pop(name or "", None)

    def close(self) -> None:
        """Look at no optimizer any more, sum nothing, and take the hooks off the parameters: torch's collector does not
        see them, so that with them the model would stay for ever."""
        if self._looks is not None:
            self._looks.remove()
        if self._exchange is not None:
            self._exchange.close()
        if self.data is not None:
            self.data.close()

    def _require_summed(self, call: str, names: Iterable[str | None]) -> None:
        """Raise ShardwrightError where gradients of these parameters were held back and not summed since."""
        if any(name in self._held for name in names):
            raise ShardwrightError(
                f"{call} after a step whose gradients were not summed over the replicas, under no_sync or "
                f"backward_passes_per_step={self.passes_per_step}: run a step that sums them before, or call zero_grad"
            )

    def _look_at_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._require_summed(f"{type(optimizer).__name__}.step()", map(self.ownership.name_of, parameters))

    def hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let a hook of the user's sum gradients over the replicas.

        Raises ShardwrightError: there is one, there are no replicas, gradients were summed already, or it would take
        all ranks for replicas.
        """
        if not callable(hook):
            raise ShardwrightError(f"register_comm_hook(state, {hook!r}): expected a function of (state, bucket)")
        replicas = self.bound.size("dp")
        if self.comm_hook is not None:
            raise ShardwrightError(f"the communication hook {self.comm_hook.named()} is there: register one, once")
        if replicas == 1:
            raise ShardwrightError("register_comm_hook: there is one replica, whose gradients are not communicated")
        if self._exchange is not None:
            raise ShardwrightError("register_comm_hook after a step: register it before the first one")
        group = getattr(state, "process_group", state)
        if group is None and self.bound.mesh.size > replicas:
            raise ShardwrightError(
                "register_comm_hook without a process group, where torch's hooks take all ranks for replicas: give "
                "sw.get_rdp_process_group() as the state, or as the state's process_group"
            )
        self.comm_hook = CommHook(state, hook, replicas)

    @property
    def _exchanges(self) -> bool:
        """Whether gradients go through an exchange: there are replicas, or steps compute in another dtype."""
        return self.bound.size("dp") > 1 or self.parts.flat is not None

    def _trainable(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.ownership.local_parameters().items() if p.requires_grad}

    def _exchange_of(self, trainable: dict[str, nn.Parameter]) -> Exchange:
        made_for = tuple(trainable), self.parts.flat
        if self._exchange is None or self._exchanged != made_for:
            if self._exchange is not None:
                self._exchange.close()
            if self.data is None:
                self.data = DataGroups.bind(self.bound, self.bound.size("dp"), self.watchdog)
            order = "; ".join(self._order)
            if not self.data.have_alike(order, self.bound.device, self.watchdog):  # where some dropped layers
                self._order = ()
            names = dict.fromkeys((*self._order, *reversed(trainable)))
            chosen = {name: trainable[name] for name in names if name in trainable}
            self._exchange = Exchange(
                chosen, self.data, self.watchdog, self.parts.flat, self.comm_hook, self.bucket_bytes,
                self._row_tables(), self.row_policy,
            )  # fmt: skip
            self._exchanged = made_for
        return self._exchange

    def _row_tables(self) -> frozenset[torch.Tensor]:
        """The tables whose gradients are summed as rows: where replicas and tables are whole, and no hook of the user's
        takes buckets."""
        is_whole = self.parts.flat is None and self.parts.tensor is None and self.comm_hook is None
        return row_tables(self.ownership.model) if is_whole and self.bound.size("dp") > 1 else frozenset()

    def finish(self, total_weight: float | None, factor: float = 1.0) -> None:
        """Sum over dp, over the tensor axis and over the holders of tied parameters, divide by the total weight if any
        and by the ``factor`` of losses, and add the gradients that were set aside; or keep them on this replica, where
        they are held back. Every rank calls this together."""
        local = self.ownership.local_parameters()
        divisor = factor if total_weight is None else total_weight * factor
        if self._exchanges:
            exchange = self._exchange_of(self._trainable())
            if not self._under_way:  # by messages: gradients are where autograd left them
                exchange.begin(holds_back=True)
            self._under_way = False
            self._has_held_back = held_back = self.holds_back
            self._passes += 1
            if held_back:
                self._hold(exchange.take(), divisor)
                return
            exchange.add({name: held.mul_(divisor) for name, held in self._held.items()})
            self._held = {}
            for name, gradient in exchange.finish().items():
                parameter = local[name]
                parameter.grad = None if gradient is None or not parameter.numel() else gradient.to(parameter.dtype)
        if self.parts.tensor is not None:
            self.parts.tensor.sum_gradients(self._trainable())
        self._sum_ties()
        if divisor == 1.0 and not self._before:
            return
        for name, parameter in local.items():
            if parameter.grad is not None and divisor != 1.0:
                parameter.grad.div_(divisor)
            before = self._before.get(name)
            if before is not None:
                parameter.grad = before if parameter.grad is None else _added(before, parameter.grad)
        self._before = {}

    def _hold(self, gradients: dict[str, torch.Tensor], divisor: float) -> None:
        """Add the gradients of this replica to those held back, and put back those that were set aside."""
        if self._looks is None:
            self._looks = register_optimizer_step_pre_hook(self._look_at_optimizer)
        for name, gradient in gradients.items():
            gradient.div_(divisor)
            self._held[name] = _added(self._held[name], gradient) if name in self._held else gradient
        for name, parameter in self.ownership.local_parameters().items():
            parameter.grad = self._before.get(name)
        self._before = {}

    def abandon(self) -> None:
        """Put back the gradients that were set aside: the step has failed."""
        if self._exchange is not None:
            self._exchange.abandon()
        if self.data is not None:
            self.data.tags.begin(failed=True)
        self._under_way = False
        for name, parameter in self.ownership.local_parameters().items():
            parameter.grad = self._before.get(name)
        self._before = {}

    def _sum_ties(self) -> None:
        for name, holders in self.ownership.ties:
            parameter = self.ownership.parameter(name)
            if self.ownership.rank not in holders or not parameter.requires_grad:
                continue
            self.watchdog.doing(f"summing the gradients of {name} over pp ranks {holders}")
            with self.watchdog.waiting(f"its holders, ranks {[self.bound.peer('pp', h) for h in holders]}"):
                self._sum_tie(parameter, holders)

    def _sum_tie(self, parameter: nn.Parameter, holders: Sequence[int]) -> None:
        """Send the gradient to the home, sum it there in the order of holders, and send it back: every holder has the
        same bits."""
        me, home = self.ownership.rank, holders[0]
        present = torch.tensor([0 if parameter.grad is None else 1], dtype=torch.int32, device=self.bound.device)
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        own = own.to_dense() if own.is_sparse else own
        total = own.resolve_conj().resolve_neg().to(self.bound.device).contiguous()
        if me != home:
            peer = self.bound.peer("pp", home)
            for tensor in (present, total):
                dist.send(as_carried(tensor), peer)
            for tensor in (present, total):
                dist.recv(as_carried(tensor), peer)
        else:
            other, more = torch.empty_like(total), torch.empty_like(present)
            for holder in holders[1:]:
                peer = self.bound.peer("pp", holder)
                dist.recv(more, peer)
                dist.recv(as_carried(other), peer)
                present += more
                total += other
            for holder in holders[1:]:
                for tensor in (present, total):
                    dist.send(as_carried(tensor), self.bound.peer("pp", holder))
        is_elsewhere = self.parts.flat is not None and self.parts.flat.store is not None
        parameter.grad = None if not int(present) else own.copy_(total) if is_elsewhere else total

    def clip_norm(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scale the gradients so that their norm, over the whole model, is at most ``max_norm``; return the norm
        before.

        Raises ShardwrightError for a norm that is not finite, if asked to.
        """
        norm = self.checked_norm(norm_type, error_if_nonfinite)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for parameter in self.ownership.local_parameters().values():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.device, parameter.grad.dtype))
        return norm

    def checked_norm(self, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """The norm to clip by. Raises ShardwrightError where gradients wait to be summed over replicas, and for a norm
        that is not finite if asked to."""
        self._require_summed("clip_grad_norm_", self._held)
        norm = self.norm(norm_type)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise ShardwrightError(f"the norm of the gradients is {float(norm)}: expected a finite number")
        return norm

    def clip_once(self, max_norm: float) -> None:
        """Clip the gradients of the last step, the first time that this is called after it: several optimizers may
        train the model. Every rank calls this."""
        if not self.is_clipped:
            self.clip_norm(max_norm, 2.0, False)
            self.is_clipped = True

    def norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradients of the whole model, the same on every rank; not finite where an entry is not. Every
        rank calls this. A tied parameter counts once, at its home."""
        placement = self.ownership.placement
        local = self.ownership.local_parameters()
        counted = [
            p.grad for name, p in local.items()
            if p.grad is not None and (placement is None or placement.parameters[name][0] == self.ownership.rank)
            and (self.bound.coordinate("tp") == 0 if self.parts.tensor is None else self.parts.tensor.counts(name))
            and (self.parts.flat is None or self.parts.flat.counts(name))
        ]  # fmt: skip
        device = self.bound.device
        infinite = math.isinf(norm_type)
        doubles = any(p.dtype in _DOUBLES for p in self.ownership.model.parameters())  # the same on all ranks
        dtype = torch.float64 if doubles else torch.float32
        own = torch.zeros((), dtype=dtype, device=device)
        if counted:
            norms = torch.stack([_norm(g, norm_type, dtype).to(device) for g in counted])
            # A largest of NaN and a number may be either over ranks, so NaN counts as infinity.
            own = norms.max().nan_to_num(nan=math.inf, posinf=math.inf) if infinite else norms.pow(norm_type).sum()
        axes = [axis for axis in ("pp", "tp") if self.bound.size(axis) > 1]
        over = [(self.bound.groups[axis], self.bound.handles[axis]) for axis in axes]
        flat = self.parts.flat
        if flat is not None and flat.data.group is not None:
            over.append((flat.data.ranks, flat.data.group))
        for ranks, group in over:
            self.watchdog.doing("the norm of all gradients")
            with self.watchdog.waiting(f"ranks {list(ranks)}"):
                dist.all_reduce(own, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group)
        self.last_norm = own if infinite else own.pow(1.0 / norm_type)
        return self.last_norm


def _added(sum_so_far: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, in the memory of the first but where that one is of rows."""
    return added(sum_so_far, gradient) if sum_so_far.is_sparse else sum_so_far.add_(gradient)


def _norm(gradient: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """The norm in ``dtype``; the norm of complex entries is that of their absolute values. Rows that are not there are
    zeros."""
    given = entries_of(gradient)
    if not given.numel():  # of no rows
        return torch.zeros((), dtype=dtype, device=given.device)
    entries = given.abs() if given.is_complex() else given
    norm: torch.Tensor = torch.linalg.vector_norm(entries, norm_type, dtype=dtype)
    return norm
