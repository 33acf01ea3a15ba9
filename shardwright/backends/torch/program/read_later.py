"""Numbers that a step body reads from tensors and only returns: placeholders until the step has run."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch


class ValueNeededError(BaseException):
    """Something asked for the value of a number that the step has not computed yet. It is no Exception, which loggers
    swallow: then the step would be recorded without what they say."""

    func = "a number that was read by .item()"


class ReadLater:
    """The number that ``tensor.item()`` will be. It can be returned from the step; anything else raises
    ValueNeededError. It is no number itself, so that nothing takes a wrong one."""

    __slots__ = ("tensor",)
    made = 0
    """The number of those that were ever made."""

    def __init__(self, tensor: torch.Tensor) -> None:
        ReadLater.made += 1
        self.tensor = tensor


def _refusing() -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise ValueNeededError

    return refuse


_OPERATIONS = (
    "bool int float complex index str repr format hash eq ne lt le gt ge neg pos abs invert round trunc floor ceil add "
    "radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow divmod rdivmod lshift rlshift rshift "
    "rrshift and rand or ror xor rxor matmul rmatmul copy deepcopy reduce_ex getattr"
)
for _operation in _OPERATIONS.split():
    setattr(ReadLater, f"__{_operation}__", _refusing())
