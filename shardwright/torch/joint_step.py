"""Steps that call several models. What such a step does with them is seen first: models that are called without
gradients run before the one that is trained, in evaluation steps of their own; where gradients flow from one into
another, the step becomes a `ChainedStep`."""

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.program.python_reads import left_as_it_is
from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions
from shardwright.torch.chained_step import ChainedStep
from shardwright.torch.joint_probe import Event, Probe, Silent
from shardwright.torch.joint_stand_ins import (
    OUTPUTS,
    Answers,
    Heard,
    LastCall,
    Specs,
    labels,
    marked,
    number_of,
    whole,
    with_keywords,
    with_models,
)
from shardwright.torch.model import DistributedModel, of_one_model

RunStep = Callable[..., Any]


class JointStep:
    """A step function that is given several models.

    What it does with them is seen by a run of it in which models return no values: one may be given a loss.

    Args:
        function: the function of the step.
        make: makes a step of a function.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[..., RunStep]) -> None:
        self._function, self._make = function, make

    def __call__(self, models: Sequence[DistributedModel], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step. Every rank calls this. Raises ShardwrightError where several models are given a loss."""
        session = sessions.current()
        key = (self, *models, torch.is_grad_enabled())
        if key not in session.joint_steps:  # which end with the session, and with them what they hold of the models
            failure: Exception | None = None
            divided: Any = None
            try:
                divided = self._divided(models, args, kwargs)
            except Exception as error:
                failure = error
            call = f"the step {self._function.__qualname__}, of {labels(models)}"
            session.agreement.meet(call, failure=failure)
            session.joint_steps[key] = divided
        return session.joint_steps[key](args, kwargs)

    def _divided(self, models: Sequence[DistributedModel], args: Any, kwargs: Any) -> RunStep:
        """The steps of single models that do what the function does."""
        seen = self._seen(models, args, kwargs)
        calls = [event for event in seen if event.is_call]
        called = list(dict.fromkeys(event.model for event in calls))
        trained = list(dict.fromkeys(event.model for event in seen if not event.is_call))
        name, given = self._function.__qualname__, labels(models)
        if len(trained) > 1:
            raise ShardwrightError(
                f"the step {name} is given {given}, and gives each of {labels(trained)} a loss; {of_one_model()}"
            )
        learning = {event.model for event in calls if event.with_gradients and _learns(event.model)}
        through = [model for model in called if model in learning]
        main = (trained or through or called or list(models))[-1]
        is_fed = any(event.is_fed and event.model is not main for event in calls)
        if is_fed or any(model is not main for model in through):
            if trained and seen[-1].is_call:
                raise ShardwrightError(
                    f"the step {name} is given {given}, and calls {seen[-1].model.model_run.label} after "
                    f"{main.model_run.label}.backward: give the loss behind all calls; {of_one_model()}"
                )
            return ChainedStep(self._function, self._make, models, calls, trained[0] if trained else None)
        return _StepBehindOthers(self._function, self._make, models, called, main, calls)

    def _seen(self, models: Sequence[DistributedModel], args: Any, kwargs: Any) -> list[Event]:
        """What the function does with the models, in order."""
        seen: list[Event] = []
        probes = {id(model): Probe(model, seen) for model in models}
        named = with_models(args, kwargs, lambda one: probes[id(one)])
        device = sessions.current().bound.device
        try:
            roots = ((self._function, "the step function"),)
            with torch.random.fork_rng([device] if device.type == "cuda" else []), contextlib.ExitStack() as stack:
                for model in models:
                    stack.enter_context(left_as_it_is(model.module, roots))
                before = _generators(device)
                self._function(*named[0], **named[1])
                draws = before != _generators(device)
        except ShardwrightError:
            raise
        except Exception as error:
            raise ShardwrightError(
                f"the step {self._function.__qualname__} is given {labels(models)}, and what it does with each cannot "
                f"be seen by a run in which models return no values ({type(error).__name__}: {error}): let it not "
                f"depend on what they return; {of_one_model()}"
            ) from error
        if draws:
            raise ShardwrightError(
                f"the step {self._function.__qualname__} is given {labels(models)}, and draws random numbers, which "
                f"the steps of each would draw anew: draw them before, and pass them as arguments"
            )
        return seen


class _StepBehindOthers:
    """The step of the one model that learns. The others, whose calls do not depend on what models return, run before
    it, in evaluation steps of their own, and their outputs become arguments of it."""

    def __init__(
        self, function: Callable[..., Any], make: Callable[..., RunStep], models: Sequence[DistributedModel],
        called: Sequence[DistributedModel], main: DistributedModel, calls: Sequence[Event],
    ) -> None:  # fmt: skip
        self._models, self._main = models, main
        self._others = [
            (model, make(_of_other(function, models, model, sum(e.model is model for e in calls)), is_main=False))
            for model in called
            if model is not main
        ]
        self._step = make(_of_main(function, models, main), is_main=True)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        models = self._models
        given: dict[str, Any] = {}
        for model, of_model in self._others:
            named = with_models(args, kwargs, functools.partial(marked, models, model))
            with torch.no_grad():
                calls = of_model(*named[0], **named[1])
            given[str(models.index(model))] = [[[whole(leaf) for leaf in leaves], spec] for leaves, spec in calls]
        named = with_models(args, kwargs, functools.partial(marked, models, self._main))
        tensors = {which: [leaves for leaves, _ in calls] for which, calls in given.items()}
        specs = tuple((which, tuple(spec for _, spec in calls)) for which, calls in given.items())
        return self._step(*named[0], **named[1], **{OUTPUTS: [tensors, Specs(specs)]})


def _of_other(
    function: Callable[..., Any], models: Sequence[DistributedModel], model: DistributedModel, times: int
) -> Callable[..., Any]:
    """A function that returns what a model returns in the step, which ends with its last call."""

    @functools.wraps(function)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        heard = Heard(model, times)

        def standing(one: Any) -> Any:
            return heard if one is model else Silent(models[number_of(one)])

        named = with_models(args, kwargs, standing)
        with contextlib.suppress(LastCall):
            function(*named[0], **named[1])
        return heard.outputs

    return evaluate


def _of_main(
    function: Callable[..., Any], models: Sequence[DistributedModel], main: DistributedModel
) -> Callable[..., Any]:
    """The function of the step with the outputs of the other models as one more argument."""

    def train(*args: Any, **kwargs: Any) -> Any:
        tensors, specs = kwargs.pop(OUTPUTS)
        known = dict(specs.of)
        answers = {
            number_of_model: Answers(
                models[int(number_of_model)], list(zip(leaves, known[number_of_model], strict=True))
            )
            for number_of_model, leaves in tensors.items()
        }

        def standing(one: Any) -> Any:
            if one is main:
                return one
            which = number_of(one)
            return answers.get(str(which)) or Answers(models[which], [])

        named = with_models(args, kwargs, standing)
        return function(*named[0], **named[1])

    functools.update_wrapper(train, function)
    return with_keywords(train, function, OUTPUTS)


def _learns(model: DistributedModel) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _generators(device: torch.device) -> tuple[Any, ...]:
    """The states of the generators of random numbers."""
    of_numpy: Any = np.random.get_state()
    found = [tuple(torch.random.get_rng_state().tolist()), random.getstate(), of_numpy[1].tobytes(), of_numpy[2]]
    return (*found, *(torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else ()))
