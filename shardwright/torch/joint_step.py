"""Steps that call several models, of which one is trained: the others run first, in evaluation steps of their own."""

import contextlib
import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.compat import pytree
from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions
from shardwright.torch.model import DistributedModel, of_one_model
from shardwright.torch.output import StepOutput

_OUTPUTS = "outputs_of_other_models"
RunStep = Callable[..., Any]


class JointStep:
    """A step function that is given several models.

    What it does with them is seen by a run of it in which models return nothing: one may be trained. The outputs of the
    others, which are called without gradients, become arguments of the step of that one.

    Args:
        function: the function of the step.
        make: makes a step of a function.
    """

    def __init__(self, function: Callable[..., Any], make: Callable[..., RunStep]) -> None:
        self._function, self._make = function, make

    def __call__(self, models: Sequence[DistributedModel], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step. Every rank calls this. Raises ShardwrightError where several models are trained, or where what
        one returns goes into another."""
        session = sessions.current()
        key = (self, *models, torch.is_grad_enabled())
        if key not in session.joint_steps:  # which end with the session, and with them what they hold of the models
            failure: Exception | None = None
            divided: Any = None
            try:
                divided = self._divided(models, args, kwargs)
            except Exception as error:
                failure = error
            call = f"the step {self._function.__qualname__}, of {_labels(models)}"
            session.agreement.meet(call, failure=failure)
            session.joint_steps[key] = divided
        others, main, step = session.joint_steps[key]
        given: dict[str, Any] = {}
        for model, of_model in others:
            named = _with(args, kwargs, functools.partial(_marked, models, model))
            with torch.no_grad():
                calls = of_model(*named[0], **named[1])
            given[str(models.index(model))] = [[[_whole(leaf) for leaf in leaves], spec] for leaves, spec in calls]
        named = _with(args, kwargs, functools.partial(_marked, models, main))
        tensors = {which: [leaves for leaves, _ in calls] for which, calls in given.items()}
        specs = tuple((which, tuple(spec for _, spec in calls)) for which, calls in given.items())
        return step(*named[0], **named[1], **{_OUTPUTS: [tensors, _Specs(specs)]})

    def _divided(self, models: Sequence[DistributedModel], args: Any, kwargs: Any) -> Any:
        """The steps of the models that are not trained, in the order of their first calls, then the one that is."""
        seen: list[tuple[DistributedModel, str, bool]] = []
        probes = {id(model): _Probe(model, seen) for model in models}
        named = _with(args, kwargs, lambda one: probes[id(one)])
        device = sessions.current().bound.device
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                before = _generators(device)
                self._function(*named[0], **named[1])
                draws = before != _generators(device)
        except ShardwrightError:
            raise
        except Exception as error:
            raise ShardwrightError(
                f"the step {self._function.__qualname__} is given {_labels(models)}, and what it does with each cannot "
                f"be seen ({type(error).__name__}: {error}); {of_one_model()}"
            ) from error
        if draws:
            raise ShardwrightError(
                f"the step {self._function.__qualname__} is given {_labels(models)}, and draws random numbers, which "
                f"the steps of each would draw anew: draw them before, and pass them as arguments; or {of_one_model()}"
            )
        called = list(dict.fromkeys(model for model, how, _ in seen if how != "backward"))
        trained = list(dict.fromkeys(model for model, how, _ in seen if how == "backward"))
        through = [
            model for model in called
            if any(m is model and with_gradients for m, how, with_gradients in seen if how != "backward")
            and any(p.requires_grad for p in model.parameters())
        ]  # fmt: skip
        main = (trained or through or called or list(models))[-1]
        if len(trained) > 1 or any(model is not main for model in through):
            raise ShardwrightError(
                f"the step {self._function.__qualname__} is given {_labels(models)}, and gradients flow through more "
                f"than one of them; {of_one_model()}"
            )
        fed = [model for model, how, _ in seen if how == "call with nothing" and model is not main]
        if fed:
            raise ShardwrightError(
                f"in the step {self._function.__qualname__} {fed[0].model_run.label} is called with what another model "
                f"returns, and is not the one that is trained; {of_one_model()}"
            )
        others = []
        for model in called:
            if model is not main:
                times = sum(m is model and how == "call" for m, how, _ in seen)
                others.append((model, self._make(self._of_other(models, model, times), is_main=False)))
        return others, main, self._make(self._of_main(models, main), is_main=True)

    def _of_other(self, models: Sequence[DistributedModel], model: DistributedModel, times: int) -> Callable[..., Any]:
        """A function that returns what a model returns in the step, which ends with its last call."""
        function = self._function

        @functools.wraps(function)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            heard = _Heard(model, times)

            def standing(one: Any) -> Any:
                return heard if one is model else _Probe(models[int(one[len(_MARK) :])], [])

            named = _with(args, kwargs, standing)
            with contextlib.suppress(_LastCall):
                function(*named[0], **named[1])
            return heard.outputs

        return evaluate

    def _of_main(self, models: Sequence[DistributedModel], main: DistributedModel) -> Callable[..., Any]:
        """The function of the step with the outputs of the other models as one more argument."""
        function = self._function

        def train(*args: Any, **kwargs: Any) -> Any:
            tensors, specs = kwargs.pop(_OUTPUTS)
            known = dict(specs.of)
            answers = {
                which: _Answers(models[int(which)], list(zip(tensors[which], known[which], strict=True)))
                for which in tensors
            }

            def standing(one: Any) -> Any:
                if one is main:
                    return one
                which = one[len(_MARK) :]
                return answers[which] if which in answers else _Answers(models[int(which)], [])

            named = _with(args, kwargs, standing)
            return function(*named[0], **named[1])

        functools.update_wrapper(train, function)
        signature = inspect.signature(function)
        listed = list(signature.parameters.values())
        place = len(listed) - any(one.kind is one.VAR_KEYWORD for one in listed)
        listed.insert(place, inspect.Parameter(_OUTPUTS, inspect.Parameter.KEYWORD_ONLY))
        train.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
        return train


_MARK = "a model of the step: "
_MISSING = "what no tensor of the batch says"


class _Specs:
    """The forms of outputs, compared by what they are."""

    def __init__(self, of: tuple[tuple[str, tuple[Any, ...]], ...]) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Specs) and self.of == other.of

    def __hash__(self) -> int:
        return hash(str(self.of))


class _LastCall(Exception):
    """Ends the function of a step behind the last call of a model."""


class _Stands:
    """In the place of a model: its attributes, and calls of another kind."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model.module, name)


class _Probe(_Stands):
    """Notes what is done with a model, and returns nothing."""

    def __init__(self, model: DistributedModel, seen: list[tuple[DistributedModel, str, bool]]) -> None:
        super().__init__(model)
        self._seen = seen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        how = "call with nothing" if _has_nothing(args, kwargs) else "call"
        self._seen.append((self._model, how, torch.is_grad_enabled()))
        return Nothing()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        self._seen.append((self._model, "backward", True))


class _Heard(_Stands):
    """Calls a model, and keeps what it returns."""

    def __init__(self, model: DistributedModel, times: int) -> None:
        super().__init__(model)
        self._times = times
        self.outputs: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._model(*args, **kwargs)
        leaves, spec = pytree.tree_flatten(found)
        self.outputs.append([[_kept(leaf) for leaf in leaves], _Specs((("", (spec,)),))])
        if len(self.outputs) == self._times:
            raise _LastCall
        return found


class _Answers(_Stands):
    """Returns what a model has returned."""

    def __init__(self, model: DistributedModel, calls: list[tuple[Any, Any]]) -> None:
        super().__init__(model)
        self._calls = iter(calls)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            leaves, held = next(self._calls)
        except StopIteration:
            raise ShardwrightError(
                f"{self._model.model_run.label} is called more often in this step than when the step first ran: the "
                f"calls of models that a step does not train must not depend on other arguments or on state; make a "
                f"step function for each way"
            ) from None
        return pytree.tree_unflatten(
            [_Missing() if isinstance(leaf, str) and leaf == _MISSING else leaf for leaf in leaves], held.of[0][1][0]
        )


class Nothing:
    """What a model returns whose outputs are not there: whatever is made of it is nothing too."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls()


class _Missing:
    """An output of a model that its step cannot give to another. Any use of it raises ShardwrightError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ShardwrightError(_NO_SUCH_OUTPUT)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ShardwrightError(_NO_SUCH_OUTPUT)

    def __bool__(self) -> bool:
        raise ShardwrightError(_NO_SUCH_OUTPUT)


_NO_SUCH_OUTPUT = (
    "a model that the step does not train gives its outputs that have an entry for each sample; a number of a "
    "microbatch, such as its loss, and objects are not among them: compute it in the step from those"
)


def _absorb(self: Nothing, *others: Any) -> Nothing:
    return self


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(Nothing, f"__{_name}__", _absorb)
    setattr(Nothing, f"__r{_name}__", _absorb)
    for _prefix in ("", "r"):
        setattr(_Missing, f"__{_prefix}{_name}__", lambda self, other: self.use)
for _name in ("neg", "abs", "pos"):
    setattr(Nothing, f"__{_name}__", _absorb)


def _has_nothing(args: Any, kwargs: Any) -> bool:
    return any(isinstance(leaf, Nothing) for leaf in pytree.tree_leaves((args, kwargs)))


def _with(
    args: Any, kwargs: Mapping[str, Any], of_model: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with something in the place of each model, or of its mark."""

    def standing(leaf: Any) -> Any:
        is_one = isinstance(leaf, DistributedModel) or (isinstance(leaf, str) and leaf.startswith(_MARK))
        return of_model(leaf) if is_one else leaf

    found = pytree.tree_map(standing, (args, dict(kwargs)), is_leaf=lambda one: isinstance(one, DistributedModel))
    return tuple(found[0]), found[1]


def _generators(device: torch.device) -> tuple[Any, ...]:
    """The states of the generators of random numbers."""
    of_numpy: Any = np.random.get_state()
    found = [tuple(torch.random.get_rng_state().tolist()), random.getstate(), of_numpy[1].tobytes(), of_numpy[2]]
    return (*found, *(torch.cuda.get_rng_state(device).tolist() if device.type == "cuda" else ()))


def _marked(models: Sequence[DistributedModel], kept: DistributedModel, one: Any) -> Any:
    """A model that is kept, or the mark of another."""
    return one if one is kept else f"{_MARK}{models.index(one)}"


def _whole(leaf: Any) -> Any:
    """The tensor of the batch. Numbers, of which each microbatch has one, are missing."""
    if not isinstance(leaf, StepOutput):
        return leaf
    return _MISSING if leaf.outputs[0].dim() == 0 else leaf.concat()


def _kept(leaf: Any) -> Any:
    """What a step can return of an output of a model."""
    return leaf if leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str) else _MISSING


def _labels(models: Sequence[DistributedModel]) -> str:
    return " and ".join(model.model_run.label for model in models)
