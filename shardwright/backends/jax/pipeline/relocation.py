"""A compiled program on other devices of the same kind, without compiling again.

JAX's public interface serialises an executable and loads it on the devices that it was compiled for. To load it on
others, this file alone reaches behind it: it reads JAX's own serialised form with other devices in place of the first.
What it needs is looked up when it is needed; a JAX release in which that has changed compiles every program instead,
with a warning that says so.
"""

import io
import pickle
import warnings
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

Devices = tuple[jax.Device, ...]


def can_move(devices: Devices) -> bool:
    """Whether programs for such devices can be loaded on others at all. What JAX's persistent cache gives back on CPUs
    has lost functions when it is serialised again, which shows as an error when it runs."""
    caches = jax.config.values["jax_enable_compilation_cache"] and jax.config.values["jax_compilation_cache_dir"]
    return str(devices[0].platform) == "cpu" and not caches


def load_on(compiled: Any, devices: Devices, others: Devices) -> Any | None:
    """The program, compiled for ``devices``, on as many ``others``. None where it cannot be moved: on platforms other
    than CPU, for programs with callbacks or constants of their own, and under a JAX that keeps programs differently (of
    which it warns)."""
    if not can_move(devices):
        return None
    try:
        data, in_tree, out_tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, AttributeError, TypeError, pickle.PicklingError):
        return None  # with callbacks or constants of its own: not serialisable
    try:
        unloaded, arguments, no_kwargs = _reader(io.BytesIO(data), devices, others).load()
        return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)
    except (AttributeError, ImportError, TypeError) as error:
        warnings.warn(
            f"JAX {jax.__version__} keeps compiled programs in another form than the 0.10 that Shardwright knows "
            f"({error}): stages that are alike are compiled one by one, so the first step takes longer; results are "
            "the same. Use jax 0.10, or a Shardwright for this one",
            stacklevel=2,
        )
        return None


def _reader(file: io.BytesIO, devices: Devices, others: Devices) -> Any:
    """A reader of what this process has just serialised, replacing its devices."""
    from jax._src import compiler

    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(others),
        device_assignment=np.array([[device.id for device in others]]),
        backend=others[0].client,
    )

    class Moving(serialize_executable._JaxPjrtUnpickler):
        def persistent_load(self, pid: tuple[Any, ...]) -> Any:
            if pid[0] == "exec":
                return self.backend.deserialize_executable(
                    pid[1], executable_devices=self.execution_devices, compile_options=options
                )
            return super().persistent_load(pid)  # type: ignore[no-untyped-call]

    reader: Any = Moving(file, others[0].client, others)  # type: ignore[no-untyped-call]
    reader.devices_by_id = {old.id: new for old, new in zip(devices, others, strict=True)}
    return reader
