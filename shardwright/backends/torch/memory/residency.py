"""Residency of sharded parameters: gathered ahead of the calls that use them, freed behind these.

A stage is replayed call by call, so that it is known beforehand what each needs. In a forward pass the parameters of
the next call are gathered while one runs. A backward pass goes the other way: the gradient of what a call made is the
sign that its parameters are needed again, and they are freed when the gradients of its parameters and of what it was
given are there.

All ranks that share shards gather the same in the same order, whatever gradients come on each: a layer that one replica
drops, or an expert that none of its tokens chose, has none there. So calls are reached in the reverse of their order in
the forward pass, those without gradients too, and what several use stays whole from the first to the last of them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.flat_shards import PARAMETERS, FlatGroup, FlatShards
from shardwright.backends.torch.state.ownership import Ownership


@dataclass(slots=True, eq=False)
class Call:
    """One call of a microbatch's forward pass, with what its backward pass still waits for."""

    groups: tuple[FlatGroup, ...]
    gradients: set[str]
    """The trained parameters that it uses, until their gradients are there."""
    before: "Call | None"
    """The call before it, whose parameters are needed next in a backward pass."""
    inputs: int = 0
    """The number of tensors that it was given whose gradients are not there yet."""
    begun: bool = False
    done: bool = False


class Residency:
    """The parameters that are whole on one rank while it replays stages.

    Attributes:
        flat: the sharded parameters; None while there are none.
        most_whole: the entries of whole parameters from which on none are gathered ahead of their use; None: no limit.
    """

    def __init__(self, ownership: Ownership, watchdog: Watchdog) -> None:
        self._ownership, self._watchdog = ownership, watchdog
        self.flat: FlatShards | None = None
        self.most_whole: int | None = None
        self._users: dict[FlatGroup, int] = {}
        """The number of calls under way that need each group."""
        self.missed: Callable[[str], None] = lambda name: None
        """Called with every parameter whose gradient a call should have made, and did not."""
        self._backward: list[Call] = []
        """The calls of the backward pass that runs, as far as it has come."""
        self._following: Call | None = None
        """The call that it comes to next."""

    def groups_of(self, names: Iterable[str]) -> tuple[FlatGroup, ...]:
        """The groups that some parameters lie in, by first name, but for those that stay whole all through a step where
        others are freed."""
        if self.flat is None:
            return ()
        known = self.flat.group_of
        found = dict.fromkeys(known[name] for name in names if name in known)
        return tuple(group for group in found if not self.flat.stays(group))

    def name_of(self, parameter: torch.Tensor) -> str | None:
        """The first name of a parameter; None for a tensor that is none of the model's."""
        return self._ownership.name_of(parameter)

    @property
    def frees(self) -> bool:
        """Whether parameters are whole only while a call needs them."""
        return self.flat is not None and self.flat.level == PARAMETERS

    def enter(self, groups: Sequence[FlatGroup], ahead: Sequence[FlatGroup] = ()) -> None:
        """Make the parameters of a call whole, and begin to gather those of the next one."""
        for group in groups:
            group.gather(self._watchdog)
            self._users[group] = self._users.get(group, 0) + 1
        self._gather_ahead(ahead)

    def _gather_ahead(self, groups: Sequence[FlatGroup]) -> None:
        """Begin to gather what is needed next, as far as the limit on what is whole leaves room. All ranks come to the
        groups in one order, whether they gather them ahead or not."""
        for group in groups:
            if self.most_whole is not None and self.flat is not None and not group.is_there:
                whole = sum(other.layout.entries for other in self.flat.groups if other.is_there)
                if whole + group.layout.entries > self.most_whole:
                    return
            group.begin_gather()

    def leave(self, groups: Sequence[FlatGroup], kept: Collection[FlatGroup] = ()) -> None:
        """Free the parameters of a call that is over, but for those that others need soon."""
        for group in groups:
            self._users[group] -= 1
            if self.frees and not self._users[group] and group not in kept:
                group.free()

    def hold(self, names: Iterable[str]) -> None:
        """Begin to gather the parameters of a stage, which stay whole until `let_go`."""
        for group in self.groups_of(names):
            self._users[group] = self._users.get(group, 0) + 1
            group.begin_gather()

    def let_go(self, names: Iterable[str]) -> None:
        """Free the parameters of a stage that is not needed for now."""
        self.leave(self.groups_of(names))

    def record(self, call: Call, given: Sequence[Any], made: Sequence[torch.Tensor]) -> None:
        """Note a call of a forward pass whose backward pass will come: its hooks gather and free the parameters."""
        if not call.groups or not self.frees:
            return
        leaving = [tensor for tensor in made if tensor.requires_grad and not tensor.is_leaf]
        entering = {id(t): t for t in given if isinstance(t, torch.Tensor) and t.requires_grad}
        entering = {key: t for key, t in entering.items() if not isinstance(t, nn.Parameter)}
        call.inputs = len(entering)
        for tensor in leaving:
            tensor.register_hook(partial(self._reach, call))
        for tensor in entering.values():
            tensor.register_hook(partial(self._gave_back, call))

    def told(self, name: str) -> None:
        """Note that the gradient of a parameter was made."""
        for call in list(self._backward):
            if name in call.gradients:
                call.gradients.discard(name)
                self._end_if_done(call)

    @contextmanager
    def backward(self, last: Call | None) -> Iterator[None]:
        """A context in which the backward pass of a microbatch runs, whose last call is ``last``. At its end nothing
        stays whole that it gathered."""
        self._backward, self._following = [], last
        call = last
        while call is not None:
            for group in call.groups:
                self._users[group] = self._users.get(group, 0) + 1
            call = call.before
        try:
            yield
            while self._following is not None:  # which no gradient came to
                self._begin(self._following)
        finally:
            for call in self._backward:
                if not call.done:
                    self._end(call)
            self._backward, self._following = [], None
            if self.frees and self.flat is not None:
                for group in self.flat.groups:
                    if group.frees and not self._users.get(group):
                        group.free()

    def reset(self) -> None:
        """Forget what a step that failed has begun."""
        self._users.clear()
        self._backward, self._following = [], None

    def _reach(self, call: Call, _: torch.Tensor) -> None:
        while not call.begun and self._following is not None:
            self._begin(self._following)

    def _begin(self, call: Call) -> None:
        """Make the parameters of the next call whole, and begin to gather those of the one after it."""
        self._miss()
        call.begun, self._following = True, call.before
        self._backward.append(call)
        for group in call.groups:
            group.gather(self._watchdog)
        self._gather_ahead(call.before.groups if call.before is not None else ())

    def _gave_back(self, call: Call, _: torch.Tensor) -> None:
        call.inputs -= 1
        self._end_if_done(call)

    def _miss(self) -> None:
        """End the calls that have given all gradients of what they were given. Autograd accumulates the gradients of
        their parameters before it goes on to other calls: what has none by then gets none."""
        for call in [call for call in self._backward if not call.done and call.inputs <= 0]:
            others = [other.gradients for other in self._backward if other is not call and not other.done]
            following = self._following
            while following is not None:
                others.append(following.gradients)
                following = following.before
            lacking = [name for name in call.gradients if not any(name in wanted for wanted in others)]
            call.gradients.clear()
            self._end(call)
            for name in lacking:
                self.missed(name)

    def _end_if_done(self, call: Call) -> None:
        if call.begun and not call.done and not call.gradients and call.inputs <= 0:
            self._end(call)

    def _end(self, call: Call) -> None:
        call.done = True
        self.leave(call.groups, call.before.groups if call.before is not None else ())
