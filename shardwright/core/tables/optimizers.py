"""Optimizers by name: the states that they keep, and what they make for a while as they update.

Counted from `torch.optim` 2.13, with its defaults and no weight decay but AdamW's own, and held against its MemTracker
in `tests/torch/test_memory.py`. In a loop over parameters, as torch does by default on CPUs, an optimizer makes values
as large as the parameter, of which the last are still there while the next parameter is updated. Over all of them at
once (``foreach``, the default on GPUs) these values are as large as all parameters. Fused updates make none. Weight
decay that is added to gradients, as SGD's and Adam's, is not counted: it takes one more value of the parameter in the
loop, and up to one of all parameters at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardwright.core.cost.op_kinds import PRECISION_BYTES
from shardwright.core.errors import PlanError, nearest


@dataclass(frozen=True, slots=True)
class Optimizer:
    """One kind of optimizer.

    Attributes:
        states: the number of fp32 values that it keeps for each parameter entry.
        loop: moments of its loop: the values of the parameter before that are there, and those of its own.
        together: the values of every parameter where it updates all at once.
        of_largest: the values of the largest parameter beside these.
    """

    states: int
    loop: tuple[tuple[int, int], ...] = ()
    together: float = 0.0
    of_largest: float = 0.0


_ROOTED = ((1, 2),)
"""The quotient of the parameter before; the root of the second moment, and the quotient."""
OPTIMIZERS = {
    "sgd": Optimizer(0),
    "momentum": Optimizer(1),
    "nesterov": Optimizer(1, ((0, 1),)),
    "lion": Optimizer(1),
    "adam": Optimizer(2, _ROOTED, 1.0),
    "adamw": Optimizer(2, _ROOTED, 1.0),
    "amsgrad": Optimizer(3, _ROOTED, 1.0),
    "nadam": Optimizer(2, _ROOTED, 1.0),
    "radam": Optimizer(2, ((0, 5),), 1.0),
    "adamax": Optimizer(2, ((0, 1),), 1.0),
    "adagrad": Optimizer(1, ((1, 1),), 2.0),
    "adadelta": Optimizer(2, ((1, 2), (2, 1)), 2.0),
    "rmsprop": Optimizer(1, ((1, 1),), 1.0),
    "rprop": Optimizer(2, ((0, 3),), 1.0, 1.25),
    "asgd": Optimizer(1, (), 1.0),
}
"""By the name that plans have for them; ``lion`` is none of torch's, and is counted as if it made nothing."""


def optimizer_of(name: str) -> Optimizer:
    """The optimizer of a name. Raises PlanError for one that is not known."""
    if name not in OPTIMIZERS:
        raise PlanError(f"the states of optimizer {name!r} are not known: {nearest(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def update_bytes(sizes: Sequence[int], optimizer: str, *, together: bool) -> int:
    """The bytes that an optimizer makes for a while as it updates parameters of these sizes, in its order, in entries:
    in a loop, or ``together``."""
    made = optimizer_of(optimizer)
    if together:
        entries = made.together * sum(sizes) + made.of_largest * max(sizes, default=0)
    else:
        rows = pairwise((0, *sizes))
        entries = max((a * before + b * own for before, own in rows for a, b in made.loop), default=0)
    return PRECISION_BYTES["fp32"] * int(entries)
