"""Programs that are alike are compiled once, and moved to the devices of the others."""

import gc
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import SingleDeviceSharding

from shardwright.backends.jax.pipeline import compilation as compiled
from shardwright.backends.jax.pipeline.compilation import Compiler, lower, uncollected
from shardwright.backends.jax.pipeline.relocation import load_on
from tests.comparison import Comparison


def lowered(device: jax.Device) -> jax.stages.Lowered:
    at = SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    return lower(lambda x, y: (jnp.tanh(x @ y),), (shape, shape), (at, at), (at,), ())


def test_programs_that_are_alike_are_compiled_once() -> None:
    devices = jax.devices()[:3]
    with Compiler() as compiler:
        waiting = [compiler.start(partial(lowered, device), (device,)) for device in devices]
        runs = [wait() for wait in waiting]
    assert (compiler.done.programs, compiler.done.compiled) == (3, 1)
    x = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
    for device, run in zip(devices, runs, strict=True):
        (found,) = run(*jax.device_put([x, x], device))
        assert found.devices() == {device}
        Comparison().values(found, np.tanh(x @ x), relative=1e-5, absolute=0.0).require()


def test_a_jax_that_keeps_programs_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every program is compiled by itself, with the same results."""
    monkeypatch.delattr(serialize_executable, "_JaxPjrtUnpickler")
    devices = jax.devices()[:2]
    message = rf"JAX {jax.__version__} .*_JaxPjrtUnpickler.*one by one.*[Uu]se jax 0\.10"
    with Compiler() as compiler, pytest.warns(UserWarning, match=message):  # a thread may warn as soon as it starts
        runs = [wait() for wait in [compiler.start(partial(lowered, device), (device,)) for device in devices]]
    assert (compiler.done.programs, compiler.done.compiled) == (2, 2)
    (found,) = runs[1](*jax.device_put([jnp.eye(4), jnp.eye(4)], devices[1]))
    assert found.devices() == {devices[1]}


def test_programs_from_jaxs_persistent_cache_run_on_every_device(tmp_path: Path) -> None:
    """Serialised again, they would have lost functions; so each is compiled, or found in the cache, by itself."""
    named = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in named}
    compilation_cache.reset_cache()
    for name, value in zip(named, (str(tmp_path), 0), strict=True):
        jax.config.update(name, value)
    devices, shape = jax.devices()[:2], jax.ShapeDtypeStruct((16, 16), jnp.float32)
    x = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
    try:
        for _ in range(2):  # the second time from the cache
            with Compiler() as compiler:
                waiting = []
                for device in devices:
                    at = SingleDeviceSharding(device)
                    program = partial(
                        lower, lambda x: (jax.nn.softmax(jax.nn.softmax(x @ x) @ x),), (shape,), (at,), (at,), ()
                    )
                    waiting.append(compiler.start(program, (device,)))
                runs = [wait() for wait in waiting]
            for device, run in zip(devices, runs, strict=True):
                (found,) = run(jax.device_put(x, device))
                wanted = jax.nn.softmax(jax.nn.softmax(x @ x) @ x)
                Comparison().values(found, wanted, relative=1e-5, absolute=0.0).require()
        assert list(tmp_path.iterdir()), "nothing was cached"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_a_program_with_a_callback_stays_where_it_is() -> None:
    device, other = jax.devices()[:2]
    at = SingleDeviceSharding(device)
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    run = lower(lambda x: (jax.pure_callback(np.sin, shape, x),), (shape,), (at,), (at,), ()).compile()
    assert load_on(run, (device,), (other,)) is None


def test_programs_with_callbacks_each_have_their_own() -> None:
    """Two stages of one device may differ in nothing else, and what a callback does is not in the program's text."""
    device, seen = jax.devices()[0], []
    at = SingleDeviceSharding(device)

    def program(number: int) -> jax.stages.Lowered:
        def run(x: jax.Array) -> tuple[jax.Array]:
            jax.debug.callback(lambda _: seen.append(number), x)
            return (x + 1,)

        return lower(run, (jax.ShapeDtypeStruct((), jnp.float32),), (at,), (at,), ())

    with Compiler() as compiler:
        waiting = [compiler.start(partial(program, number), (device,)) for number in range(2)]
        for wait in waiting:
            jax.block_until_ready(wait()(jnp.float32(0)))
    jax.effects_barrier()
    assert seen == [0, 1]


def test_alike_programs_with_callbacks_are_compiled_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cannot be loaded on other devices: none waits for another to be compiled."""
    devices, compile_, compiling = jax.devices()[:3], jax.stages.Lowered.compile, []
    shape = jax.ShapeDtypeStruct((), jnp.float32)

    def function(x: jax.Array) -> tuple[jax.Array]:
        return (jax.pure_callback(np.cos, shape, x),)

    def program(device: jax.Device) -> jax.stages.Lowered:
        at = SingleDeviceSharding(device)
        return lower(function, (shape,), (at,), (at,), ())

    def seen(self: jax.stages.Lowered) -> jax.stages.Compiled:
        compiling.append(threading.current_thread())
        return compile_(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", seen)
    with Compiler() as compiler:
        waiting = [compiler.start(partial(program, device), (device,), "cosine") for device in devices]
        runs = [wait() for wait in waiting]
    assert (compiler.done.programs, compiler.done.compiled, len(compiling)) == (3, 3, 3)
    assert threading.current_thread() not in compiling
    for device, run in zip(devices, runs, strict=True):
        (found,) = run(jax.device_put(jnp.float32(2), device))
        assert found.devices() == {device}
        Comparison().values(found, np.cos(2), relative=1e-6, absolute=0.0).require()


def test_a_program_that_cannot_be_loaded_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it is asked for, as zeros are in every step."""
    monkeypatch.setattr(compiled, "load_on", lambda *given: None)
    devices, made = jax.devices()[:2], []

    def lowering(device: jax.Device) -> jax.stages.Lowered:
        made.append(device)
        return lowered(device)

    with Compiler() as compiler:
        waiting = [compiler.start(partial(lowering, device), (device,), "alike") for device in devices]
        runs = [[wait() for wait in waiting] for _ in range(3)]
    assert made == devices
    assert (compiler.done.programs, compiler.done.compiled) == (2, 2)
    assert all(again[1] is runs[0][1] for again in runs)


def test_a_program_that_does_not_compile_is_told_to_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every call, the program's own error; programs that would be loaded from it say the same."""

    def refuse(self: jax.stages.Lowered) -> None:
        raise RuntimeError("out of registers")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with Compiler() as compiler:
        waiting = [compiler.start(partial(lowered, device), (device,)) for device in jax.devices()[:2]]
    for wait in 2 * waiting:
        with pytest.raises(RuntimeError, match="out of registers"):
            wait()


@pytest.mark.parametrize("enabled", [True, False])
def test_tracing_leaves_the_collector_as_it_was(enabled: bool) -> None:
    def fail() -> None:
        with uncollected():
            assert not gc.isenabled()
            raise ZeroDivisionError

    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ZeroDivisionError):
            fail()
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
