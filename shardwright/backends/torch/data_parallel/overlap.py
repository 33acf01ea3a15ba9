"""Gradients summed over the data axis while the pipeline still runs.

Gradients add up in buckets: flat buffers, or the gradient of one large parameter as autograd made it. A bucket leaves
when the gradients in it are whole: after the last weight gradient of the stages that use its parameters, or after each
where every rank is to keep no more than its shard. So gradients are exchanged while backward passes go on, and while
other ranks of the pipeline still compute. Buckets leave in one fixed order, the same on all replicas, as in torch's
DistributedDataParallel (Li et al., VLDB 2020, section 3.2.3). Where replicas are whole a bucket is summed in place;
where parameters are sharded, each rank sums its shard of it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from shardwright.backends.capabilities import TORCH_MEMORY
from shardwright.backends.torch.data_parallel.comm_hook import CommHook, GradientBucket
from shardwright.backends.torch.data_parallel.row_bucket import RowBucket
from shardwright.backends.torch.machine.data_groups import DataGroups
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.flat_layout import FlatLayout
from shardwright.backends.torch.state.flat_shards import GRADIENTS, FlatGroup, FlatShards
from shardwright.backends.torch.state.gradient_hook import HALF, GradientHook, GradientSums, dense_strides
from shardwright.core.cost.row_gradients import Policy
from shardwright.core.errors import ShardwrightError

SOLE_SHARE = 4
"""A gradient of this part of a bucket, or more, is a bucket of its own, which is summed where it lies."""
READY_BYTES = 25 * 2**20
"""The bytes of gradients after which the small ones among them leave."""


class Bucket:
    """Parameters whose gradients travel together.

    Args:
        group: the sharded parameters of the bucket: each rank keeps the sum of its shard. None: each gets the sum of
            all.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], groups: DataGroups, group: FlatGroup | None) -> None:
        self.parameters, self.groups, self.group = dict(parameters), groups, group
        self.names = tuple(self.parameters)
        some = next(iter(self.parameters.values()))
        if group is None:
            self.layout = FlatLayout.cut([p.numel() for p in self.parameters.values()], ways=1)
            self._places = [
                (p.shape, dense_strides(p), offset)
                for p, offset in zip(self.parameters.values(), self.layout.offsets, strict=True)
            ]
        else:
            self.layout, self._places = group.layout, group.places
        self.device = some.device if group is None else group.device
        self._dtype = torch.float32 if some.dtype in HALF else some.dtype
        self._sums = GradientSums(self._places, self.layout.entries, self._dtype, self.device)
        self.present: set[int] = set()
        """The parameters that had a gradient on this rank in this step."""
        self._flat: torch.Tensor | None = None
        self._sum: torch.Tensor | None = None
        self._waits: Callable[[], torch.Tensor] | None = None
        self.comm_hook: CommHook | None = None
        """What sums a whole bucket over the replicas in the place of an all-reduce."""
        self.number, self.is_last = 0, False

    def hook(self, index: int, tell: Callable[[str], None], is_active: Callable[[], bool]) -> GradientHook:
        """The hook of one of the parameters."""
        keeps_data = self.group is None or not self.group.frees
        return GradientHook(self.names[index], index, self._sums, tell, is_active, keeps_data)

    @property
    def is_sent(self) -> bool:
        """Whether a sum was begun in this step."""
        return self._sum is not None or self._waits is not None

    def send(self) -> None:
        """Begin the sum. The op is a sum, never a mean: the scale is in the losses already."""
        self.receive()
        self._flat = self._collect()
        if self.group is not None:
            self._waits = self.groups.sum_shards(self._flat, self.group.number, self.layout.borders)
        elif self.comm_hook is None:
            self._waits = self.groups.begin(self._flat)
        else:
            parameters = list(self.parameters.values())
            bucket = GradientBucket(self.number, self.is_last, self._flat, parameters, self._places)
            self._waits = self.comm_hook.begin(bucket)

    def _collect(self) -> torch.Tensor:
        """The gradients in one flat tensor, those that are not there as zeros; they are nowhere else any more."""
        flat, filled = self._sums.take()
        if flat is None:
            flat = torch.empty(self.layout.entries, dtype=self._dtype, device=self.device)
        for index, (parameter, place) in enumerate(zip(self.parameters.values(), self._places, strict=True)):
            view, gradient = flat.as_strided(*place), parameter.grad
            if gradient is not None:
                parameter.grad = None
                if index in filled or gradient.is_sparse:
                    (view if index in filled else view.zero_()).add_(gradient)
                else:
                    view.copy_(gradient)
                filled.add(index)
            elif index not in filled:
                view.zero_()
        self.present |= filled
        return flat

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add a whole gradient of one of the parameters."""
        self._sums.add(index, gradient)

    def take(self) -> dict[str, torch.Tensor]:
        """The whole gradients of this replica alone, of those parameters that have any."""
        flat, self.present = self._collect(), self.present
        found = {self.names[index]: flat.as_strided(*self._places[index]) for index in sorted(self.present)}
        self.abandon()
        return found

    def receive(self) -> None:
        """Wait for the sum that is under way, if any."""
        if self._waits is None:
            return
        found, self._waits = self._waits(), None
        if self.group is None:
            self._sum = found
        else:
            self._sum = self.group.collect(self._sum, found)
        self._flat = None

    def finish(self) -> list[torch.Tensor]:
        """Wait for everything; the gradients of the parameters, or this rank's pieces of them."""
        self.receive()
        assert self._sum is not None
        total, self._sum = self._sum, None
        if self.group is not None:
            return self.group.collected(total)
        return [total.as_strided(*place) for place in self._places]

    def abandon(self) -> None:
        """Forget what is under way."""
        self._flat = self._sum = self._waits = None
        self._sums.clear()

    def begin(self, *, leaves_each: bool) -> None:
        """Begin a step, in which the gradients leave after each microbatch, or after several."""
        self.abandon()
        self.present.clear()
        self._sums.gathers_late = leaves_each


