"""Parameters sharded over the data axis: flat groups, of which every rank keeps an equal shard between steps.

Between steps the data of a parameter is this rank's piece of it, a view of the shard, and so are its gradient and its
optimizer states; in a step it is whole, a view of a buffer that is gathered from all shards. The parameter object stays
the same, so optimizers need no other one. (ZeRO, Rajbhandari et al., arXiv 1910.02054, section 5; the flat buffers of
FSDP, Zhao et al., arXiv 2304.11277, section 3.2.1; groups smaller than the data axis as in MiCS, arXiv 2205.00119.)

A shard may lie on the host, with its gradients and the states of the optimizer, which then updates it there. What is
whole comes from there (ZeRO-Offload, Ren et al., arXiv 2101.06840; per block, exchanged and brought back before the
next forward, as in KARMA, Wahib et al., arXiv 2008.11421, section III-C).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwright.backends.torch.capture.precision import step_dtype
from shardwright.backends.torch.compat import all_gather_single
from shardwright.backends.torch.machine.data_groups import DataGroups, real_entries
from shardwright.backends.torch.machine.host_store import HostStore
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.flat_layout import FlatLayout
from shardwright.backends.torch.state.gradient_hook import dense_strides
from shardwright.backends.torch.state.ownership import Ownership
from shardwright.core.errors import ShardwrightError

LEAST_GROUP_BYTES = 16 * 1024
"""The size from which the parameters of a module call are a group of their own; smaller ones go with the next call's,
unless they stay whole in a step."""
LOOKED_AT_FIRST, LOOKED_AT_EVERY = 6, 100
"""The number of times, and then every how many times, that whole data is compared with the shard when it is freed."""
GRADIENTS, PARAMETERS = 2, 3
"""The stages of ZeRO from which on gradients, and parameters, are sharded in the step too."""


Values = Callable[[str, torch.Tensor, tuple[int, ...], tuple[int, int], torch.Tensor], None]
"""A function that copies entries of a parameter, given by name and itself: from the first to before the last of a span,
in the order of memory that strides say, to a tensor of that order."""


def copy_span(_: str, whole: torch.Tensor, strides: tuple[int, ...], span: tuple[int, int], into: torch.Tensor) -> None:
    """Copy entries of a parameter that has its memory, as `Values`."""
    begin, end = span
    if end - begin == whole.numel():
        into.copy_(whole.detach())
    else:
        into.copy_(entries_of(whole, strides)[begin:end])


class FlatGroup:
    """Parameters of one dtype that are gathered together.

    Args:
        parameters: by first name; from now on their data is this rank's piece.
        frees: whether the gathered buffer has memory only while it is used; else it has all the time.
        compute: the dtype of the gathered buffer, in which steps compute.
        dtype: the dtype of the shard.
        number: the number of the group on this rank, which is that of every rank that shares it.
        values: copies entries of a parameter, which may have no memory yet, to this rank's piece.
        is_tied: whether several calls of this rank use its parameter.
        store: the host, where the shard lies; None: on the device.

    Attributes:
        gathered: the buffer of the whole data.
        places: the (shape, strides, first entry) of every parameter in the buffer.
        is_whole: whether the whole data is there.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], layout: FlatLayout, groups: DataGroups, frees: bool,
        compute: torch.dtype, dtype: torch.dtype, number: int, values: Values, is_tied: bool = False,
        store: HostStore | None = None,
    ) -> None:  # fmt: skip
        self.number, self.is_tied, self.store = number, is_tied, store
        self.parameters, self.layout, self.groups, self.frees = dict(parameters), layout, groups, frees
        some = next(iter(self.parameters.values()))
        self.names, self.device = tuple(self.parameters), some.device
        self.trains, self.compute, self.dtype = some.requires_grad, compute, dtype
        self.places = [
            (p.shape, dense_strides(p), offset)
            for p, offset in zip(self.parameters.values(), layout.offsets, strict=True)
        ]
        make = torch.empty if frees else torch.zeros
        self.gathered = make(layout.entries, dtype=compute, device=self.device)
        self._views = [self.gathered.as_strided(*place) for place in self.places]
        own = self._own_part()
        apart = frees or self.dtype is not compute or store is not None
        self.shard = self._made(own.numel()) if apart else own
        self._pieces = self.cut(self.shard)
        if frees:  # before the first parameter is made
            self.gathered.untyped_storage().resize_(0)
        for index, (name, parameter) in enumerate(self.parameters.items()):
            begin, end = layout.span(index, groups.coordinate)
            piece = self._pieces[index]
            if begin == end:
                continue
            values(name, parameter, self.places[index][1], (begin, end), piece)
        self.is_whole = False
        self._gathering: Callable[[], None] | None = None
        self._versions: list[int] = []
        self._times_freed = 0
        self._is_in_step = False
        for _, parameter, piece, _ in self._rows():
            parameter.data = piece
        self.free()

    @property
    def shard_bytes(self) -> int:
        """The bytes of this rank's shard."""
        return self.shard.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the whole data has its memory now, which is being filled perhaps."""
        return not self.frees or self.is_whole or self._gathering is not None

    def _made(self, entries: int) -> torch.Tensor:
        """Memory for a shard."""
        if self.store is not None:
            return self.store.tensor(entries, self.dtype)
        return torch.zeros(entries, dtype=self.dtype, device=self.device)

    def _own_part(self) -> torch.Tensor:
        """This rank's part of the whole data."""
        return self.gathered[self.layout.shard(self.groups.coordinate)]

    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """The piece of each parameter in something that is laid out as this rank's shard."""
        found, first = [], self.layout.borders[self.groups.coordinate]
        for index, (shape, strides, offset) in enumerate(self.places):
            begin, end = self.layout.span(index, self.groups.coordinate)
            at = offset + begin - first if end > begin else 0
            if end - begin == self.layout.sizes[index]:
                found.append(shard.as_strided(shape, strides, shard.storage_offset() + at))
            else:
                found.append(shard[at : at + end - begin])
        return found

    def is_seen_by(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of the whole data."""
        return tensor.untyped_storage().data_ptr() == self.gathered.data_ptr()

    def begin_gather(self) -> None:
        """Begin to gather the whole data, unless that is done or under way."""
        if self.is_whole or self._gathering is not None:
            return
        if self.frees:
            storage = self.gathered.untyped_storage()
            storage.resize_(self.layout.entries * self.gathered.element_size())
        if self.store is None:
            self._gathering = self._gather()
            return
        gathered, arrives = self.store.beside(self._gather)

        def arrive() -> None:
            gathered()
            arrives()

        self._gathering = arrive

    def _gather(self) -> Callable[[], None]:
        if self.store is not None and self.groups.ways == 1:
            own = self._own_part().copy_(self.shard, non_blocking=True)
        else:  # others may read it when the whole data of this rank is free again
            own = self.shard.to(self.device, self.compute, non_blocking=self.store is not None)
        return self.groups.gather(self.gathered, own, self.number, self.layout.borders)

    def gather(self, watchdog: Watchdog) -> None:
        """Make the whole data whole."""
        if self.is_whole:
            return
        self.begin_gather()
        assert self._gathering is not None
        with watchdog.waiting(self.groups.said()):
            self._gathering()
        self._gathering = None
        self._versions = [p._version for p in self.parameters.values()]
        self.is_whole = True

    def free(self) -> None:
        """Free the whole data where it is not to stay.

        Raises ShardwrightError for a parameter that was written to while it was whole: that would be lost.
        """
        gathering, self._gathering = self._gathering, None
        if gathering is not None:  # begun, and not needed after all
            gathering()
        versions, self._versions = self._versions, []
        written = [n for n, v in zip(self.names, versions, strict=False) if self.parameters[n]._version != v]
        if self.is_whole and not written and self._is_to_be_looked_at() and not self._is_as_gathered():
            written = [self.names[0]] if len(self.names) == 1 else [f"one of {', '.join(self.names[:8])}"]
        if self.frees:
            self.gathered.untyped_storage().resize_(0)
        self.is_whole = False
        _refuse_writes(written)

    def collect(self, total: torch.Tensor | None, shard: torch.Tensor) -> torch.Tensor:
        """Add this rank's shard of a sum of gradients to those before; None: there are none."""
        if self.store is not None:
            return self.store.collect(total, shard)
        return shard if total is None else total.add_(shard)

    def collected(self, total: torch.Tensor) -> list[torch.Tensor]:
        """The piece of each parameter in the sum of its gradients."""
        if self.store is not None:
            self.store.arrive()
            if total.dtype is not self.dtype:
                total = self._made(total.numel()).copy_(total)
        return self.cut(total)

    def enter_step(self) -> None:
        """Let the parameters see the whole data; it is there after `gather`. Raises as `adopt`."""
        self.adopt()
        self._is_in_step = True
        for _, parameter, _, view in self._rows():
            parameter.data = view

    def adopt(self) -> None:
        """Take data that was assigned to a parameter since the last step, and not written into it, for this rank's
        piece. What it replaces may be held elsewhere, as where an average of weights is exchanged, so memory is new.

        Raises ShardwrightError where the data has another shape than the piece.
        """
        rows = list(self._rows())
        for name, parameter, piece, _ in rows:
            if parameter.shape != piece.shape:
                raise ShardwrightError(
                    f"{name} was given data of shape {tuple(parameter.shape)} between steps, where this rank holds a "
                    f"piece of shape {tuple(piece.shape)}: load whole values by model.load_state_dict"
                )
        if all(_shares_memory(parameter, piece) for _, parameter, piece, _ in rows if piece.numel()):
            return
        if self.shard.untyped_storage().data_ptr() == self.gathered.untyped_storage().data_ptr():
            self.gathered = self.gathered.clone()
            self._views = [self.gathered.as_strided(*place) for place in self.places]
            self.shard = self._own_part()
        else:
            self.shard = self._made(self.shard.numel()).copy_(self.shard)
        self._pieces = self.cut(self.shard)
        for (_, parameter, before, _), piece in zip(rows, self._pieces, strict=True):
            if not _shares_memory(parameter, before):
                piece.copy_(parameter.detach())
            parameter.data = piece

    def leave_step(self) -> None:
        """Give the parameters this rank's pieces again, after `enter_step`. Raises as `free`."""
        if not self._is_in_step:
            return
        self._is_in_step = False
        assigned = [name for name, parameter, _, view in self._rows() if not _shares_memory(parameter, view)]
        for _, parameter, piece, _ in self._rows():
            parameter.data = piece
        self.free()
        _refuse_writes(assigned)

    def _rows(self) -> Iterator[tuple[str, nn.Parameter, torch.Tensor, torch.Tensor]]:
        """The (name, parameter, piece, view of the whole data) of every parameter."""
        return zip(self.parameters, self.parameters.values(), self._pieces, self._views, strict=True)

    def _is_to_be_looked_at(self) -> bool:
        """Whether the data is compared with what was gathered, now: at first, and now and then."""
        self._times_freed += 1
        return self._times_freed <= LOOKED_AT_FIRST or self._times_freed % LOOKED_AT_EVERY == 0

    def _is_as_gathered(self) -> bool:
        """Whether this rank's part of the whole data is what its shard is, to the bit: writes through ``.data`` leave
        no other sign."""
        own, shard = self._own_part(), self.shard.to(self.device, self.compute)
        return own.data_ptr() == shard.data_ptr() or torch.equal(own.view(torch.uint8), shard.view(torch.uint8))


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors begin at one place of one memory, which may be freed."""
    places = [(t.untyped_storage().data_ptr(), t.storage_offset()) for t in (one, other)]
    return places[0] == places[1]


def _refuse_writes(names: Sequence[str]) -> None:
    if names:
        raise ShardwrightError(
            f"{names[0]} was written to in a step (by an embedding with max_norm, say, or through .data), where its "
            f"data is a copy that was gathered for the step: the change would be lost. Write to it between steps, or "
            f"plan with shard=0 in the model's own precision"
        )


class FlatShards:
    """The sharded parameters of one rank.

    Args:
        level: the stage of ZeRO, 1 to 3; 0 where the shards are not shared, and only the dtype of steps is another.
        calls: the parameters of each module call, by first name, in the order of the forward pass: those that are first
            used together are gathered together.
        apart: names that are groups of their own, which other pipeline ranks shard alike.
        whole: whether each parameter is to lie whole on one rank, for the sake of the optimizer.
        compute: the dtype in which steps compute with parameters of floating point; None: their own.
        whole_below_bytes: at level 3, the size of a group below which it stays whole all through a step, as do its
            gradients.
        values: copies entries of a parameter, which may have no memory yet.
        most_entries: the most entries of a group, but for a larger parameter by itself; None: those of a call.
        store: the host, where the shards of what is trained lie, and at level 3 all shards; None: on the device.
    """

    def __init__(
        self, ownership: Ownership, groups: DataGroups, watchdog: Watchdog, level: int,
        calls: Sequence[Sequence[str]], apart: frozenset[str], whole: bool, compute: torch.dtype | None,
        values: Values = copy_span, whole_below_bytes: int = 0,
        most_entries: int | None = None, store: HostStore | None = None,
    ) -> None:  # fmt: skip
        self.ownership, self.data, self.watchdog, self.level = ownership, groups, watchdog, level
        self.store = store
        self.holds_whole_parameters, self.compute = whole, compute
        self.groups: list[FlatGroup] = []
        self.group_of: dict[str, FlatGroup] = {}
        local = ownership.local_parameters()
        held = [0] * groups.ways
        frozen = {name for name, p in local.items() if not p.requires_grad}
        left_out = frozen if level < PARAMETERS and compute is None else set[str]()
        grouped = _grouped(local, calls, apart, left_out)
        if most_entries is not None:
            grouped = [part for names in grouped for part in _cut_at(local, names, most_entries)]
        small = [names for names in grouped if level == PARAMETERS and apart.isdisjoint(names)
                 and self._step_bytes(local, names) < whole_below_bytes]  # fmt: skip
        staying = _of_one_kind(local, [name for names in small for name in names])
        for names in (*staying, *(names for names in grouped if names not in small)):
            members = {name: local[name] for name in names}
            sizes = [p.numel() for p in members.values()]
            own = next(iter(members.values())).dtype
            inside = step_dtype(own, compute)
            trains = next(iter(members.values())).requires_grad
            between = torch.float32 if compute is not None and inside is compute and trains else own
            number, frees = len(self.groups), level == PARAMETERS and names not in staying
            is_tied = sum(names[0] in used for used in dict.fromkeys(map(tuple, calls))) > 1
            layout = FlatLayout.whole_parameters(sizes, held) if whole else FlatLayout.cut(sizes, groups.ways)
            held = [entries + layout.shard_entries(rank) for rank, entries in enumerate(held)]
            on_host = store if trains or level == PARAMETERS else None
            group = FlatGroup(members, layout, groups, frees, inside, between, number, values, is_tied, on_host)
            self.groups.append(group)
            self.group_of |= dict.fromkeys(names, group)

    def _step_bytes(self, local: Mapping[str, nn.Parameter], names: Sequence[str]) -> int:
        """The bytes of parameters in the dtype of steps."""
        return sum(local[n].numel() * step_dtype(local[n].dtype, self.compute).itemsize for n in names)

    def stays(self, group: FlatGroup) -> bool:
        """Whether a group is whole all through a step where others are gathered for each call."""
        return self.level == PARAMETERS and not group.frees

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share the shards: between steps parameters are whole where there is one."""
        return self.data.ways > 1

    @property
    def divides_gradients(self) -> bool:
        """Whether the gradients of each group are summed in shards: several ranks have some, or the host."""
        return self.is_shared or self.store is not None

    def begin_step(self) -> None:
        """Begin a step: parameters have their whole shapes, and those that stay whole in it are gathered, in the order
        in which they are used."""
        self.data.tags.begin()
        for group in self.groups:
            group.enter_step()
            if not group.frees:
                group.begin_gather()
        for group in filter(self.stays, self.groups):
            group.gather(self.watchdog)

    def end_step(self) -> None:
        """Give every parameter its piece again. Raises as `FlatGroup.free`, and RuntimeError where a peer is gone."""
        failure: Exception | None = None
        for group in self.groups:
            try:
                group.leave_step()
            except (ShardwrightError, RuntimeError) as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def settle(self) -> None:
        """Wait until all ranks have what they gathered of this one's shards. Every rank calls this at the end of a
        step, before anything writes to its shards."""
        with self.watchdog.waiting(self.data.said()):
            self.data.settle()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which all parameters are whole. Every rank of the group enters it at the same time."""
        self.begin_step()
        for group in self.groups:
            group.gather(self.watchdog)
        try:
            yield
        finally:
            self.end_step()
        self.settle()

    def whole(self, name: str, piece: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter, or of something that is cut like it, on every rank of the group, which call this
        together."""
        group = self.group_of[name]
        index = group.names.index(name)
        spans = [group.layout.span(index, rank) for rank in range(self.data.ways)]
        longest = max(end - first for first, end in spans)
        own = torch.zeros(longest, dtype=piece.dtype, device=self.data_device)
        own[: piece.numel()] = entries_of(piece)
        every = torch.empty(longest * self.data.ways, dtype=piece.dtype, device=self.data_device)
        with self.watchdog.waiting(self.data.said()):
            if self.data.ways == 1:
                every.copy_(own)
            else:
                all_gather_single(real_entries(every), real_entries(own), group=self.data.group)
        parts = [every[r * longest : r * longest + end - first] for r, (first, end) in enumerate(spans)]
        shape, strides, _ = group.places[index]
        return torch.cat(parts).as_strided(shape, strides)

    @property
    def data_device(self) -> torch.device:
        """The device of the shards."""
        return self.groups[0].device

    def piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a whole tensor."""
        group = self.group_of[name]
        index = group.names.index(name)
        first, end = group.layout.span(index, self.data.coordinate)
        _, strides, _ = group.places[index]
        if end - first == group.layout.sizes[index]:
            return whole
        return entries_of(whole, strides)[first:end]

    def counts(self, name: str) -> bool:
        """Whether this rank's part of a parameter belongs in a sum over the group: pieces do, whole ones once."""
        return not self.is_shared or name in self.group_of or self.data.coordinate == 0

    def shape(self, name: str) -> torch.Size:
        """The shape of a parameter where it is not sharded over the data axis."""
        group = self.group_of[name]
        return group.places[group.names.index(name)][0]


def entries_of(tensor: torch.Tensor, strides: tuple[int, ...] | None = None) -> torch.Tensor:
    """The entries of a dense tensor in the order of its memory, or in that of ``strides``."""
    if strides is not None and tensor.stride() != strides:
        tensor = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _grouped(
    local: Mapping[str, nn.Parameter], calls: Sequence[Sequence[str]], apart: frozenset[str], left_out: set[str]
) -> list[list[str]]:
    """The groups of names: those of one call together, small calls with the next one; each group of one dtype, and all
    trained or none. What other calls use too is by itself: its gradient is whole when theirs has been made, and the
    buffer of a group is there from the first gradient on."""
    uses = Counter(name for names in dict.fromkeys(map(tuple, calls)) for name in names)
    apart = apart | {name for name, count in uses.items() if count > 1}
    found: list[list[str]] = []
    seen = set(left_out)
    open_names: list[str] = []
    for names in (*calls, tuple(local)):
        for name in names:
            if name in seen or name not in local:
                continue
            seen.add(name)
            if name in apart:
                found.append([name])
            else:
                open_names.append(name)
        if sum(local[n].nbytes for n in open_names) >= LEAST_GROUP_BYTES:
            found += _of_one_kind(local, open_names)
            open_names = []
    return found + _of_one_kind(local, open_names)


def _cut_at(local: Mapping[str, nn.Parameter], names: Sequence[str], most: int) -> list[list[str]]:
    """Names in groups of at most so many entries each; a larger parameter is one by itself."""
    found: list[list[str]] = []
    entries = 0
    for name in names:
        entries += local[name].numel()
        if not found or entries > most:
            found.append([])
            entries = local[name].numel()
        found[-1].append(name)
    return found


def _of_one_kind(local: Mapping[str, nn.Parameter], names: Sequence[str]) -> list[list[str]]:
    kinds: dict[tuple[torch.dtype, bool], list[str]] = {}
    for name in names:
        kinds.setdefault((local[name].dtype, local[name].requires_grad), []).append(name)
    return list(kinds.values())
