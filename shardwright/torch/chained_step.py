"""Steps in which gradients flow from one model into another, as a generator learns through its discriminator."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from shardwright.core.errors import ShardwrightError
from shardwright.torch.joint_probe import Event
from shardwright.torch.joint_stand_ins import (
    OUTPUTS,
    LastCall,
    Specs,
    StandIn,
    marked,
    number_of,
    put_together,
    taken_apart,
    whole,
    with_keywords,
    with_models,
)
from shardwright.torch.model import DistributedModel

GRADIENTS = "gradients_of_own_outputs"
"""The argument by which a link's backward step is given the gradients of what it has returned."""
Role = Literal["forward", "last", "backward"]


@dataclass(frozen=True, slots=True)
class Link:
    """A row of calls of one model, with no call of another in between.

    Attributes:
        first: the number of its first call among all calls of the step; ``end``: that behind its last.
        turn: the number of links of the same model before it.
        flows: for each call of the step, whether gradients flow back from what it returns.
    """

    model: DistributedModel
    first: int
    end: int
    turn: int
    flows: tuple[bool, ...]

    @property
    def is_trained(self) -> bool:
        return any(self.flows[self.first : self.end])


class ChainedStep:
    """A step whose calls of models form a chain of links, each run as steps of its one model.

    Links run forward one after the other, without gradients, and what they return goes into the next. The last link
    runs with the loss, and gives the gradients of what it was given. Then the others run, from the last to the first,
    forward once more and backward from the gradients of what they returned. A link that runs twice draws the same
    random numbers, and starts from the same buffers, both times. Parameters of all models get the gradients that one
    backward pass through all of them would give.

    Args:
        function: the function of the step, and ``make``: makes a step of a function.
        models: those that the step is given.
        calls: the calls of models, in order.
        trained: the model that is given the loss; None: there is none.
    """

    def __init__(
        self, function: Callable[..., Any], make: Callable[..., Callable[..., Any]], models: Sequence[DistributedModel],
        calls: Sequence[Event], trained: DistributedModel | None,
    ) -> None:  # fmt: skip
        self._models, self._trained = list(models), trained
        order = [event.model for event in calls]
        self._links = links = _links(order, _flows(calls, trained))
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._require_plain_sums()

        def of_role(link: Link, role: Role) -> Any:
            return make(_piece(function, self._models, order, link, role), is_main=role == "last")

        self._forward = [of_role(link, "forward") for link in links[:-1]]
        self._last = of_role(links[-1], "last")
        self._last.holds_writes = True  # links that run behind it find the Python values that those before it found
        self._backward = [of_role(link, "backward") if link.is_trained else None for link in links[:-1]]

    def _require_plain_sums(self) -> None:
        """Raise ShardwrightError for models that count their training steps, of which one step of this makes several,
        or that take the loss in different ways."""
        for link in self._links:
            passes = link.model.runtime.gradients.passes_per_step
            if passes > 1 and link.turn:
                raise ShardwrightError(
                    f"the step {self._name} calls {link.model.model_run.label} in several places of a chain, which "
                    f"are training steps of their own, and it was given backward_passes_per_step={passes}: enter "
                    f"model.no_sync() instead for the steps whose gradients are to add up"
                )
        last, given = self._links[-1].model.model_run, self._trained
        if given is not None and given.model_run.reduction != last.reduction:
            raise ShardwrightError(
                f"the step {self._name} gives its loss to {given.model_run.label}, and {last.label} computes it: wrap "
                f"both with the same average_grads_across_microbatches"
            )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step. Every rank calls this."""
        links, last = self._links, self._links[-1]
        returned: list[tuple[list[Any], Specs]] = []
        held: list[dict[str, torch.Tensor]] = []
        with self._counted_once():
            for link, step in zip(links[:-1], self._forward, strict=True):
                held.append(_buffers(link.model) if link.is_trained else {})
                positional, named = self._given(link, args, kwargs, returned)
                with torch.no_grad(), _at_turn(link):
                    found = step(*positional, **named)
                for number, (leaves, form) in enumerate(found, link.first):
                    flows = link.flows[number]
                    returned.append(([_leaf(whole(leaf), flows=flows) for leaf in leaves], form))
            positional, named = self._given(last, args, kwargs, returned)
            with _at_turn(last):
                result = self._last(*positional, **named)
            for link, step, before in reversed(list(zip(links[:-1], self._backward, held, strict=True))):
                gradients = [[_gradient(leaf) for leaf in leaves] for leaves, _ in returned[link.first : link.end]]
                if step is None or all(one is None for each in gradients for one in each):
                    continue
                positional, named = self._given(link, args, kwargs, returned)
                with _at_turn(link), _from_buffers(link.model, before):
                    step(*positional, **named, **{GRADIENTS: gradients})
                self._take_over(link.model)
        self._last.release_writes()
        return result

    def _given(
        self, link: Link, args: Any, kwargs: Any, returned: Sequence[tuple[list[Any], Specs]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a step of one link, with what the calls before it have returned."""
        positional, named = with_models(args, kwargs, functools.partial(marked, self._models, link.model))
        earlier = returned[: link.first]
        forms = Specs(tuple(form for _, form in earlier))
        return positional, named | {OUTPUTS: [[leaves for leaves, _ in earlier], forms]}

    def _take_over(self, model: DistributedModel) -> None:
        """Let a model have what is known of the loss, which another one computed."""
        of_last = self._links[-1].model.model_run
        model.model_run.scalers = of_last.scalers
        if model is self._trained:
            model.model_run.batch_losses = of_last.batch_losses

    @contextlib.contextmanager
    def _counted_once(self) -> Iterator[None]:
        """A context in which a step of each link is run, for which the model that is given the loss has taken its
        samples once, and the others have not."""
        runs = {link.model.model_run: link.model.runtime.split_model for link in self._links}
        before = {run: (run.samples_trained, split_model.steps_run) for run, split_model in runs.items()}
        try:
            yield
        finally:
            taken = max(run.samples_trained - before[run][0] for run in runs)
            for run, split_model in runs.items():
                samples, steps = before[run]
                is_trained = self._trained is not None and run is self._trained.model_run
                run.samples_trained = samples + (taken if is_trained else 0)
                turns = sum(link.model.model_run is run for link in self._links)
                split_model.steps_run = steps + (turns if self._trained is not None else 0)


