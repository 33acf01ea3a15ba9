"""The private names of JAX that this backend leans on, all of them here, and the fallback where one is gone.

Each is looked up when it is first asked for, and tried; a JAX that keeps it differently (0.10 is known) does without
it, slower, with the same results.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import NamedSharding

Copy = Callable[[Sequence[Any], Sequence[NamedSharding]], list[Any]]


@cache
def direct_copy() -> Copy | None:
    """A function that copies arrays to shardings that split them as their own do, on other devices; not for deleted
    arrays. `jax.device_put` ends in it. None where JAX does not have it."""
    try:
        client = import_module("jax._src.lib").xla_client
        copy, reuse = client.batched_copy_array_to_devices_with_sharding, client.ArrayCopySemantics.REUSE_INPUT

        def run(arrays: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
            made: list[Any] = copy(arrays, [at._internal_device_list for at in targets], targets, [reuse] * len(arrays))
            return made

        devices = jax.local_devices()
        here, there = (
            NamedSharding(jax.sharding.Mesh([device], "all"), jax.sharding.PartitionSpec())
            for device in (devices[0], devices[-1])
        )
        (found,) = run([jax.device_put(7, here)], [there])
        return run if int(found) == 7 and found.sharding == there else None
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):  # JAX's own errors are the last
        return None


@cache
def orders_by_memory() -> dict[str, str]:
    """The option by which XLA's CPU compiler puts operations in the order that holds the least memory. Empty where the
    compiler does not know it: then a step may hold more than its plan says."""
    option = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    try:
        jax.jit(lambda: 0, compiler_options=option).lower().compile()
        return option
    except (RuntimeError, ValueError):  # JAX's own errors are the first
        return {}


@cache
def weak_type() -> Callable[[Any], Any] | None:
    """A function that makes a number give way to the dtypes it meets, as Python's own numbers do. None where JAX does
    not have it: then numbers that change are compiled in."""
    try:
        convert = import_module("jax._src.lax.lax")._convert_element_type
        made = jax.eval_shape(
            lambda x: convert(x, weak_type=True) * jax.numpy.ones((), jax.numpy.bfloat16), np.float32(1)
        )
        return partial(convert, weak_type=True) if made.dtype == jax.numpy.bfloat16 else None
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def reader_on(file: Any, devices: Sequence[jax.Device], others: Sequence[jax.Device]) -> Any:
    """A reader of what this process has just serialised for ``devices``, which loads it on ``others``. Raises
    AttributeError, ImportError or TypeError under a JAX that keeps compiled programs in another form."""
    options = import_module("jax._src.compiler").get_compile_options(
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


class _KeyValueService:
    """The key-value service of a run of several processes."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value)

    def get(self, key: str, wait_s: float) -> str | None:
        """The value, as soon as a process has set it; None where none has within the time."""
        try:
            found: str = self._client.blocking_key_value_get(key, int(1000 * wait_s))
            return found
        except RuntimeError as failed:  # JAX's own errors
            if "DEADLINE_EXCEEDED" in str(failed):
                return None
            raise


def key_value_service() -> _KeyValueService | None:
    """The service of the run's coordinator. None before `jax.distributed.initialize`, or where JAX has none."""
    try:
        client = import_module("jax._src.distributed").global_state.client
        return None if client is None else _KeyValueService(client)
    except (ImportError, AttributeError):
        return None
