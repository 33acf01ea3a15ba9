"""Loops over stacked weights: every iteration is a module call of its own, around those of the loop's body."""

from collections.abc import Sequence

from jax.extend.core import Jaxpr

from shardwright.backends.jax.capture.inner_programs import equations_in
from shardwright.backends.jax.capture.trace import TracedCall, call_number

UNROLL_LIMIT = 256
"""The most iterations of a scan that is unrolled. Longer scans stay one opaque op."""
ITERATION = -1
"""The number of the iteration itself among the calls of an iteration."""


def layer_loop(calls: Sequence[TracedCall], call: int) -> str:
    """The path of a further loop over stacked weights that runs in ``call``: ``scan0``, ``scan1`` … of its module."""
    stem = f"{calls[call].path}.scan".lstrip(".")
    before = {other.path.rpartition(".")[0] for other in calls if other.path.startswith(stem)}
    return f"{stem}{len(before)}"


def calls_of_iteration(
    calls: list[TracedCall],
    traced: Sequence[TracedCall],
    jaxpr: Jaxpr,
    position: int,
    call: int,
    outer: dict[int, int],
    row: str,
) -> dict[int, int]:
    """The new calls for one iteration of a loop's body, one for each that its equations name: call as traced → new
    call.

    A loop over stacked weights is a row of layers: each iteration is a call of its own, around those of its body, so
    that a cut keeps it whole. ``row`` is its path, the loop's and the number of the row that it reads (a reversed loop
    begins with the last). Of other loops (``row`` is "") the first iteration keeps its calls as ``traced``.
    """
    made: dict[int, int] = {}
    if not row and position == 0:
        return made
    if row:
        made[ITERATION] = len(calls)
        calls.append(TracedCall(row, call, 0))
    # JAX may hand back a body that it traced before, with the numbers of that time: unknown ones are left out.
    for number in sorted(mark for mark in marks(jaxpr) if mark < len(traced)):
        one = traced[number]
        moved = position == 0 and calls[number] is one
        if moved:  # its place in the list comes before the iteration around it
            calls[number] = TracedCall("", 0, 0)
        fallback = made[ITERATION] if row else outer.get(one.parent, one.parent)
        occurrence = one.occurrence if moved else sum(other.path == one.path for other in calls)
        calls.append(TracedCall(one.path, made.get(one.parent, fallback), occurrence, one.whole_kind))
        made[number] = len(calls) - 1
    return made


def marks(jaxpr: Jaxpr) -> set[int]:
    """The numbers of all calls that equations of a program, or of programs inside it, are marked with."""
    numbers = (call_number(equation.source_info.name_stack, -1) for equation in equations_in(jaxpr))
    return {number for number in numbers if number >= 0}
