"""A compiled program on other devices of the same kind, without compiling again.

JAX's public interface serialises an executable and loads it on the devices that it was compiled for. To load it on
others, JAX's own serialised form is read with other devices in place of the first (`compat.reader_on`); a JAX release
in which that has changed compiles every program instead, with a warning that says so.
"""

import io
import pickle
import warnings

import jax
from jax.experimental import serialize_executable

from shardwright.backends.jax.compat import reader_on
from shardwright.backends.jax.machine.process_transfers import several_processes

Devices = tuple[jax.Device, ...]


def can_move(devices: Devices) -> bool:
    """Whether programs for such devices can be loaded on others at all, which those of several processes cannot. A
    program that JAX's persistent cache gives back on CPUs has lost functions when it is serialised again, which shows
    as an error when it runs."""
    caches = jax.config.values["jax_enable_compilation_cache"] and jax.config.values["jax_compilation_cache_dir"]
    return str(devices[0].platform) == "cpu" and not caches and not several_processes(devices)


def load_on(compiled: jax.stages.Compiled, devices: Devices, others: Devices) -> jax.stages.Compiled | None:
    """The program, compiled for ``devices``, on as many ``others``. None where it cannot be moved: on platforms other
    than CPU, for programs with callbacks or constants of their own, and under a JAX that keeps programs differently (of
    which it warns)."""
    if not (can_move(devices) and can_move(others)):
        return None
    try:
        data, in_tree, out_tree = serialize_executable.serialize(compiled)
    except (ValueError, NotImplementedError, AttributeError, TypeError, pickle.PicklingError):
        return None  # with callbacks or constants of its own: not serialisable
    try:
        unloaded, arguments, no_kwargs = reader_on(io.BytesIO(data), devices, others).load()
        return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)
    except (AttributeError, ImportError, TypeError) as error:
        warnings.warn(
            f"JAX {jax.__version__} keeps compiled programs in another form than the 0.10 that Shardwright knows "
            f"({error}): stages that are alike are compiled one by one, so the first step takes longer; results are "
            "the same. Use jax 0.10, or a Shardwright for this one",
            stacklevel=2,
        )
        return None
