"""Weight gradients that we make in place of autograd: put off by a split backward (I, then W) to its W, or added to
those of earlier microbatches by the product that makes them.

While a stage whose backward is split runs, linear layers, convolutions and embeddings are run by functions of our own.
In I their backward gives the gradient of the input alone and keeps the two factors of the weight's gradient; W
multiplies them, straight into ``.grad``. Everything else (norms, products of activations, a user's own functions) has
its whole backward in I. So autograd runs each graph once, as it does for a whole backward, and what it allows stays
allowed: shared parameters, modules called again, writes in place, checkpoints, hooks.

The split into B for the input and B for the weight is that of zero-bubble schedules (Qi et al., arXiv 2401.10241,
section 2).

A whole backward behind the first microbatch adds the gradients of large linear layers to the sum that there is, in one
pass over it. Autograd writes each into memory of its own, reads it again, and adds: with few rows, that takes as long
as the product. Megatron-LM does the same under the name of gradient accumulation fusion.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwright.backends.torch.compat import collects_all_gradients, transforms_are_active
from shardwright.backends.torch.state.gradient_hook import hook_of, is_hooked
from shardwright.core.errors import CaptureError

_linear, _addmm, _embedding = functional.linear, torch.addmm, functional.embedding
_convolutions: dict[str, Callable[..., torch.Tensor]] = {
    name: getattr(functional, name) for name in ("conv1d", "conv2d", "conv3d")
}
Accumulate = Callable[[torch.Tensor, torch.Tensor], None]
"""A function that adds a weight gradient, from the input of an op and the gradient of its output."""
LARGE = 1 << 18
"""The entries from which the gradient of a weight is added at once."""


class _Factors:
    """An input and the gradient of an output, kept until W multiplies them."""

    __slots__ = ("accumulate", "given", "given_version", "gradient", "gradient_version", "name")

    def __init__(self, name: str, given: torch.Tensor, gradient: torch.Tensor, accumulate: Accumulate) -> None:
        self.name, self.accumulate = name, accumulate
        # Without the graph that made them, which holds what came into the stage, and its gradients.
        self.given, self.gradient = given.detach(), gradient.detach()
        self.given_version, self.gradient_version = given._version, gradient._version

    def multiply(self) -> None:
        if self.given._version != self.given_version or self.gradient._version != self.gradient_version:
            raise CaptureError(
                f"a tensor that {self.name} needs for the gradient of its weight was written in place between the "
                f"input gradient and the weight gradient of its microbatch: copy it first, or choose a schedule with "
                f"whole backward passes, such as 1f1b"
            )
        self.accumulate(self.given, self.gradient)


class Deferred:
    """The weight gradients that one I left to its W."""

    __slots__ = ("_factors",)

    def __init__(self) -> None:
        self._factors: list[_Factors] = []

    def add(self, name: str, given: torch.Tensor, gradient: torch.Tensor, accumulate: Accumulate) -> None:
        self._factors.append(_Factors(name, given, gradient, accumulate))

    @torch.no_grad()
    def multiply(self) -> None:
        """Add all gradients to those of their parameters, in the order in which a whole backward does, and let go of
        the factors of each."""
        self._factors.reverse()
        while self._factors:
            self._factors.pop().multiply()


_collecting: Deferred | None = None
"""The store of weight gradients while an I runs; None where they are computed at once. A backward pass runs on threads
of autograd's on some devices, and there is one I at a time."""


@contextmanager
def deferrable() -> Iterator[None]:
    """A context in which the ops run so that their backward can defer weight gradients. It is for forward passes, and
    for the backward passes of their results, since these may run parts of the forward again."""
    patched: list[tuple[Any, str, Any]] = [
        (functional, "linear", linear),
        (functional, "embedding", embedding),
        (torch, "addmm", addmm),
        *((functional, name, _convolution_named(name)) for name in _convolutions),
    ]
    before = [getattr(module, name) for module, name, _ in patched]
    try:
        for module, name, function in patched:
            setattr(module, name, function)
        yield
    finally:
        for (module, name, _), function in zip(patched, before, strict=True):
            setattr(module, name, function)


_adding = False
"""Whether gradients are added at once now."""


