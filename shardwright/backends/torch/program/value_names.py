"""Names of a program's values that are the same on every rank, whatever the order in which it met them.

Models loop over Python sets of strings, whose order differs from process to process. Then the same steps are recorded
in another order, with other numbers. The origin of a value does not change.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from shardwright.backends.torch.program.program import Leaf, Literal, NumberRef, Program, Step, ValueRef, name_of

_SPOKEN = (int, float, complex, str, bytes, bool, type(None))


def value_names(program: Program) -> tuple[str, ...]:
    """The names of all values, each a hash of the value's origin: values that are made in the same way have the same
    name."""
    names = [f"input {value.input}" for value in program.values]
    for step in program.steps:
        base = _hashed(step, names)
        for position, value in enumerate(step.outputs):
            if value is not None:
                names[value] = f"{base} {position}"
        for number, (_, outputs) in enumerate(step.object_outputs):
            for position, value in enumerate(outputs):
                if value is not None:
                    names[value] = f"{base} {number} {position}"
        for new, old in step.renewals:
            names[new] = f"{base} writes {names[old]}"
    return tuple(names)


def text_of(program: Program) -> str:
    """A text that two ranks share when they recorded the same program."""
    names = value_names(program)
    lines = [f"{name} {v.shape} {v.dtype} {v.requires_grad}" for name, v in zip(names, program.values, strict=True)]
    lines += [f"reads {name_of(g.function)} {sorted(names[v] for v in g.reads)} {g.found}" for g in program.guards]
    losses = [f"loss {names[loss.value]} {loss.reduction}" for loss in program.losses]
    results = [_leaf(leaf, names) for leaf in program.result.leaves]
    return "\n".join([*sorted(lines), *losses, *results])


def _hashed(step: Step, names: Sequence[str]) -> str:
    arguments = sorted(_leaf(leaf, names) for leaf in step.arguments.leaves)
    reads = sorted(names[v] for v in step.reads)
    # How often a module was called before is a matter of order too.
    name = name_of(step.function) if step.path is None else f"module {step.path}"
    drawn = sorted({path for path, _, _ in step.random})
    text = f"{name} {arguments} {reads} {len(step.outputs)} {step.grad_enabled} {step.autocast} {drawn}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _leaf(leaf: Leaf, names: Sequence[str]) -> str:
    if isinstance(leaf, ValueRef):
        return names[leaf.value]
    if isinstance(leaf, Literal):
        return repr(leaf.value) if isinstance(leaf.value, _SPOKEN) else type(leaf.value).__name__
    if isinstance(leaf, NumberRef):
        return repr(leaf.expression)
    name: Any = getattr(leaf, "name", "")
    return f"{type(leaf).__name__} {name}"