def _flows(calls: Sequence[Event], trained: DistributedModel | None) -> tuple[bool, ...]:
    """For each call whether gradients flow back from what it returns: the model learns, or what it is given may."""
    found: list[bool] = []
    for event in calls:
        learns = any(parameter.requires_grad for parameter in event.model.parameters())
        found.append(trained is not None and event.with_gradients and (learns or any(found)))
    return tuple(found)


def _links(order: Sequence[DistributedModel], flows: tuple[bool, ...]) -> list[Link]:
    starts = [i for i, model in enumerate(order) if not i or order[i - 1] is not model]
    found: list[Link] = []
    for first, end in zip(starts, (*starts[1:], len(order)), strict=True):
        turn = sum(link.model is order[first] for link in found)
        found.append(Link(order[first], first, end, turn, flows))
    return found


def _piece(
    function: Callable[..., Any], models: Sequence[DistributedModel], order: Sequence[DistributedModel], link: Link,
    role: Role,
) -> Callable[..., Any]:  # fmt: skip
    """The function of the step, in which one link calls its model and the others are there by what they returned. It
    returns what the function does ("last"), or ends behind its calls: what they return ("forward"), or the backward
    pass from their gradients ("backward")."""

    def run(*args: Any, **kwargs: Any) -> Any:
        tensors, forms = kwargs.pop(OUTPUTS)
        gradients = kwargs.pop(GRADIENTS, None)
        turns = _Turns(link, order, list(zip(tensors, forms.of, strict=True)), ends=role != "last")

        def standing(one: Any) -> Any:
            return _OwnTurn(link.model, turns) if one is link.model else _OthersTurn(models[number_of(one)], turns)

        named = with_models(args, kwargs, standing)
        if role == "last":
            return function(*named[0], **named[1])
        with contextlib.suppress(LastCall):
            function(*named[0], **named[1])
        if role == "forward":
            return turns.heard
        terms = [
            (leaf * gradient.to(leaf.dtype)).sum()
            for (leaves, _), wanted in zip(turns.heard, gradients, strict=True)
            for leaf, gradient in zip(leaves, wanted, strict=True)
            if gradient is not None and isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if terms:
            link.model.backward(torch.stack(terms).sum(), reduction="sum")
        return None

    functools.update_wrapper(run, function)
    return with_keywords(run, function, OUTPUTS, *([GRADIENTS] if role == "backward" else []))


class _Turns:
    """The calls of models in one run of the function, in their order."""

    def __init__(
        self, link: Link, order: Sequence[DistributedModel], returned: list[tuple[Any, Specs]], *, ends: bool
    ) -> None:
        self.link, self.order, self.returned, self.ends = link, order, returned, ends
        self.number = 0
        self.heard: list[Any] = []

    def call(self, model: DistributedModel, args: Any, kwargs: Any) -> Any:
        number, link = self.number, self.link
        self.number += 1
        if number >= len(self.order) or self.order[number] is not model:
            raise ShardwrightError(
                f"{model.model_run.label} is called in another place of this step than when the step first ran: the "
                f"calls of a step that is given several models must not depend on other arguments or on state; make a "
                f"step function for each way"
            )
        if number < link.first:
            return put_together(*self.returned[number])
        found = model(*args, **kwargs)
        self.heard.append(taken_apart(found))
        if self.ends and self.number == link.end:
            raise LastCall
        return found


class _OwnTurn:
    """In the place of the model whose link runs."""

    def __init__(self, model: DistributedModel, turns: _Turns) -> None:
        self._model, self._turns = model, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._turns.call(self._model, args, kwargs)


class _OthersTurn(StandIn):
    """In the place of a model whose calls were run before. A loss that it is given is that of the link that runs."""

    def __init__(self, model: DistributedModel, turns: _Turns) -> None:
        super().__init__(model)
        self._turns = turns

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._turns.call(self._model, args, kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self._turns.link.model.backward(*args, **kwargs)


def _leaf(leaf: Any, *, flows: bool) -> Any:
    """What a model returned as an argument of the steps after it; ``flows``: gradients flow back from it."""
    return leaf.detach().requires_grad_() if flows and _is_floating(leaf) else leaf


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _gradient(leaf: Any) -> torch.Tensor | None:
    return leaf.grad if isinstance(leaf, torch.Tensor) else None


# The state of a link ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _at_turn(link: Link) -> Iterator[None]:
    """A context in which a link's step draws the random numbers of its turn, whichever of its steps it is."""
    split_model = link.model.runtime.split_model
    before = split_model.steps_run
    split_model.steps_run += link.turn
    try:
        yield
    finally:
        split_model.steps_run = before


def _buffers(model: DistributedModel) -> dict[str, torch.Tensor]:
    """The values of the buffers that this rank holds."""
    model.runtime.split_model.make_values()
    return {name: buffer.detach().clone() for name, buffer in model.local_named_buffers()}


@contextlib.contextmanager
def _from_buffers(model: DistributedModel, values: dict[str, torch.Tensor]) -> Iterator[None]:
    """A context in which buffers have these values; behind it they have again those of before."""
    before = _buffers(model)
    _load(model, values)
    try:
        yield
    finally:
        _load(model, before)


def _load(model: DistributedModel, values: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.local_named_buffers():
            if name in values and not torch.equal(buffer, values[name]):
                buffer.copy_(values[name])
