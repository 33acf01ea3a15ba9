"""Compile many programs: at the same time, and each different one once.

XLA compiles for given devices. Stages that are alike lower to the same text, so the first is compiled and the others
load its executable onto their own devices, which takes a twentieth of the time.
"""

import hashlib
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from shardwright.backends.jax.moved import Devices, load_on


@dataclass(slots=True)
class Compilation:
    """What `compile_all` did: programs asked for, and those that were compiled rather than loaded again."""

    programs: int = 0
    compiled: int = 0


def compile_all(
    lowered: Sequence[jax.stages.Lowered], devices: Sequence[Devices], done: Compilation | None = None
) -> list[Any]:
    """Compile programs, each for its devices; the same text on devices of the same number is compiled once."""
    alike: dict[tuple[str, int], list[int]] = {}
    for index, (program, own) in enumerate(zip(lowered, devices, strict=True)):
        digest = hashlib.sha256(program.as_text().encode()).hexdigest()
        alike.setdefault((digest, len(own)), []).append(index)
    found: list[Any] = [None] * len(lowered)

    def compile_group(members: list[int]) -> int:
        first, *others = members
        found[first] = lowered[first].compile()
        again = 1
        for index in others:
            loaded = load_on(found[first], devices[first], devices[index]) if devices[index] != devices[first] else None
            if loaded is None and devices[index] == devices[first]:
                loaded = found[first]
            if loaded is None:
                loaded, again = lowered[index].compile(), again + 1
            found[index] = loaded
        return again

    # Traces on CPU are made under the interpreter's lock, compilations are not.
    with ThreadPoolExecutor(max(1, min(len(alike), os.cpu_count() or 1))) as pool:
        counts = list(pool.map(compile_group, alike.values()))
    if done is not None:
        done.programs += len(lowered)
        done.compiled += sum(counts)
    return found


def lower(
    function: Any, avals: Sequence[Any], in_shardings: Any, out_shardings: Any, donate: tuple[int, ...]
) -> jax.stages.Lowered:
    """Lower a function of flat arguments. Donated arguments that match no result are freed instead of reused, which
    JAX would warn of."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        jitted = jax.jit(function, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=donate)
        return jitted.lower(*avals)
