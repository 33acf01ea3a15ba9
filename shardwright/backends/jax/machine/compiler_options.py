"""The compiler options under which steps on CPU devices hold no more memory than their programs ask for.

`jax.checkpoint` puts an optimization barrier before the equations that the backward pass computes again, or the
compiler would merge them with the forward, or run them early. XLA's CPU compiler takes the barriers away in the middle
of its passes (``cse_barrier_expander``), before it merges equal expressions once more and puts all in order: outside of
loops, where a body is a program of its own, next to nothing is saved then. It runs programs that still have them just
as well.

It also joins all reductions of a program into one (``cpu-all-reduce-combiner``), for which every gradient waits, with
memory for its sum beside it; other compilers join them up to a size. And it puts operations in the order that lets most
of them run at the same time, unless it is told to put them in the order that holds least. That order puts gradients of
weights off where nothing waits for them, and computes early what is to be computed again late: it is of use in a whole
step without recomputation, and not in a stage's backward pass. Loops are another matter: in the order by time, those
that are computed again all run at the beginning, and recomputing saves nothing.
"""

import os
import re
from collections.abc import Iterable

import jax

from shardwright.backends.jax.compat import orders_by_memory

DISABLED = re.compile(r"--xla_disable_hlo_passes=(\S+)")
PASSES = ("cse_barrier_expander", "cpu-all-reduce-combiner")


def on_cpu(devices: Iterable[jax.Device]) -> bool:
    """Whether XLA's CPU compiler makes the programs of such devices."""
    return all(device.platform == "cpu" for device in devices)


def compiler_options(devices: Iterable[jax.Device], *, by_memory: bool = False) -> dict[str, str]:
    """The compiler options of a program for such devices. Only CPUs have any. Passes that ``XLA_FLAGS`` disables stay
    disabled: these options would replace its list."""
    if all(device.platform != "cpu" for device in devices):
        return {}
    passes = [*DISABLED.findall(os.environ.get("XLA_FLAGS", ""))[-1:], *PASSES]
    return {"xla_disable_hlo_passes": ",".join(passes)} | (orders_by_memory() if by_memory else {})
