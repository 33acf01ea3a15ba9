"""What SageMaker's distributed modules share: arguments that are checked where they are given.

A distributed module is an ordinary module with whole parameters. The planner divides it along the tensor axis by its
rules, as it divides any module.
"""

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, ClassVar, cast

import torch
from torch import nn

from shardwright.core.errors import ShardwrightError, nearest


class DistributedModule(nn.Module):
    """The base of SageMaker's distributed modules.

    Its arguments are those of the dataclass `Arguments`, in that order.

    Raises ShardwrightError for an argument that it does not have, or that has no meaning, and MissingCapabilityError
    for one that is not carried out here.
    """

    Arguments: ClassVar[type]

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if hasattr(cls, "Arguments"):
            cls.__signature__ = inspect.signature(cls.Arguments)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.arguments = bound(type(self).__name__, self.Arguments, args, kwargs)


def bound(module: str, arguments: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments that a module is given, by the dataclass that describes them."""
    known = [one for one in fields(arguments) if one.init]
    for name in kwargs:
        if name not in {one.name for one in known}:
            raise ShardwrightError(f"{module} has no argument {name}: {nearest(name, [one.name for one in known])}")
    by_place = [one.name for one in known if not one.kw_only]
    if len(args) > len(by_place):
        raise ShardwrightError(
            f"{module} was given {len(args)} arguments by place, and has {len(by_place)}: {', '.join(by_place)}"
        )
    given = dict(zip(by_place, args, strict=False))
    twice = sorted(given.keys() & kwargs.keys())
    if twice:
        raise ShardwrightError(f"{module} was given {twice[0]} twice: by its place, and by its name")
    given |= kwargs
    needed = [
        one.name for one in known if one.default is MISSING and one.default_factory is MISSING and one.name not in given
    ]
    if needed:
        raise ShardwrightError(f"{module} needs {needed[0]}: give it as {needed[0]}=…")
    try:
        return arguments(**given)
    except ShardwrightError as error:
        raise type(error)(f"{module}: {error}") from None


def common(arguments: type, of: Any, **changed: Any) -> dict[str, Any]:
    """The arguments of another module that these have too, as keywords, and those that are ``changed``."""
    shared = {one.name for one in fields(arguments)} & {one.name for one in fields(of)}
    return {name: getattr(of, name) for name in sorted(shared)} | changed


def require_size(name: str, value: Any, least: int = 1) -> None:
    """Raise ShardwrightError unless the value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ShardwrightError(f"{name}={value!r}: expected a whole number of at least {least}")


def require_probability(name: str, value: Any) -> None:
    """Raise ShardwrightError unless the value is in [0, 1)."""
    if not (isinstance(value, int | float) and 0 <= value < 1):
        raise ShardwrightError(f"{name}={value!r}: expected a probability of at least 0 and below 1")


def tensors_in(module: str, inputs: Any, names: tuple[str, ...], optional: int = 0) -> tuple[torch.Tensor | None, ...]:
    """The inputs of a module that takes them as one tuple, of which the last ``optional`` may be left out.

    Raises ShardwrightError for another thing than a tuple of as many.
    """
    count = len(inputs) if isinstance(inputs, tuple | list) else -1
    if not len(names) - optional <= count <= len(names):
        given = type(inputs).__name__ if count < 0 else f"{count} inputs"
        raise ShardwrightError(f"{module} takes one tuple, ({', '.join(names)}): given {given}")
    return cast(tuple[torch.Tensor | None, ...], (*inputs, *[None] * (len(names) - count)))
