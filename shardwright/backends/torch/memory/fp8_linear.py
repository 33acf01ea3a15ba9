"""Linear layers that compute in fp8, forward and backward; their gradients of weights can be put off like any other.

A layer keeps its input and its weight in bf16 for the backward pass, as it does in a plan for bf16, and the two scales:
there both are cast once more. The product, the gradient of the input and that of the weight are computed in 8 bits; the
bias is added, and its gradient summed, in bf16.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwright.backends.torch.capture import fp8_products as fp8
from shardwright.backends.torch.capture.replaced import replaced
from shardwright.backends.torch.memory import weight_gradients
from shardwright.core.errors import MissingCapabilityError

CAPABILITY = (8, 9)
"""The first compute capability of GPUs with products in fp8."""


def _as_it_is(largest: torch.Tensor) -> torch.Tensor:
    return largest


class _Linear(torch.autograd.Function):
    """The product of rows [rows, in] and a weight: [out, in], or [in, out] where it is ``turned``."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, is_turned: bool, of_operands: fp8.Reduce,
        of_gradient: fp8.Reduce,
    ) -> torch.Tensor:  # fmt: skip
        largest = of_operands(torch.stack([fp8.largest_entry(rows), fp8.largest_entry(weight)]))
        rows_scale, weight_scale = (fp8.scale_for(each, fp8.FORWARD) for each in largest.unbind())
        ctx.save_for_backward(rows, weight, rows_scale, weight_scale)
        ctx.is_turned, ctx.of_gradient, ctx.parameter = is_turned, of_gradient, weight
        return fp8.product(
            fp8.cast(rows, rows_scale, fp8.FORWARD),
            fp8.cast(weight, weight_scale, fp8.FORWARD, turned=is_turned),
            rows_scale,
            weight_scale,
            (rows.shape[0], weight.shape[1 if is_turned else 0]),
            fast=True,
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise MissingCapabilityError(
                "a gradient of the gradient of a linear layer in fp8 is asked for (create_graph=True), and casts to 8 "
                "bits have none: plan for bf16"
            )
        rows, weight, rows_scale, weight_scale = ctx.saved_tensors
        is_turned = ctx.is_turned
        scale = fp8.scale_for(ctx.of_gradient(fp8.largest_entry(gradient)), fp8.GRADIENT)
        narrow = fp8.cast(gradient, scale, fp8.GRADIENT)
        of_rows = None
        if ctx.needs_input_grad[0]:
            right = fp8.cast(weight, weight_scale, fp8.FORWARD, turned=not is_turned)
            of_rows = fp8.product(narrow, right, scale, weight_scale, tuple(rows.shape), fast=False)
            del right
        if not ctx.needs_input_grad[1]:
            return of_rows, None, None, None, None

        def of_weight(given: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
            left, right = fp8.turned(narrow), fp8.cast(given, rows_scale, fp8.FORWARD, turned=True)
            if is_turned:
                return fp8.product(right, left, rows_scale, scale, tuple(weight.shape), fast=False)
            return fp8.product(left, right, scale, rows_scale, tuple(weight.shape), fast=False)

        if weight_gradients.put_off("a linear layer in fp8", ctx.parameter, rows, narrow, of_weight):
            return of_rows, None, None, None, None
        return of_rows, of_weight(rows, narrow), None, None, None


def linear(
    given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_turned: bool = False,
    of_operands: fp8.Reduce = _as_it_is, of_gradient: fp8.Reduce = _as_it_is,
) -> torch.Tensor:  # fmt: skip
    """A linear layer of bf16 values, computed in fp8.

    Args:
        given: […, in].
        weight: [out, in], or [in, out] where it is ``turned``.
        bias: [out], or None.
        of_operands: gives the largest entries of the whole operands, [2], from those of what is here.
        of_gradient: the same of the gradient of the result, [].
    """
    rows = given.reshape(-1, given.shape[-1])
    made: torch.Tensor = _Linear.apply(rows, weight, is_turned, of_operands, of_gradient)  # type: ignore[no-untyped-call]
    made = made.view(*given.shape[:-1], made.shape[-1])
    return made if bias is None else made + bias


def applies(given: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether these operands are computed in fp8 now: they are bf16, and no model is being read."""
    return given.dtype is weight.dtype is torch.bfloat16 and not fp8.are_plain()


def require_fp8(device: torch.device) -> None:
    """Raise MissingCapabilityError for a GPU that has no products in fp8. CPUs compute the same numbers, slowly."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < CAPABILITY:
        raise MissingCapabilityError(
            f"the plan computes products in fp8, and {torch.cuda.get_device_name(device)} has none (compute capability "
            f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}, and {'.'.join(map(str, CAPABILITY))} is "
            f"the first that has them): plan for 'bf16', which this device computes"
        )


def compute_in_fp8(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Let modules multiply with their ``weight`` in fp8 from now on; the function that is returned undoes it."""
    before = [(module, vars(module).get("forward")) for module in modules]
    for module, own in before:
        vars(module)[_OWN] = own or MethodType(type(module).forward, module)
        # A method of the module: that of a copy of the module is the copy's.
        module.forward = MethodType(_form_of(module), module)

    def undo() -> None:
        for module, own in before:
            vars(module).pop(_OWN, None)
            vars(module).pop("forward", None)
            if own is not None:
                vars(module)["forward"] = own

    return undo


def hides_from_compiler(module: nn.Module) -> bool:
    """Whether a module computes in fp8 in a way that torch.compile does not follow: by functions in the place of
    torch's while its own code runs."""
    return getattr(vars(module).get("forward"), "__func__", None) is _another


_OWN = "_forward_without_fp8"


def _form_of(module: nn.Module) -> Callable[..., Any]:
    kind, own = type(module), vars(module).get("forward")
    if own is None and kind.forward is nn.Linear.forward:
        return _plain_linear
    if own is None and (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return _conv1d
    return _another


def _plain_linear(module: Any, input: torch.Tensor) -> torch.Tensor:
    if not applies(input, module.weight):
        return functional.linear(input, module.weight, module.bias)
    return linear(input, module.weight, module.bias)


def _conv1d(module: Any, x: torch.Tensor) -> torch.Tensor:
    """GPT-2's linear layer, whose weight is [in, out]."""
    if not applies(x, module.weight):
        return vars(module)[_OWN](x)  # type: ignore[no-any-return]
    return linear(x, module.weight, module.bias, is_turned=True)


def _another(module: Any, *args: Any, **kwargs: Any) -> Any:
    with _in_place_of_products(module):
        return vars(module)[_OWN](*args, **kwargs)


@contextmanager
def _in_place_of_products(module: Any) -> Iterator[None]:
    """A context in which `functional.linear` and `torch.addmm` compute in fp8 where they multiply with a module's
    weight."""
    plain_linear, plain_addmm = functional.linear, torch.addmm

    def in_linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        is_own = weight is module.weight and applies(given, weight)
        return linear(given, weight, bias) if is_own else plain_linear(given, weight, bias)

    def in_addmm(*args: Any, **kwargs: Any) -> torch.Tensor:
        if len(args) < 3 or args[2] is not module.weight or not applies(args[1], args[2]):
            return plain_addmm(*args, **kwargs)
        if kwargs or len(args) > 3:
            raise MissingCapabilityError(
                f"{type(module).__name__} calls torch.addmm with {', '.join(kwargs) or 'more than three arguments'}, "
                f"which products in fp8 do not do: plan for bf16, or call it with (bias, input, weight) alone"
            )
        return linear(args[1], args[2], args[0], is_turned=True)

    with replaced(functional, "linear", in_linear), replaced(torch, "addmm", in_addmm):
        yield
