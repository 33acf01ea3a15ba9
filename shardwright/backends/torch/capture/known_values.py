"""Values that are known while a model runs on stand-ins: whole numbers that follow from sizes alone, as positions do.

A plain run of a Hugging Face model looks at its position ids, and needs no mask where they just count on: attention is
then causal by itself, in half of the time and memory. Of a stand-in nothing can be read, and the model would make the
mask in case. So tensors that `torch.arange` makes are followed through a few functions, with their values beside them.
What comes from a batch, a parameter or a buffer is never known.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.compat import DisableTorchFunction, FakeTensor, without_dispatch_modes

LARGEST = 2**20
"""The number of entries, in memory, above which no values are kept."""
_FOLLOWED = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in (
        "add", "sub", "mul", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "unsqueeze",
        "squeeze", "expand", "view", "reshape", "flatten", "transpose", "permute", "__getitem__", "narrow", "select",
        "repeat", "to", "long", "int", "clone", "contiguous", "detach",
    )
    if hasattr(owner, name)
)  # fmt: skip
"""Functions that write nothing, and whose results follow from the values of their arguments."""
_OPENING = frozenset(
    {
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.set_,
    }
)
"""Functions after which a tensor may be written to without a new version."""
_WRITING = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith("_foreach_") and name.endswith("_"))
"""Functions that write to lists of tensors, some without a new version of stand-ins."""
_CPU = torch.device("cpu")
_PLAIN = (int, bool, NoneType, EllipsisType, torch.dtype, torch.layout, torch.memory_format)
_MASKS, _PACKED = "transformers.masking_utils", "find_packed_sequence_indices"
"""The module, and its function that tells sequences in one row apart by position ids; None where each row is one."""


class KnownValues(TorchFunctionMode):
    """A mode that follows known values. It is entered after other modes, so that it sees what the model gives and gets.

    Args:
        is_left_out: whether what is made now may be another value when a recording is run again.
    """

    def __init__(self, is_left_out: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._is_left_out = is_left_out
        self._known: Any = WeakTensorKeyDictionary()
        """Stand-in → its value on the CPU, and the version that has it."""

    def of(self, tensor: Any) -> torch.Tensor | None:
        """The value of a tensor; None where it is not known."""
        found = self._known.get(tensor) if isinstance(tensor, torch.Tensor) else None
        if found is None:
            return None
        value, version = found
        with DisableTorchFunction():
            return value if tensor._version == version else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        follows = func is torch.arange or (func in _FOLLOWED and any(self.of(item) is not None for item in args))
        if not follows:
            if func in _WRITING or (func in _OPENING and self.of(args[0]) is not None):
                self._known.clear()
            return func(*args, **kwargs)
        given = None if "out" in kwargs or self._is_left_out() else self._given(args, kwargs)
        result = func(*args, **kwargs)
        if given is not None:
            self._note(result, func, *given)
        return result

    def _given(self, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """The arguments with values in place of stand-ins; None where one is not known."""
        try:
            return self._value(args), {k: _CPU if k == "device" else self._value(v) for k, v in kwargs.items()}
        except _UnknownError:
            return None

    def _value(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            value = self.of(item)
            if value is not None:
                return value
        elif type(item) in _PLAIN:  # not of a class of its own, as numbers that change from step to step are
            return item
        elif isinstance(item, (torch.device, str)):
            return _CPU
        elif isinstance(item, slice):
            return slice(self._value(item.start), self._value(item.stop), self._value(item.step))
        elif isinstance(item, (tuple, list)):
            return tuple(self._value(part) for part in item)
        raise _UnknownError

    def _note(self, result: Any, func: Any, args: Any, kwargs: Any) -> None:
        """Keep the value of a result beside it."""
        if type(result) not in (torch.Tensor, FakeTensor):
            return
        with without_dispatch_modes(), DisableTorchFunction():
            dtype, size_bytes = result.dtype, result.untyped_storage().nbytes()
            is_whole = not (dtype.is_floating_point or dtype.is_complex)
            if not is_whole or size_bytes > LARGEST * dtype.itemsize or result.is_inference():
                return
            try:
                value = func(*args, **kwargs)
            except (RuntimeError, TypeError, IndexError, ValueError):  # it is not known
                return
            if (value.shape, value.dtype, value.device) == (result.shape, dtype, _CPU):
                self._known[result] = value, result._version


class _UnknownError(Exception):
    """An argument has no known value."""


@contextmanager
def known_values(is_left_out: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """A context in which known values are followed (see `KnownValues`), and Hugging Face models look at them as in a
    plain run."""
    masks, values = sys.modules.get(_MASKS), KnownValues(is_left_out)
    original: Any = getattr(masks, _PACKED, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def packed(position_ids: Any, *args: Any, **kwargs: Any) -> Any:
        value = values.of(position_ids)
        if value is not None:
            with without_dispatch_modes(), DisableTorchFunction():
                if original(value, *args, **kwargs) is None:
                    return None
        return original(position_ids, *args, **kwargs)

    with replaced(masks, _PACKED, packed), values:
        yield
