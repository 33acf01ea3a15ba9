"""The overloads of torch's ops: the contents of their schemas, and their arguments by name."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.backends.torch.capture.ops import RULES, Ref
from shardwright.backends.torch.capture.ops.template import Rule

PASSING = frozenset({"detach", "alias", "lift", "lift_fresh", "lift_fresh_copy", "view_of", "set_data"})
"""Ops that hand their input on: same memory, same values."""
SILENT = frozenset({"detach_", "requires_grad_", "retain_grad", "_version", "set_", "resize_", "_assert_async"})
"""Ops that neither make nor change a value that the graph names."""


class Func:
    """The properties of one overload of an op, read once from its schema, its tags and the table."""

    __slots__ = (
        "composite", "creates", "draws", "name", "passing", "pointwise", "reads", "reshapes", "rule", "schema",
        "silent", "views", "writes",
    )  # fmt: skip

    def __init__(self, func: Any) -> None:
        self.schema = schema = func._schema
        namespace, _, base = schema.name.partition("::")
        self.name = f"{namespace}.{base}"
        known = RULES.get(base) or (RULES.get(base[:-1]) if base.endswith("_") else None)
        self.rule: Rule | None = known[1] if known and namespace == "aten" else None
        self.creates = known is not None and known[0] == "create" and namespace == "aten"
        self.pointwise = torch.Tag.pointwise in func.tags
        self.reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        self.draws = torch.Tag.nondeterministic_seeded in func.tags
        self.reshapes = torch.Tag.inplace_view in func.tags
        self.passing = base in PASSING
        self.silent = base in SILENT or namespace == "prim"
        infos = [a.alias_info for a in schema.arguments]
        self.writes = tuple(
            a.name for a, i in zip(schema.arguments, infos, strict=True) if i is not None and i.is_write
        )
        self.views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        self.composite = not self.silent and not self.passing and func._can_decompose()


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def ref_of(number: int, tensor: torch.Tensor) -> Ref:
    """A tensor of an op, by its place among the op's tensors."""
    return Ref(number, tuple(tensor.shape), dtype_name(tensor.dtype))


def key_of(value: Any, inputs: list[torch.Tensor]) -> Any:
    """A hashable form of an argument; its tensors are appended to ``inputs``."""
    if isinstance(value, torch.Tensor):
        inputs.append(value)
        return value.shape, value.dtype
    if isinstance(value, (list, tuple)):
        return tuple([key_of(item, inputs) for item in value])
    return value if value.__hash__ is not None else repr(value)


def by_name(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an op by the names of its schema, defaults filled in."""
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return defaults | {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)


def bind(known: Func, args: tuple[Any, ...], kwargs: dict[str, Any], refs: Sequence[Ref]) -> dict[str, Any]:
    """Arguments by name, defaults filled in, Refs in place of tensors in the order in which `key_of` met them."""
    remaining = iter(refs)

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(remaining)
        if isinstance(value, (list, tuple)):
            return [replaced(item) for item in value]
        return value

    given = [replaced(value) for value in args]
    named = {name: replaced(value) for name, value in kwargs.items() if name not in known.writes}
    return by_name(known.schema, given, named)
