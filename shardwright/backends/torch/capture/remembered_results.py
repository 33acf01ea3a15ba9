"""Remembered results of ops on tensors without values: where blocks repeat, only the ops of one block are worked out.

The result of an op on such tensors (shapes, strides, dtypes, and which tensors share memory) follows from the same
properties of its operands and from its other arguments. Torch works most of it out in Python, which takes a millisecond
an op.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.backends.torch.compat import FakeTensor, dispatch_depth, in_kernel_invocation_manager

_TAGS = (
    torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view,
)  # fmt: skip
_AS_THEY_ARE = frozenset({
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip
_BUILT_IN = ("aten::", "prims::", "prim::")
_PLAIN = frozenset("aten::" + name for name in (
    "view", "transpose", "t", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "split", "alias",
    "detach", "_unsafe_view", "mm", "bmm", "addmm", "add", "sub", "mul", "div", "neg", "pow", "exp", "log", "tanh",
    "sigmoid", "rsqrt", "gelu", "silu", "_softmax", "_log_softmax", "nll_loss_forward",
))  # fmt: skip
"""Ops whose shapes torch works out in C++, alike for tensors with values and without."""
ASKS_DEVICE = torch.ops.prim.device.default
_EMPTY = torch.empty_strided
_VIEW = torch.ops.aten.as_strided.default


class _NotRememberedError(Exception):
    """The result of an op follows from more than is compared."""


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that an op gives: an operand itself, one in the memory of an operand, or a new one.

    Attributes:
        operand: its number; None for a new tensor.
        is_operand: whether it is the operand itself.
        device: where it is, or pretends to be.
    """

    operand: int | None
    is_operand: bool
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of an op: outputs, in a list or a tuple where ``kind`` is one."""

    kind: type | None
    outputs: tuple[_Output | None, ...]


class Inferred:
    """The results of ops on meta tensors, or on fake tensors of one mode. Each combination of operands and arguments is
    run once."""

    def __init__(self) -> None:
        self._may_be: dict[Any, bool] = {}
        """Whether the results of an op are remembered, by op."""
        self._known: dict[Any, _Result | None] = {}
        """The result of a call, by op and arguments; None where it is not remembered."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of ``func(*args, **kwargs)``, where no dispatch mode but that of fake tensors is entered."""
        if func is _GROUPED_PRODUCT and isinstance(args[0], FakeTensor) and args[0].device.type == "cpu":
            return _grouped_product(*args, **kwargs)
        may_be = self._may_be.get(func)
        if may_be is None:
            may_be = self._may_be[func] = _is_remembered(func)
        if not may_be:
            return func(*args, **kwargs)
        operands: list[torch.Tensor] = []
        try:
            key = (
                func, _key(args, operands), _key(tuple(kwargs.items()), operands), torch.get_default_dtype(),
                torch.is_inference_mode_enabled(),
            )  # fmt: skip
        except _NotRememberedError:
            return func(*args, **kwargs)
        if not operands or dispatch_depth() != (type(operands[0]) is FakeTensor):
            return func(*args, **kwargs)
        if key in self._known:
            known = self._known[key]
            return func(*args, **kwargs) if known is None else _made(known, operands)
        if func._schema.name in _PLAIN and type(operands[0]) is FakeTensor:
            result = _without_mode(func, args, kwargs, operands)
        else:
            result = func(*args, **kwargs)
        try:
            self._known[key] = _result(result, operands)
        except _NotRememberedError:
            self._known[key] = None
        return result


_GROUPED_PRODUCT = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)


