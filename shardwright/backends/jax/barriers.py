"""Optimization barriers that hold to the end of a compilation, so that what is computed again really is.

`jax.checkpoint` puts a barrier before what the backward pass computes again, or the compiler would merge that with the
forward, or run it early. XLA's CPU compiler takes the barriers away in the middle of its passes
(``cse_barrier_expander``), before it merges equal expressions once more and puts all in order: outside of loops, where
a body is a program of its own, next to nothing is saved then. It runs programs that still have them just as well.
"""

import os
import re
from collections.abc import Iterable

import jax

DISABLED = re.compile(r"--xla_disable_hlo_passes=(\S+)")


def keeping_barriers(devices: Iterable[jax.Device]) -> dict[str, str]:
    """The compiler options of a program for such devices: none but on CPUs, as other compilers keep barriers. Passes
    that ``XLA_FLAGS`` disables stay so: these options would replace its list."""
    if all(device.platform != "cpu" for device in devices):
        return {}
    passes = [*DISABLED.findall(os.environ.get("XLA_FLAGS", ""))[-1:], "cse_barrier_expander"]
    return {"xla_disable_hlo_passes": ",".join(passes)}
