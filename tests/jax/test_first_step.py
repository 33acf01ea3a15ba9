"""The first step of a pipeline: it begins with the programs that are there, and an error in it ends the compiling of
the others and leaves nothing behind."""

import os
import threading
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import SingleDeviceSharding

import shardwright.jax as sw
from shardwright.backends.jax.pipeline import compilation as compiled
from shardwright.backends.jax.pipeline import multi_mesh as placed
from shardwright.backends.jax.pipeline.actions import Pipeline
from shardwright.backends.jax.pipeline.compilation import Compiler, lower
from shardwright.backends.jax.pipeline.stage_programs import StagePrograms
from shardwright.core.model.graph import Graph
from tests.jax.chains import batches, graph_of, loss_fn, maker, module_reference, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

LIMIT_S = 60.0
create = maker(2)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(create)


def trained(graph: Graph, pp: int = 2, dp: int = 1, **pins: Any) -> tuple[sw.TrainStep, sw.TrainState]:
    train = sw.train_step(loss_fn, optax.sgd(0.1), plan_of(graph, pp, dp, **pins), devices=jax.devices()[: pp * dp])
    return train, train.init(create)


@pytest.fixture(scope="module")
def expected() -> float:
    return module_reference(loss_fn, create, optax.sgd(0.1), batches(1)).losses[0]


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_wait" in thread.name]


