"""Matrix products, einsums, convolutions and attention."""

from shardwright.backends.torch.capture.ops.template import OpCall, Ref, rule, shapes
from shardwright.core.cost.saved_activations import WITH_DROPOUT
from shardwright.core.rules import op_rules as labels
from shardwright.core.rules.op_rules import Labelled


def _multiply(
    call: OpCall, left: Ref, right: Ref, labelled: Labelled, bias: Ref | None, of_bias: Labelled | None = None
) -> None:
    """A product, and the bias that is added to it, if there is one; by default its dims are the product's last."""
    if bias is None:
        call.add("contraction", [left, right], [call.out], labelled)
        return
    between = call.between(call.out.shape, call.out.dtype)
    call.add("contraction", [left, right], [between], labelled)
    aligned = of_bias or labels.elementwise([between.shape, bias.shape], [call.out.shape])
    call.add("elementwise", [between, bias], [call.out], aligned, "/bias")


@rule("contraction", "mm", "bmm", "matmul", "mv", "dot", "vdot", "inner")
def product(call: OpCall) -> None:
    left, right = call.inputs[:2]
    if call.name == "inner" and len(right.shape) > 1:
        return linear_parts(call, left, right, None)
    call.add("contraction", [left, right], [call.out], labels.matmul(left.shape, right.shape))


@rule("contraction", "addmm", "baddbmm", "addmv")
def product_and_sum(call: OpCall) -> None:
    bias, left, right = call.inputs[:3]
    added = None if call.get("beta", 1) == 0 else bias
    _multiply(call, left, right, labels.matmul(left.shape, right.shape), added)


@rule("contraction", "linear")
def linear(call: OpCall) -> None:
    linear_parts(call, call["input"], call["weight"], call.get("bias"))


def linear_parts(call: OpCall, source: Ref, weight: Ref, bias: Ref | None) -> None:
    """A linear layer, x · Wᵀ + b, with as many leading dims as x has."""
    lead = tuple(range(len(source.shape) - 1))
    summed, column = len(lead), len(lead) + 1
    one_output = len(weight.shape) == 1
    labelled = Labelled(
        (
            (*lead, summed),
            (summed,) if one_output else (column, summed),
            lead if one_output else (*lead, column),
        )
    )
    _multiply(call, source, weight, labelled, bias)


@rule("contraction", "einsum")
def einsum(call: OpCall) -> None:
    equation = call["equation"].replace(" ", "")
    left, right, out = parse_einsum(equation, shapes(call.inputs))
    call.add("contraction", call.inputs, [call.out], labels.contraction(left, right, out))


def parse_einsum(equation: str, operands: list[tuple[int, ...]]) -> tuple[str, str, str]:
    """The letters of a two-operand einsum; size-1 dims that broadcast become ``_``."""
    terms, _, out = equation.partition("->")
    names = terms.split(",")
    sizes: dict[str, int] = {}
    for letters, shape in zip(names, operands, strict=True):
        for letter, size in zip(letters, shape, strict=True):
            sizes[letter] = max(size, sizes.get(letter, 1))
    left, right = (
        "".join(c if n == sizes[c] else "_" for c, n in zip(letters, shape, strict=True))
        for letters, shape in zip(names, operands, strict=True)
    )
    return left, right, out


def is_plain_einsum(equation: str, operands: int) -> bool:
    """Whether `einsum` above can label the equation: two operands, no ellipsis, no letter twice in one of them. A
    letter that only one operand has and the output has not is summed before the product, so that too is left to
    torch."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    names = terms.split(",")
    if operands != 2 or "." in equation or not arrow or any(len(set(n)) != len(n) for n in (*names, out)):
        return False
    return set(names[0]) ^ set(names[1]) <= set(out)


@rule("contraction", "conv1d", "conv2d", "conv3d", "convolution", "_convolution")
def convolution(call: OpCall) -> None:
    _convolve(call, transposed=bool(call.get("transposed", False)))


@rule("contraction", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def convolution_transposed(call: OpCall) -> None:
    _convolve(call, transposed=True)


def _convolve(call: OpCall, *, transposed: bool) -> None:
    source, kernel, bias = call["input"], call["weight"], call.get("bias")
    shape, out_shape = source.shape, call.out.shape
    unbatched = len(shape) == len(kernel.shape) - 1
    if unbatched:
        shape, out_shape = (1, *shape), (1, *out_shape)
    labelled = labels.convolution(shape, kernel.shape, out_shape, groups=call["groups"], transposed=transposed)
    if unbatched:
        first, second, third = labelled.labels
        labelled = Labelled((first[1:], second, third[1:]), labelled.special)
    padding = call.get("padding")
    if len(kernel.shape) == 3 and not (transposed or unbatched or isinstance(padding, str)):
        first_of = [value[0] if isinstance(value, (list, tuple)) else value
                    for value in (padding, call["dilation"], call["stride"])]  # fmt: skip
        labelled = labels.windowed(labelled, first_of[0], 1 + first_of[1] * (kernel.shape[2] - 1), first_of[2])
    channel = 0 if unbatched else 1
    all_dims = tuple(range(len(call.out.shape)))
    _multiply(call, source, kernel, labelled, bias, Labelled((all_dims, (channel,), all_dims)))


@rule("attention", "scaled_dot_product_attention")
def attention(call: OpCall) -> None:
    query, key, value, mask = call["query"], call["key"], call["value"], call.get("attn_mask")
    masks = [] if mask is None else [mask]
    lead = "abcefgh"[-(len(query.shape) - 2) :] if len(query.shape) > 2 else ""

    def of(shape: tuple[int, ...], row: str, width: str) -> str:
        names = lead[len(lead) - (len(shape) - 2) :]
        held = (c if n != 1 or query.shape[lead.index(c)] == 1 else "_" for c, n in zip(names, shape, strict=False))
        return "".join(held) + row + width

    labelled = labels.attention(
        of(query.shape, "s", "d"),
        of(key.shape, "t", "d"),
        of(value.shape, "t", "v"),
        of(call.out.shape, "s", "v"),
        [m.shape for m in masks],
        causal=bool(call.get("is_causal", False)),
    )
    drops = WITH_DROPOUT if call.get("dropout_p", 0.0) > 0 else ""
    call.add("attention", [query, key, value, *masks], [call.out], labelled, drops)


@rule("contraction", "_grouped_mm")
def grouped_product(call: OpCall) -> None:
    """A grouped product: rows sorted by group, each multiplied by its group's matrix: [rows, k] · [groups, k, n]. The
    groups' borders are values, so rows are not split."""
    left, right = call.inputs[:2]
    if len(left.shape) != 2 or len(right.shape) != 3:
        call.add("opaque", call.inputs, call.outputs, labels.opaque(shapes(call.inputs), shapes(call.outputs)))
        return
    call.add("contraction", [left, right], [call.out], Labelled(((0, 1), (-1, 1, 2), (0, 2)), ((0, "whole"),)))