class Exchange:
    """The sums over the data axis, one step after the other.

    Args:
        order: the parameters that need a gradient, in the order in which these should become whole: the same on all
            replicas.
        flat: the sharded parameters; None where replicas are whole.
        comm_hook: what sums whole buckets in the place of an all-reduce.
        bucket_bytes: the size of a bucket; None: as `MemoryTraits` has it for the device.
        tables: the parameters of which gradients of rows are made.
        row_policy: the form in which these travel.

    Raises:
        ShardwrightError: there is a ``comm_hook``, and parameters are sharded.

    Attributes:
        each_microbatch: whether gradients leave after each microbatch, so that none stays whole (ZeRO-2 and 3).
        told: called with the name of every parameter that a backward pass has made the gradient of.
    """

    def __init__(
        self, order: Mapping[str, nn.Parameter], groups: DataGroups, watchdog: Watchdog,
        flat: FlatShards | None = None, comm_hook: CommHook | None = None, bucket_bytes: int | None = None,
        tables: Collection[torch.Tensor] = (), row_policy: Policy = "auto",
    ) -> None:  # fmt: skip
        self._groups, self._watchdog = groups, watchdog
        self._divides_gradients = flat is not None and flat.level >= GRADIENTS
        self.each_microbatch = self._divides_gradients
        self._staying = [] if flat is None else list(filter(flat.stays, flat.groups))
        """The sharded parameters that are whole all through a step, as are their gradients."""
        self.told: Callable[[str], None] = lambda name: None
        group_of = flat.group_of if flat is not None and flat.divides_gradients else {}
        sharded = dict.fromkeys(group_of[name] for name in order if name in group_of)
        of_rows = [(name, parameter) for name, parameter in order.items() if parameter in tables]
        rest = {name: p for name, p in order.items() if name not in group_of and p not in tables}
        whole = _grouped(rest.items(), bucket_bytes)
        buckets = [Bucket(group.parameters, self._groups, group) for group in sharded]
        buckets += [Bucket(dict(held), self._groups, None) for held in whole]
        tables_apart = [RowBucket(name, parameter, self._groups, row_policy) for name, parameter in of_rows]
        if comm_hook is not None and sharded:
            raise ShardwrightError(
                f"the communication hook {comm_hook.named()} was registered, and the plan shards parameters, whose "
                f"gradients no rank has whole: register none, or plan with shard=0"
            )
        for number, bucket in enumerate(buckets):
            bucket.comm_hook, bucket.number, bucket.is_last = comm_hook, number, number == len(buckets) - 1
        self._buckets: list[Bucket | RowBucket] = [*buckets, *tables_apart]
        self._sent_early = buckets
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.names}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(bucket.hook(index, self._tell, self._is_active))
            for bucket in self._buckets
            for index, parameter in enumerate(bucket.parameters.values())
            if parameter.requires_grad
        ]
        self._under_way = self._holds_back = False
        self._sent: Bucket | None = None
        """The sharded bucket whose sum is under way."""
        self._anywhere: Callable[[], torch.Tensor] | None = None
        """Waits for the flags of the parameters that have a gradient on some replica."""
        self._queue: list[tuple[Bucket, set[str]]] = []
        self._expected: set[str] = set()
        self._came: set[str] = set()

    def _is_active(self) -> bool:
        return self._under_way

    def begin(self, *, holds_back: bool = False, each_microbatch: bool | None = None) -> None:
        """Begin a step: gradients are collected from now on. ``holds_back``: none leaves before the end;
        ``each_microbatch``: whether they leave after each microbatch, None: where they are divided."""
        self.each_microbatch = self._divides_gradients and each_microbatch is not False
        for bucket in self._buckets:
            leaves_each = self.each_microbatch and not holds_back and bucket.group not in (None, *self._staying)
            bucket.begin(leaves_each=leaves_each)
        at_once = self.each_microbatch or holds_back
        self._queue = [] if at_once else [(bucket, set(bucket.names)) for bucket in self._sent_early]
        self._under_way, self._holds_back, self._sent, self._anywhere = True, holds_back, None, None

    def _tell(self, name: str) -> None:
        self.told(name)
        if name not in self._expected:
            return
        if name in self._came:
            raise ShardwrightError(
                f"the gradient of {name} was added to twice in one backward pass, or after the module that it belongs "
                f"to had given its own gradients, as by reentrant checkpoints that share it: call "
                f"torch.utils.checkpoint with use_reentrant=False"
            )
        self._came.add(name)
        self._ready(name)

    def miss(self, name: str) -> None:
        """Note that a parameter gets no gradient in the backward pass that runs, so that none is waited for."""
        if name in self._expected and name not in self._came:
            self._came.add(name)
            self._ready(name)

    def _ready(self, name: str) -> None:
        """Note that the gradient of a parameter is whole, for now."""
        for bucket, missing in self._queue:
            if bucket is self._bucket_of.get(name):
                missing.discard(name)
        while self._queue and not self._queue[0][1]:
            self._send(self._queue.pop(0)[0])

    def _send(self, bucket: Bucket | RowBucket) -> None:
        """Begin the sum of a bucket: what is whole is summed in place; what is sharded is received beside what is
        sent, so that the one before ends first."""
        with self._watchdog.waiting(f"the start of a sum over {self._groups.said()}"):
            if isinstance(bucket, Bucket) and bucket.group is not None:
                if self._sent is not None:
                    self._sent.receive()
                self._sent = bucket
            bucket.send()

    def arrive(self) -> None:
        """Wait for the sum of the last bucket of the backward pass before, where gradients leave after each, so that
        its memory is free in the next one. It was under way while a forward pass ran. All ranks call this at the same
        place of the schedule."""
        if self.each_microbatch and self._sent is not None:
            sent, self._sent = self._sent, None
            with self._watchdog.waiting(self._groups.said()):
                sent.receive()

    @contextmanager
    def closing(self, names: Iterable[str], hooked: bool) -> Iterator[None]:
        """A context in which an action runs after which the gradients of these parameters are to leave. ``hooked``: the
        action is a whole backward, in which the accumulation of each parameter's gradient tells that it is whole."""
        closed = [name for name in names if name in self._bucket_of]
        if self.each_microbatch and not self._holds_back:
            wanted = {id(self._bucket_of[name]) for name in closed}
            leaving = [b for b in self._sent_early if b.group is not None and b.group not in self._staying]
            self._queue = [(b, set(b.names) & set(closed)) for b in leaving if id(b) in wanted]
        self._expected, self._came = set(closed) if hooked else set(), set()
        try:
            yield
        finally:
            self._expected = set()
        for name in closed:
            self._ready(name)

    def send_rest(self) -> None:
        """Begin the sums that no backward pass began, as of a parameter that this replica did not use, and tell which
        have a gradient: every rank calls this before it goes on to other collectives, so that they come in one order
        on all."""
        if not self._under_way or self._holds_back:
            return
        self._watchdog.doing("reducing gradients over dp")
        for bucket in self._buckets:
            if not bucket.is_sent:
                self._send(bucket)
        self._queue = []
        if self._anywhere is None:
            own = [float(i in b.present) for b in self._buckets for i in range(len(b.names))]
            flags = torch.tensor(own, device=self._buckets[0].device if self._buckets else "cpu")
            with self._watchdog.waiting(f"the start of a sum over {self._groups.said()}"):
                self._anywhere = self._groups.begin(flags, dist.ReduceOp.MAX)

    def finish(self) -> dict[str, torch.Tensor | None]:
        """Wait for all sums; gradients that were never reported ready are sent now. Returns the gradients, or this
        rank's pieces of them; None for a parameter that has a gradient on no replica."""
        self._holds_back = False
        self.send_rest()
        assert self._anywhere is not None
        found: dict[str, torch.Tensor | None] = {}
        with self._watchdog.waiting(self._groups.said()):
            for bucket in self._buckets:
                found |= zip(bucket.names, bucket.finish(), strict=True)
            there = self._anywhere().tolist()
        found = {name: g if some else None for (name, g), some in zip(found.items(), there, strict=True)}
        self._under_way, self._anywhere = False, None
        return found

    def add(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add whole gradients of this replica, in a step that holds all of them back."""
        for name, gradient in gradients.items():
            bucket = self._bucket_of[name]
            bucket.add(bucket.names.index(name), gradient)

    def take(self) -> dict[str, torch.Tensor]:
        """End a step without any sum: the whole gradients of this replica alone."""
        self._under_way = False
        return {name: gradient for bucket in self._buckets for name, gradient in bucket.take().items()}

    def abandon(self) -> None:
        """Forget the step, which has failed."""
        for bucket in self._buckets:
            bucket.abandon()
        self._queue = []
        self._under_way = False

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()


def _grouped(
    parameters: Iterable[tuple[str, nn.Parameter]], bucket_bytes: int | None
) -> Sequence[Sequence[tuple[str, nn.Parameter]]]:
    """The buckets, in the order in which they are complete: large parameters by themselves, small ones of one dtype
    together, as many as a bucket holds, or as are ready while READY_BYTES of gradients are made."""
    found: list[list[tuple[str, nn.Parameter]]] = []
    open_of: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
    made = held = 0
    for name, parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        most = TORCH_MEMORY.bucket_bytes_on(parameter.device.type) if bucket_bytes is None else bucket_bytes
        is_small = size * SOLE_SHARE < most
        if made + size > READY_BYTES or (is_small and held + size > most):
            found += open_of.values()
            open_of, made, held = {}, 0, 0
        made += size
        if is_small:
            held += size
            open_of.setdefault(parameter.dtype, []).append((name, parameter))
        else:
            found.append([(name, parameter)])
    return [*found, *open_of.values()]
