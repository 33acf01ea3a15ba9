"""Stand-ins for models, while the function of a step runs that is given several."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.compat import pytree
from shardwright.core.errors import ShardwrightError
from shardwright.torch.model import DistributedModel
from shardwright.torch.output import StepOutput

OUTPUTS = "outputs_of_other_models"
"""The argument by which a step is given what other models have returned."""
MARK = "a model of the step: "
"""What stands for a model that another step runs; its number follows."""
MISSING = "what no tensor of the batch says"
_OF_MODES = ("train", "eval")


class Specs:
    """The forms of outputs, compared by what they are."""

    def __init__(self, of: tuple[Any, ...]) -> None:
        self.of = of

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Specs) and self.of == other.of

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        return f"Specs({self.of})"


class LastCall(Exception):
    """Ends the function of a step behind the last call of a model."""


class StandIn:
    """In the place of a model that another step runs: its attributes, but for its tensors and parts."""

    def __init__(self, model: DistributedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model.module, name)
        is_part = isinstance(found, nn.Module | torch.Tensor | MethodType) and name not in _OF_MODES
        if is_part:
            raise ShardwrightError(
                f"{self._model.model_run.label} is used ({name}) in a step that is given several models, which calls "
                f"them whole: pass the tensors that it needs as arguments, or use {name} in a step of that model"
            )
        return found


class Heard(StandIn):
    """Calls a model, and keeps what it returns."""

    def __init__(self, model: DistributedModel, times: int) -> None:
        super().__init__(model)
        self._times = times
        self.outputs: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._model(*args, **kwargs)
        self.outputs.append(taken_apart(found))
        if len(self.outputs) == self._times:
            raise LastCall
        return found


class Answers(StandIn):
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
        return put_together(leaves, held)


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
    "a step of several models passes on those outputs that have an entry for each sample; a number of a microbatch, "
    "such as a model's own loss, and objects are not among them: compute it in the step from those"
)


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    for _prefix in ("", "r"):
        setattr(_Missing, f"__{_prefix}{_name}__", lambda self, other: self.use)


# Outputs of models on their way from one step to another ------------------------------------------------------------


def taken_apart(output: Any) -> list[Any]:
    """What a model returned as the leaves that a step can return, and their form."""
    leaves, spec = pytree.tree_flatten(output)
    kept = [leaf if leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str) else MISSING
            for leaf in leaves]  # fmt: skip
    return [kept, Specs((spec,))]


def put_together(leaves: Sequence[Any], form: Specs) -> Any:
    """What a model returned, from its leaves and their form."""
    there = [_Missing() if isinstance(leaf, str) and leaf == MISSING else leaf for leaf in leaves]
    return pytree.tree_unflatten(there, form.of[0])


def whole(leaf: Any) -> Any:
    """The tensor of the batch. Numbers, of which each microbatch has one, are missing."""
    if not isinstance(leaf, StepOutput):
        return leaf
    return MISSING if leaf.outputs[0].dim() == 0 else leaf.concat()


# The arguments of a step --------------------------------------------------------------------------------------------


def with_models(
    args: Any, kwargs: Mapping[str, Any], of_model: Callable[[Any], Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with something in the place of each model, or of its mark."""

    def standing(leaf: Any) -> Any:
        is_one = isinstance(leaf, DistributedModel) or (isinstance(leaf, str) and leaf.startswith(MARK))
        return of_model(leaf) if is_one else leaf

    found = pytree.tree_map(standing, (args, dict(kwargs)), is_leaf=lambda one: isinstance(one, DistributedModel))
    return tuple(found[0]), found[1]


def marked(models: Sequence[DistributedModel], kept: DistributedModel, one: Any) -> Any:
    """A model that is kept, or the mark of another."""
    return one if one is kept else f"{MARK}{models.index(one)}"


def number_of(mark: str) -> int:
    """The number of the model that a mark stands for."""
    return int(mark[len(MARK) :])


def with_keywords(made: Callable[..., Any], function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """A function with the signature of another one and these arguments by keyword."""
    signature = inspect.signature(function)
    listed = list(signature.parameters.values())
    place = len(listed) - any(one.kind is one.VAR_KEYWORD for one in listed)
    listed[place:place] = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    made.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return made


def labels(models: Sequence[DistributedModel]) -> str:
    return " and ".join(model.model_run.label for model in models)