@contextmanager
def adding() -> Iterator[None]:
    """A context for the forward and the backward of a microbatch where gradients of earlier ones are there: products of
    large weights are run so that their backward adds to these at once."""
    global _adding
    before = functional.linear, torch.addmm
    try:
        functional.linear, torch.addmm = _large_linear, _large_addmm  # type: ignore[assignment]
        _adding = True
        yield
    finally:
        functional.linear, torch.addmm = before
        _adding = False


def added(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Add a product, the gradient of a weight, to those of earlier microbatches where `adding` is in force, else return
    False: autograd is to have it then."""
    if not (_adding and _is_large(weight) and collects_all_gradients()) or torch.is_grad_enabled():
        return False
    hook = hook_of(weight)
    so_far = weight.grad if hook is None else hook.sums.sum_of(hook.index)
    if so_far is None or so_far.dtype is not left.dtype or not so_far.is_contiguous() or so_far.requires_grad:
        return False
    so_far.addmm_(left, right)
    return True


def _is_large(weight: torch.Tensor) -> bool:
    """Whether a gradient is worth a function of our own: below this size that takes longer than the pass it saves."""
    return weight.numel() >= LARGE and _is_quiet(weight) and not _is_freed(weight)


def _is_summed_in(weight: torch.Tensor, given: torch.Tensor) -> bool:
    """Whether the product with ``given`` is of the dtype of the gradient's sum: what is made in 16 bits and summed in
    32 is better left to autograd, whose functions are not in Python."""
    hook = hook_of(weight)
    sums = weight.dtype if hook is None else hook.sums.dtype
    kind = given.device.type
    made = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else given.dtype
    return sums is made


def may_be_put_off() -> bool:
    """Whether `deferrable` is in force."""
    return functional.linear is linear


@contextmanager
def collecting() -> Iterator[Deferred]:
    """A context that runs a backward pass as an I, and gives the weight gradients that are left to its W."""
    global _collecting
    _collecting = Deferred()
    try:
        with deferrable():
            yield _collecting
    finally:
        _collecting = None


def _put_off() -> Deferred | None:
    """The store for a weight gradient now; None where it is computed at once. A gradient that code of the model's own
    asks for, by ``autograd.grad`` in the middle of its forward or backward, is no part of the step's backward."""
    return _collecting if _collecting is not None and collects_all_gradients() else None


def put_off(
    name: str, weight: torch.Tensor, given: torch.Tensor, gradient: torch.Tensor,
    derive: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> bool:  # fmt: skip
    """Leave the gradient of a weight, ``derive(given, gradient)``, to W where that is how its backward runs; False
    where it is wanted at once."""
    store = _put_off()
    if store is None or not (_is_quiet(weight) and weight.requires_grad):
        return False
    store.add(name, given, gradient, lambda given, gradient: _add_to(weight, derive(given, gradient)))
    return True


def _can_defer(given: Any, weight: Any) -> bool:
    """Whether the gradient of a weight may come later, without autograd: it is a parameter, and nobody hooks it."""
    return (
        _is_quiet(weight)
        and weight.requires_grad
        and torch.is_grad_enabled()
        and type(given) in (torch.Tensor, nn.Parameter)
        and not (given.is_complex() or weight.is_complex())  # whose gradients are products with conjugates
        and not transforms_are_active()
    )


def _cast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The operands of a product, cast as autocast casts them."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    return [t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t for t in tensors]


def _add_to(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    hook = hook_of(parameter)
    gradient = gradient.to(parameter.dtype)
    if hook is not None:
        hook.add(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def _add_product(parameter: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to a gradient, in one pass where the dtypes allow it."""
    hook = hook_of(parameter)
    so_far = parameter.grad if hook is None else hook.sums.sum_of(hook.index)
    if so_far is None or so_far.dtype is not left.dtype or not so_far.is_contiguous():
        _add_to(parameter, left @ right)
    else:
        so_far.addmm_(left, right)


# Linear layers, weight [outputs, inputs] or, for addmm, [inputs, outputs] ------------------------------------------


class _Product(torch.autograd.Function):
    """The product of [rows, inputs] and a weight. It is for matrices only: a function of one's own must not return a
    view, because the ops after it could not write to that in place."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, turned: bool
    ) -> torch.Tensor:
        (matrix,) = _cast(weight)
        ctx.save_for_backward(given, matrix)
        ctx.weight, ctx.bias, ctx.turned = weight, bias, turned
        added = bias if bias is None else _cast(bias)[0]
        if not turned:
            return _linear(given, matrix, added)
        return given @ matrix if added is None else _addmm(added, given, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, matrix = ctx.saved_tensors
        weight, bias, turned = ctx.weight, ctx.bias, ctx.turned
        if torch.is_grad_enabled():  # a gradient of this gradient will be asked for: from the weight, not from its cast
            matrix = weight.to(matrix.dtype)
        back = None
        if ctx.needs_input_grad[0]:
            back = gradient @ (matrix.t() if turned else matrix)
        wants_bias = bias is not None and ctx.needs_input_grad[2]
        store = _put_off()
        if store is None:
            left, right = (given, gradient) if turned else (gradient, given)
            own = None if added(weight, left.t(), right) else (left.t() @ right).to(weight.dtype)
            return back, own, gradient.sum(0).to(bias.dtype) if wants_bias else None, None
        late_bias = bias if wants_bias and _is_quiet(bias) else None

        def accumulate(given: torch.Tensor, gradient: torch.Tensor) -> None:
            left, right = (given, gradient) if turned else (gradient, given)
            _add_product(weight, left.t(), right)
            if late_bias is not None:
                _add_to(late_bias, gradient.sum(0))

        store.add("a linear layer", given, gradient, accumulate)
        early = gradient.sum(0).to(bias.dtype) if wants_bias and late_bias is None else None
        return back, None, early, None


def _is_freed(parameter: torch.Tensor) -> bool:
    """Whether the data of a parameter may be gone when W runs."""
    hook = hook_of(parameter)
    return hook is not None and not hook.keeps_data


def _is_quiet(parameter: torch.Tensor) -> bool:
    """Whether a tensor is a parameter without hooks."""
    return type(parameter) is nn.Parameter and parameter.is_leaf and not is_hooked(parameter)


def linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The replacement of ``functional.linear``."""
    if not _can_defer(given, weight) or weight.dim() != 2:
        return _linear(given, weight, bias)
    rows = _cast(given)[0].reshape(-1, given.shape[-1])
    made: torch.Tensor = _Product.apply(rows, weight, bias, False)  # type: ignore[no-untyped-call]
    return made if given.dim() == 2 else made.view(*given.shape[:-1], weight.shape[0])


def _large_linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return (linear if _is_large(weight) and _is_summed_in(weight, given) else _linear)(given, weight, bias)


def addmm(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The replacement of ``torch.addmm``, as a linear layer with its weight the other way round (GPT-2's) calls it."""
    if len(args) != 3 or kwargs or not _can_defer(args[1], args[2]) or args[0].dim() != 1:
        return _addmm(*args, **kwargs)
    bias, given, weight = args
    made: torch.Tensor = _Product.apply(_cast(given)[0], weight, bias, True)  # type: ignore[no-untyped-call]
    return made


def matrix_product(given: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of [rows, inputs] and a weight [inputs, outputs], as a linear layer's without a bias."""
    puts_off = may_be_put_off() and _can_defer(given, weight)
    adds = _adding and _is_large(weight) and _is_summed_in(weight, given) and _can_defer(given, weight)
    if not (puts_off or adds):
        return given @ weight
    made: torch.Tensor = _Product.apply(_cast(given)[0], weight, None, True)  # type: ignore[no-untyped-call]
    return made


def _large_addmm(*args: Any, **kwargs: Any) -> torch.Tensor:
    is_ours = len(args) == 3 and _is_large(args[2]) and _is_summed_in(args[2], args[1])
    return (addmm if is_ours else _addmm)(*args, **kwargs)


# Convolutions ------------------------------------------------------------------------------------------------------


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: nn.Parameter, bias: torch.Tensor | None, settings: tuple[Any, ...]
    ) -> torch.Tensor:
        kernel = _of_dims(_cast(weight)[0], given.dim())
        ctx.save_for_backward(given, kernel)
        ctx.weight, ctx.bias, ctx.settings = weight, bias, settings
        stride, padding, dilation, groups = settings
        added = bias if bias is None else _cast(bias)[0]
        none = [0] * len(stride)
        return torch.convolution(given, kernel, added, stride, padding, dilation, False, none, groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        given, kernel = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        stride, padding, dilation, groups = ctx.settings
        if torch.is_grad_enabled():
            kernel = _of_dims(weight.to(kernel.dtype), given.dim())
        wants_bias = bias is not None and ctx.needs_input_grad[2]
        sizes = [weight.shape[0]] if bias is not None else None
        none = [0] * len(stride)

        def derive(mask: list[bool], given: torch.Tensor, gradient: torch.Tensor) -> list[torch.Tensor]:
            found: list[torch.Tensor] = torch.ops.aten.convolution_backward(
                gradient, given, kernel, sizes, stride, padding, dilation, False, none, groups, mask
            )
            return found

        store = _put_off()
        if store is None:
            back, own, own_bias = derive([ctx.needs_input_grad[0], True, wants_bias], given, gradient)
            return back, own.view_as(weight).to(weight.dtype), own_bias.to(bias.dtype) if wants_bias else None, None
        early_back = derive([True, False, False], given, gradient)[0] if ctx.needs_input_grad[0] else None
        late_bias = bias if wants_bias and _is_quiet(bias) else None

        def accumulate(given: torch.Tensor, gradient: torch.Tensor) -> None:
            _, own, own_bias = derive([False, True, late_bias is not None], given, gradient)
            _add_to(weight, own.view_as(weight))
            if late_bias is not None:
                _add_to(late_bias, own_bias)

        store.add("a convolution", given, gradient, accumulate)
        early = None
        if wants_bias and late_bias is None:
            early = gradient.sum([d for d in range(gradient.dim()) if d != 1]).to(bias.dtype)
        return early_back, None, early, None


def _of_dims(kernel: torch.Tensor, dims: int) -> torch.Tensor:
    return kernel if kernel.dim() == dims else kernel.unsqueeze(2)


def _convolution_named(name: str) -> Callable[..., torch.Tensor]:
    original, dims = _convolutions[name], int(name[4])

    def convolution(
        input: torch.Tensor, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1,
    ) -> torch.Tensor:  # fmt: skip
        if isinstance(padding, str) or input.dim() != dims + 2 or not _can_defer(input, weight) or _is_freed(weight):
            return original(input, weight, bias, stride, padding, dilation, groups)
        settings = [_spread(value, dims) for value in (stride, padding, dilation)]
        given = _cast(input)[0]
        if dims == 1:  # torch runs it as one of two dims, and returns a view
            settings = [[1, *settings[0]], [0, *settings[1]], [1, *settings[2]]]
            given = given.unsqueeze(2)
        made: torch.Tensor = _Convolution.apply(given, weight, bias, (*settings, groups))  # type: ignore[no-untyped-call]
        return made.squeeze(2) if dims == 1 else made

    return convolution


def _spread(value: Any, dims: int) -> list[int]:
    return [value] * dims if isinstance(value, int) else [int(v) for v in value] * (dims if len(value) == 1 else 1)


# Embeddings --------------------------------------------------------------------------------------------------------


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: nn.Parameter, padding: int, by_frequency: bool) -> torch.Tensor:
        ctx.save_for_backward(given)
        ctx.weight, ctx.padding, ctx.by_frequency = weight, padding, by_frequency
        ctx.rows = weight.shape[0]
        return torch.embedding(weight, given, padding, by_frequency, False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (given,) = ctx.saved_tensors
        weight, rows, padding, by_frequency = ctx.weight, ctx.rows, ctx.padding, ctx.by_frequency

        def derive(given: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = torch.ops.aten.embedding_dense_backward(gradient, given, rows, padding, by_frequency)
            return found

        store = _put_off()
        if store is None:
            return None, derive(given, gradient), None, None
        store.add("an embedding", given, gradient, lambda given, gradient: _add_to(weight, derive(given, gradient)))
        return None, None, None, None


def embedding(
    input: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The replacement of ``functional.embedding``."""
    if max_norm is not None or sparse or not _can_defer(input, weight) or weight.dim() != 2:
        return _embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
    made: torch.Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
        input.reshape(-1), weight, padding, scale_grad_by_freq
    )
    return made.view(*input.shape, weight.shape[1])