@pytest.mark.parametrize("dp", [1, 2])
def test_it_begins_before_everything_is_compiled(
    graph: Graph, expected: float, dp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update's programs are compiled only once an action has run."""
    train, state = trained(graph, dp=dp)
    begun, made_to_wait = threading.Event(), []
    compile_, act = jax.stages.Lowered.compile, Pipeline._act
    of_update: list[jax.stages.Lowered] = []

    def lowering(*given: Any, **also: Any) -> jax.stages.Lowered:
        of_update.append(lower(*given, **also))
        return of_update[-1]

    def compiling(self: jax.stages.Lowered) -> jax.stages.Compiled:
        if any(self is one for one in of_update):
            made_to_wait.append(begun.wait(LIMIT_S))
        return compile_(self)

    def acting(self: Pipeline, *given: Any) -> None:
        act(self, *given)
        begun.set()

    monkeypatch.setattr(placed, "lower", lowering)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    monkeypatch.setattr(Pipeline, "_act", acting)
    _, loss = train(state, batches(1)[0])
    assert made_to_wait
    assert all(made_to_wait)
    assert train.pipeline.is_compiled
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_stages_of_several_devices_do_not_wait_for_all_forwards(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage's forward is compiled once the first stage's has run."""
    train, state = trained(graph, dp=2)
    begun, made_to_wait = threading.Event(), []
    start, act = StagePrograms._lower, Pipeline._act
    compile_ = jax.stages.Lowered.compile
    last: list[jax.stages.Lowered] = []

    def lowering(self: StagePrograms, stage: int, function: Any) -> jax.stages.Lowered:
        lowered = start(self, stage, function)
        if stage == 1 and not last:
            last.append(lowered)
        return lowered

    def compiling(self: jax.stages.Lowered) -> jax.stages.Compiled:
        if any(self is one for one in last):
            made_to_wait.append(begun.wait(LIMIT_S))
        return compile_(self)

    def acting(self: Pipeline, *given: Any) -> None:
        act(self, *given)
        begun.set()

    monkeypatch.setattr(StagePrograms, "_lower", lowering)
    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    monkeypatch.setattr(Pipeline, "_act", acting)
    train(state, batches(1)[0])
    assert made_to_wait == [True]


def test_what_waits_to_be_compiled_is_dropped_on_an_interrupt(
    graph: Graph, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same call again compiles and trains."""
    train, state = trained(graph)
    compile_, tried, going_on = jax.stages.Lowered.compile, [], threading.Event()

    def compiling(self: jax.stages.Lowered) -> jax.stages.Compiled:
        tried.append(self)
        if len(tried) > 1:
            going_on.wait(LIMIT_S)
        return compile_(self)

    interrupted_in: list[Pipeline] = []

    def interrupted(self: Pipeline, *_: Any) -> None:
        interrupted_in.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "cpu_count", lambda: 1)
        patch.setattr(jax.stages.Lowered, "compile", compiling)
        patch.setattr(Pipeline, "_act", interrupted)
        patch.setattr(Pipeline, "_begin", lambda *_: [])
        with pytest.raises(KeyboardInterrupt):
            train(state, batches(1)[0])
        going_on.set()
        interrupted_in[0]._compiler._pool.shutdown(wait=True)
    assert len(tried) <= 2
    assert train.compiled is None
    _, loss = train(state, batches(1)[0])
    assert float(loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ask", ["__call__", "measure", "memory_bytes"])
def test_a_step_that_failed_to_compile_is_compiled_again(
    graph: Graph, expected: float, ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, state = trained(graph)
    (batch,) = batches(1)

    def fail(self: jax.stages.Lowered) -> None:
        raise RuntimeError("no memory left to compile")

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", fail)
        with pytest.raises(RuntimeError, match="no memory left"):
            getattr(train, ask)(state, batch)
    assert not watchers()
    _, loss = train(state, batch)
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_an_error_in_a_step_that_is_compiled_compiles_nothing_again(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, state = trained(graph)
    (batch,) = batches(1)
    state, _ = train(state, batch)
    before = train.pipeline

    def interrupted(self: Pipeline, *_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Pipeline, "_act", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train.measure(state, batch)
    assert not watchers() or all(not one.join(LIMIT_S) and not one.is_alive() for one in watchers())
    train(state, batch)
    assert train.pipeline is before


def test_nothing_is_compiled_while_a_step_is_measured(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    train, state = trained(graph)
    act, compiled_then = Pipeline._act, []

    def acting(self: Pipeline, *given: Any) -> None:
        compiled_then.append(self.is_compiled)
        act(self, *given)

    monkeypatch.setattr(Pipeline, "_act", acting)
    train.measure(state, batches(1)[0])
    assert compiled_then
    assert all(compiled_then)


def test_another_length_is_another_step(graph: Graph) -> None:
    train, state = trained(graph)
    (batch,) = batches(1)
    longer = {name: np.concatenate([value, value[:, :3]], axis=1) for name, value in batch.items()}
    alone = sw.train_step(loss_fn, optax.sgd(0.1), plan_of(graph, 1), devices=jax.devices()[:1])
    other = alone.init(create)
    for given in (batch, longer, batch):
        state, loss = train(state, given)
        other, same = alone(other, given)
        assert float(loss) == pytest.approx(float(same), rel=1e-5)
    assert len(train._steps) == 2


def test_steps_after_the_first_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a JAX whose programs cannot be loaded on other devices, too."""
    monkeypatch.setattr(compiled, "load_on", lambda *given: None)

    def init() -> list[jax.Array]:
        return [jax.random.normal(jax.random.key(number), (4, 4)) for number in range(3)]

    def loss(params: list[jax.Array], batch: jax.Array) -> jax.Array:
        for weight in params:
            batch = jnp.tanh(batch @ weight)
        return (batch**2).mean()

    batch = np.ones((4, 4), np.float32)
    graph = sw.capture(loss, (jax.eval_shape(init), batch))
    train = sw.train_step(loss, optax.sgd(0.1), plan_of(graph, 3, batch=4), devices=jax.devices()[:3])
    state, counts = train.init(init()), []
    for _ in range(3):
        state, _ = train(state, batch)
        counts.append(train.compiled.compiled)
    assert counts == [counts[0]] * 3


# --- the compiler


def doubled(device: jax.Device) -> jax.stages.Lowered:
    at = SingleDeviceSharding(device)
    return lower(lambda x: (x * 2,), (jax.ShapeDtypeStruct((8,), jnp.float32),), (at,), (at,), ())


def test_nothing_is_loaded_by_who_starts_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt there would be taken for the program's own error."""
    loaders, load_on = [], compiled.load_on

    def loading(*given: Any) -> Any:
        loaders.append(threading.current_thread())
        return load_on(*given)

    monkeypatch.setattr(compiled, "load_on", loading)
    first, second = jax.devices()[:2]
    with Compiler() as compiler:
        compiler.start(partial(doubled, first), (first,))()
        found = compiler.start(partial(doubled, second), (second,))()
    assert len(loaders) == 1
    assert threading.current_thread() not in loaders
    assert found(jax.device_put(jnp.ones(8), second))[0].devices() == {second}


def test_programs_that_cannot_be_loaded_are_compiled_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "can_move", lambda devices: False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    compile_, together = jax.stages.Lowered.compile, threading.Barrier(2)

    def compiling(self: jax.stages.Lowered) -> jax.stages.Compiled:
        together.wait(LIMIT_S)
        return compile_(self)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    devices = jax.devices()[:2]
    with Compiler() as compiler:
        waiting = [compiler.start(partial(doubled, device), (device,)) for device in devices]
        for wait in waiting:
            wait()
    assert (compiler.done.programs, compiler.done.compiled) == (2, 2)
