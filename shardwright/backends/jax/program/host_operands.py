"""Equations whose operands are partly on the host, and come to the device while others run.

A compiler for GPUs begins every copy as soon as its operand is there. In the backward of a stage all operands are there
from the start, so that what the forward sent to the host would come back at once. Here a copy waits, by an optimization
barrier, for a result of the equations before those that read an operand so many before it.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import jax

from shardwright.backends.jax.program.equations import Equation, evaluate
from shardwright.backends.jax.program.in_turn import is_array, when_read


def evaluate_from_host(
    equations: Sequence[Equation],
    known: dict[int, Any],
    on_host: Mapping[int, jax.Array],
    ahead: int,
    cheap: Collection[str] = (),
) -> None:
    """Run equations as `evaluate` does.

    Args:
        cheap: the primitives that, read from operands alone, run when another equation first reads their result.
        on_host: the operands on the host, by value.
        ahead: how many of them come to the device before the one that is read, in the order in which they are
            read. At least 1.
    """
    ordered = when_read(equations, {*known, *on_host}, cheap)
    blocks = [list(group) for _, group in groupby(ordered, key=lambda e: id(e.region) if e.region else id(e))]
    read_in: dict[int, int] = {}
    for number, block in enumerate(blocks):
        for equation in block:
            for value in equation.values:
                if value in on_host:
                    read_in.setdefault(value, number)
    waiting = deque(read_in)
    latest: jax.Array | None = None

    def bring() -> None:
        if waiting:
            value = waiting.popleft()
            array = on_host[value]
            if latest is not None:
                array, _ = jax.lax.optimization_barrier((array, latest))
            known[value] = jax.device_put(array, jax.memory.Space.Device)

    for _ in range(ahead):
        bring()
    due = deque(read_in.items())
    for number, block in enumerate(blocks):
        while due and due[0][1] == number:
            due.popleft()
            bring()
        evaluate(block, known)
        made = [known[value] for equation in block for value in equation.outputs if is_array(known[value])]
        latest = made[-1] if made else latest
