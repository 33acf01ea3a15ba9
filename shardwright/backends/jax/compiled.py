"""Compile many programs: at the same time, and each different one once.

XLA compiles for given devices. Stages that are alike lower to the same text, so the first is compiled and the others
load its executable onto their own devices, which takes a twentieth of the time.
"""

import hashlib
import io
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import compiler
from jax.experimental import serialize_executable

Devices = tuple[jax.Device, ...]


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


def load_on(compiled: Any, devices: Devices, others: Devices) -> Any | None:
    """A compiled program on other devices of the same kind; None where the platform cannot move executables.

    JAX serialises executables with the numbers of their devices, and its own reader insists on the same ones; here
    they are replaced on the way.
    """
    if devices[0].platform != "cpu":
        return None
    try:
        data, in_tree, out_tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError):  # with callbacks or constants of its own: not serialisable
        return None
    reader: Any = _Moving(io.BytesIO(data), devices, others)
    unloaded, arguments, no_kwargs = reader.load()
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)


class _Moving(serialize_executable._JaxPjrtUnpickler):
    """Reads an executable that this process has just serialised, replacing its devices."""

    def __init__(self, file: io.BytesIO, devices: Devices, others: Devices) -> None:
        super().__init__(file, others[0].client, others)  # type: ignore[no-untyped-call]
        self.devices_by_id = {old.id: new for old, new in zip(devices, others, strict=True)}
        self.options = compiler.get_compile_options(
            num_replicas=1,
            num_partitions=len(others),
            device_assignment=np.array([[device.id for device in others]]),
            backend=others[0].client,
        )

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        if pid[0] == "exec":
            return self.backend.deserialize_executable(
                pid[1], executable_devices=self.execution_devices, compile_options=self.options
            )
        return super().persistent_load(pid)  # type: ignore[no-untyped-call]
