"""The values that units keep for the backward pass, those that it computes again, and options that make XLA obey.

`jax.checkpoint` puts an optimization barrier before the equations that the backward pass computes again, or the
compiler would merge them with the forward, or run them early. XLA's CPU compiler takes the barriers away in the middle
of its passes (``cse_barrier_expander``), before it merges equal expressions once more and puts all in order: outside of
loops, where a body is a program of its own, next to nothing is saved then. It runs programs that still have them just
as well.
"""

import os
import re
from collections.abc import Iterable
from typing import Any

import jax

from shardwright.core.plan.plan import Plan

POLICIES: dict[str, Any] = {"full": None, "selective": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
"""The values that a unit keeps beside what enters it. "full" recomputation keeps none. "selective" recomputation keeps
products with weights and computes products of activations with activations (attention) again (arXiv 2205.05198, section
5)."""
DISABLED = re.compile(r"--xla_disable_hlo_passes=(\S+)")


def computed_again(plan: Plan) -> tuple[int, ...]:
    """The units of which the backward pass computes something again: under selective recomputation any may be."""
    every = tuple(range(len(plan.model.unit_classes)))
    return every if plan.decision.recompute == "selective" else plan.recomputed_units


def keeping_barriers(devices: Iterable[jax.Device]) -> dict[str, str]:
    """The compiler options of a program for such devices. Only CPUs have any, as other compilers keep barriers. Passes
    that ``XLA_FLAGS`` disables stay disabled: these options would replace its list."""
    if all(device.platform != "cpu" for device in devices):
        return {}
    passes = [*DISABLED.findall(os.environ.get("XLA_FLAGS", ""))[-1:], "cse_barrier_expander"]
    return {"xla_disable_hlo_passes": ",".join(passes)}