def _grouped_product(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """The shape of a grouped matrix product: the CPU computes it in float32, but its fake kernel wants bfloat16."""
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == 3 and right.dim() == 3:
        shape.insert(0, left.shape[0])
    elif left.dim() == 2 and right.dim() == 2 and offs is not None:
        shape.insert(0, offs.shape[0])
    return left.new_empty(shape, dtype=out_dtype or left.dtype)


def _without_mode(func: Any, args: Any, kwargs: Any, operands: list[torch.Tensor]) -> Any:
    """The result of an op on fake tensors, straight from the kernel that their mode asks too in the end."""
    first: Any = operands[0]
    if any(operand.fake_device != first.fake_device for operand in operands):  # type: ignore[attr-defined]
        return func(*args, **kwargs)
    with in_kernel_invocation_manager(first.fake_mode):
        result = func(*args, **kwargs)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else FakeTensor(first.fake_mode, tensor, first.fake_device)

    return type(result)(map(fake, result)) if isinstance(result, (tuple, list)) else fake(result)


def _is_remembered(func: Any) -> bool:
    """Whether the result of an op follows from the forms of its operands, and the op leaves these as they are."""
    schema = func._schema
    return (
        schema.name.startswith("aten::")
        and not schema.is_mutable
        and not any(tag in func.tags for tag in _TAGS)
        and not schema.name.startswith("aten::lift")
    )


def _key(value: Any, operands: list[torch.Tensor]) -> Any:
    """The part of an argument that decides the result. Raises _NotRememberedError where that is more than its form."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return kind, value
    if kind is tuple or kind is list or kind is torch.Size:
        return tuple([_key(item, operands) for item in value])
    if not isinstance(value, torch.Tensor):
        raise _NotRememberedError
    device = _device_of(value)
    if device is None or value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise _NotRememberedError
    if operands and type(operands[0]) is not kind and FakeTensor in (kind, type(operands[0])):
        raise _NotRememberedError
    operands.append(value)
    return value.shape, value.stride(), value.storage_offset(), value.dtype, device


def _device_of(tensor: torch.Tensor) -> torch.device | None:
    """The device of a tensor without values; None for others, and for subclasses of the user's."""
    kind = type(tensor)
    if kind is FakeTensor or (kind is torch.nn.Parameter and isinstance(tensor, FakeTensor)):
        fake: Any = tensor
        return None if fake.constant is not None or fake.real_tensor is not None else fake.fake_device
    if (kind is torch.Tensor or kind is torch.nn.Parameter) and tensor.is_meta:
        return tensor.device
    return None


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors in the same memory share."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse and other tensors without a storage
        return id(tensor)


def _result(result: Any, operands: list[torch.Tensor]) -> _Result:
    """A result in the terms of its op's operands. Raises _NotRememberedError where it cannot be."""
    kind = type(result) if isinstance(result, (tuple, list)) else None
    if kind not in (None, tuple, list):
        raise _NotRememberedError
    outputs = tuple(result) if kind is not None else (result,)
    memories = [memory_of(tensor) for tensor in operands]
    of_new: set[int] = set()
    found: list[_Output | None] = []
    for output in outputs:
        if output is None:
            found.append(None)
            continue
        if not isinstance(output, torch.Tensor):
            raise _NotRememberedError
        own = next((n for n, operand in enumerate(operands) if output is operand), None)
        device, memory = _device_of(output), memory_of(output)
        if device is None or output.layout is not torch.strided or output.is_conj() or output.is_neg():
            raise _NotRememberedError
        of_operand = next((n for n, other in enumerate(memories) if memory == other), None)
        if of_operand is not None and len(set(memories)) < len(memories):
            raise _NotRememberedError  # in the memory of which of them?
        if of_operand is not None and output.dtype != operands[of_operand].dtype:
            raise _NotRememberedError
        if of_operand is None and (memory in of_new or output.storage_offset() or not _fills_its_memory(output)):
            raise _NotRememberedError
        of_new.add(memory)
        found.append(
            _Output(
                of_operand, own is not None, tuple(output.shape), output.stride(), int(output.storage_offset()),
                output.dtype, device,
            )
        )  # fmt: skip
    return _Result(kind, tuple(found))


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    entries = 0 if 0 in tensor.shape else 1
    if entries:
        entries += sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.untyped_storage().nbytes()) == entries * tensor.element_size()


def _made(known: _Result, operands: list[torch.Tensor]) -> Any:
    first: Any = operands[0]
    if isinstance(first, FakeTensor):
        mode: Any = first.fake_mode
        with in_kernel_invocation_manager(mode):
            plain = [None if one is None else _plain(one, operands) for one in known.outputs]
        made = [
            tensor if tensor is None or one is None or one.is_operand else FakeTensor(mode, tensor, one.device)
            for one, tensor in zip(known.outputs, plain, strict=True)
        ]
    else:
        made = [None if one is None else _plain(one, operands) for one in known.outputs]
    return made[0] if known.kind is None else known.kind(made)


def _plain(one: _Output, operands: list[torch.Tensor]) -> torch.Tensor:
    if one.operand is None:
        return _EMPTY(one.shape, one.strides, dtype=one.dtype, device="meta")
    operand = operands[one.operand]
    if one.is_operand:
        return operand
    made: torch.Tensor = _VIEW(operand, one.shape, one.strides, one.offset)
    return made


def unwatched(call: Callable[..., Any], func: Any, args: Any, kwargs: Any, modes: int) -> Any:
    """``call(func, args, kwargs)`` without tracing of Python calls, where nothing of the user's runs for the op: where
    the op is torch's own, and no more than ``modes`` dispatch modes are entered."""
    outer = sys.gettrace()
    if outer is None or dispatch_depth() > modes or not func._schema.name.startswith(_BUILT_IN):
        return call(func, args, kwargs)
    sys.settrace(None)
    try:
        return call(func, args, kwargs)
    finally:
        sys.settrace(outer)
