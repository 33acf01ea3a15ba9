"""Residency of sharded parameters: gathered ahead of the calls that use them, freed behind these.

A stage is replayed call by call, so that it is known beforehand what each needs. In a forward pass the parameters of
the next call are gathered while one runs. A backward pass goes the other way: the gradient of what a call made is the
sign that its parameters are needed again, and they are freed when the gradients of its parameters and of what it was
given are there.

All ranks that share shards gather the same in the same order, whatever gradients come on each: a layer that one replica
drops, or an expert that none of its tokens chose, has none there. So calls are reached in the reverse of their order in
the forward pass, those without gradients too, and what several use stays whole from the first to the last of them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwright.backends.torch.compat import hook_before_others
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.state.flat_shards import PARAMETERS, FlatGroup, FlatShards
from shardwright.backends.torch.state.gradient_hook import is_hooked
from shardwright.backends.torch.state.ownership import Ownership


@dataclass(slots=True, eq=False)
class Call:
    """One call of a microbatch's forward pass, with what its backward pass still waits for."""

    groups: tuple[FlatGroup, ...]
    """The groups of parameters that its backward pass reads."""
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
        self._ahead: tuple[FlatGroup, ...] = ()
        """The groups that are to be gathered next."""
        self._tables: dict[str, FlatGroup] = {}
        """The tables of which calls read rows alone, by the names of their parameters."""

    def groups_of(self, names: Iterable[str]) -> tuple[FlatGroup, ...]:
        """The groups that some parameters lie in, by first name, but for those that stay whole all through a step where
        others are freed."""
        if self.flat is None:
            return ()
        known = self.flat.group_of
        found = dict.fromkeys(known[name] for name in names if name in known)
        return tuple(group for group in found if not self.flat.stays(group))

    def looked_up(self, target: Any, groups: Iterable[FlatGroup]) -> tuple[FlatGroup, ...]:
        """The groups of a call that are tables, of which it reads rows: the backward pass of a lookup reads none. The
        call is of an embedding, or of a module with embeddings whose tables other calls use too, as heads do."""
        if not isinstance(target, nn.Module) or not self.frees:
            return ()
        rows: set[str] = set()
        others: set[str] = set()
        for module in target.modules():
            found = {name for p in module._parameters.values() if p is not None and (name := self.name_of(p))}
            (rows if type(module) is nn.Embedding else others).update(found)
        rows -= others
        tables = tuple(g for g in groups if rows.issuperset(g.names) and (type(target) is nn.Embedding or g.is_tied))
        self._tables.update((name, group) for group in tables for name in group.names)
        return tables

    @staticmethod
    def unread(looked_up: Sequence[FlatGroup], made: Iterable[torch.Tensor]) -> Sequence[FlatGroup]:
        """Those of the groups that a call looked up in which its backward pass does not read: hooks of the user's, on
        what the call made or on the tables, may."""
        if not looked_up or any(tensor._backward_hooks for tensor in made):
            return ()
        return [g for g in looked_up if not any(map(is_hooked, g.parameters.values()))]

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

    def record(
        self, call: Call, given: Sequence[torch.Tensor], held: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> None:
        """Note a call of a forward pass whose backward pass will come: its hooks gather and free the parameters.

        Args:
            given: the tensors among its arguments. What other calls are given too is a view of its own (`own_views`).
            held: those inside objects that it was given, such as a cache of keys and values. It may have made some of
                them, and may have used none of the others, whose gradients then come long after its own.
            made: its results.
        """
        if not self.frees:
            return
        leaving = [tensor for tensor in made if tensor.requires_grad and not tensor.is_leaf]
        own = {id(tensor) for tensor in made}
        found = (*given, *(tensor for tensor in held if id(tensor) not in own))
        entering = {id(t): t for t in found if t.requires_grad and not isinstance(t, nn.Parameter)}
        if len(entering) > 1:
            entering = {id(t): t for t in used_by(leaving, tuple(entering.values()))}
        call.inputs = len(entering)
        for tensor in leaving:  # before the hooks of the user's, which may read the parameters
            hook_before_others(tensor, partial(self._reach, call))
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
        self._backward, self._following, self._ahead = [], last, ()
        call = last
        while call is not None:
            for group in call.groups:
                self._users[group] = self._users.get(group, 0) + 1
            call = call.before
        again = register_module_forward_pre_hook(self._look_up_again) if self._tables else None
        try:
            yield
            while self._following is not None:  # which no gradient came to
                self._begin(self._following)
        finally:
            if again is not None:
                again.remove()
            for call in self._backward:
                if not call.done:
                    self._end(call)
            self._backward, self._following, self._ahead = [], None, ()
            if self.frees and self.flat is not None:
                for group in self.flat.groups:
                    if group.frees and not self._users.get(group):
                        group.free()

    def reset(self) -> None:
        """Forget what a step that failed has begun."""
        self._users.clear()
        self._backward, self._following, self._ahead = [], None, ()

    def _look_up_again(self, module: nn.Module, _: Any) -> None:
        """Make a table whole that a checkpoint of the user's looks up in again, until the backward pass ends."""
        for parameter in module._parameters.values() if type(module) is nn.Embedding else ():
            name = None if parameter is None else self.name_of(parameter)
            if name is not None and name in self._tables:
                self._tables[name].gather(self._watchdog)

    def _reach(self, call: Call, _: torch.Tensor) -> None:
        while not call.begun and self._following is not None:
            self._begin(self._following)

    def _begin(self, call: Call) -> None:
        """Make the parameters of the next call whole, and begin to gather those of the one after it, once those of the
        one behind are freed."""
        self._miss()
        call.begun, self._following = True, call.before
        behind = self._backward[-1] if self._backward else None
        self._backward.append(call)
        for group in call.groups:
            group.gather(self._watchdog)
        self._ahead = call.before.groups if call.before is not None else ()
        if behind is None or behind.done:  # else when it is: one call less is whole then
            self._look_ahead()

    def _look_ahead(self) -> None:
        ahead, self._ahead = self._ahead, ()
        self._gather_ahead(ahead)

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
        self._look_ahead()


def saving_apart(groups: Sequence[FlatGroup]) -> AbstractContextManager[None]:
    """A context of a forward pass whose backward pass runs without these groups: where it reads a parameter of them all
    the same, as a hook of the user's may, it keeps a copy."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if any(group.is_seen_by(tensor) for group in groups) else tensor

    return torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)


def own_views(given: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """A view of each of several tensors, for one call alone: its gradient is there when this call has given its part,
    where that of the tensor waits for all calls that were given it."""
    return {key: tensor.view_as(tensor) for key, tensor in given.items()}


def used_by(made: Iterable[torch.Tensor], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those of ``given`` whose gradients the backward pass of ``made`` adds to, as far back as they go."""
    ends = {_node(tensor) for tensor in given}
    stack = [node for tensor in made if (node := tensor.grad_fn) is not None and node not in ends]
    seen = set(stack)
    reached: set[Node | torch.Tensor] = set()
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            seen.add(node)
            found = getattr(node, "variable", node)
            if found in ends:
                reached.add(found)
            else:
                stack.append(node)
    return [tensor for tensor in given if _node(tensor) in reached]


def _node(tensor: torch.Tensor) -> Node | torch.Tensor:
    """The place of a tensor in the graph: the op that made it, or itself where it is a leaf."""
    return tensor if tensor.grad_fn is None else tensor.grad_fn
