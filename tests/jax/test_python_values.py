"""Values of Python that a loss function reads: changed between steps, the step is that of the unsplit function."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.backends.jax.program.python_values import PythonValues
from tests.comparison import Comparison

pytestmark = pytest.mark.usefixtures("quick_compilation")

BETA = 1.0
CONFIG = {"rate": {"tau": 1.0}}
BATCH = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)


@dataclass
class Settings:
    beta: float = 1.0
    length: int = 6


class Net(nnx.Module):
    """Its temperature is an attribute, no array."""

    def __init__(self, rngs: nnx.Rngs):
        self.tau = 1.0
        self.blocks = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = x + jnp.tanh(block(x))
        return x / self.tau


def create() -> Net:
    return Net(nnx.Rngs(0))


SETTINGS = Settings()


def helper(settings: Settings, x: jax.Array) -> jax.Array:
    return settings.beta * (x**2).mean()


Loss = Callable[[Net, Any], jax.Array]


def by_global(model: Net, batch: Any) -> jax.Array:
    return BETA * (model(batch) ** 2).mean()


def by_helper(model: Net, batch: Any) -> jax.Array:
    return helper(SETTINGS, model(batch))


def by_key(model: Net, batch: Any) -> jax.Array:
    return CONFIG["rate"]["tau"] * (model(batch) ** 2).mean()


def by_length(model: Net, batch: Any) -> jax.Array:
    return (model(batch)[:, : SETTINGS.length] ** 2).mean()


class Trainer:
    def __init__(self) -> None:
        self.beta = 1.0

    def loss(self, model: Net, batch: Any) -> jax.Array:
        return self.beta * (model(batch) ** 2).mean()


def around() -> tuple[Loss, Callable[[float], None]]:
    beta = 1.0

    def loss(model: Net, batch: Any) -> jax.Array:
        return beta * (model(batch) ** 2).mean()

    def put(value: float) -> None:
        nonlocal beta
        beta = value

    return loss, put


def cases() -> dict[str, tuple[Loss, Callable[[float], None], int]]:
    """Loss, what changes it, and how many steps are compiled for four values."""
    trainer, (closure, put) = Trainer(), around()
    return {
        "global": (by_global, lambda v: globals().update(BETA=v), 2),
        "helper's attribute": (by_helper, lambda v: setattr(SETTINGS, "beta", v), 2),
        "key": (by_key, lambda v: CONFIG["rate"].update(tau=v), 2),
        "self": (trainer.loss, lambda v: setattr(trainer, "beta", v), 2),
        "variable around": (closure, put, 2),
        "length": (by_length, lambda v: setattr(SETTINGS, "length", int(v)), 4),
    }


def plan_of(pp: int, loss: Loss = by_global) -> sw.Plan:
    graph = sw.capture(nnx.eval_shape(create), BATCH, loss)
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=pp)
    return sw.plan(
        graph, cluster, batch=8, pp=pp, dp=1, tp=1, microbatch=4, precision="fp32", recompute="none", shard=0,
        virtual_stages=1, schedule="gpipe",
    )  # fmt: skip


def expected(loss: Loss, model: Net) -> tuple[float, float]:
    value, gradients = nnx.value_and_grad(loss)(model, BATCH)
    return float(value), float(optax.tree.norm(gradients))


@pytest.mark.parametrize(
    ("kind", "pp"),
    [
        *(pytest.param(kind, 1, marks=pytest.mark.slow if kind in ("self", "key") else ()) for kind in cases()),
        ("global", 2),
        pytest.param("length", 2, marks=pytest.mark.slow),
    ],
)
def test_a_value_that_changes_in_every_step(kind: str, pp: int) -> None:
    """A number becomes an input of the step; one that Python needs is compiled anew for each of its values."""
    loss, put, compiled = cases()[kind]
    put(6)
    train = sw.train_step(loss, optax.sgd(0.0), plan_of(pp), devices=jax.devices()[:pp])
    state = train.init(create)
    same = Comparison(f"{kind}, pp {pp}")
    for value in (6, 5, 4, 3, 5):
        put(value)
        same.where = f"value {value}"
        state, found = train(state, BATCH)
        wanted, norm = expected(loss, create())
        same.losses([found], [wanted])
        same.values([train.grad_norm], [norm], relative=1e-5, absolute=0.0, what="norm")
    same.require("losses", "norm")
    assert len(train._steps) == compiled
    put(1)


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_attribute_of_the_model_that_training_began_with(pp: int) -> None:
    model = create()
    train = sw.train_step(by_global, optax.sgd(0.0), plan_of(pp), devices=jax.devices()[:pp])
    state = train.init(model)
    same = Comparison(f"tau, pp {pp}")
    for tau in (1.0, 2.0, 3.0, 4.0):
        model.tau = tau
        state, found = train(state, BATCH)
        same.losses([found], [expected(by_global, model)[0]])
    same.require("losses")
    assert len(train._steps) == 2
    assert train.params(state).tau == 1.0


@pytest.mark.parametrize("pp", [1, 2])
def test_a_model_that_training_began_with_is_freed_and_its_last_attributes_stay(pp: int) -> None:
    """Each device has its own share: the whole model beside it is held by whoever gave it alone."""
    model, wanted = create(), create()
    train = sw.train_step(by_global, optax.sgd(0.0), plan_of(pp), devices=jax.devices()[:pp])
    state = train.init(model)
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    assert len(arrays) == 8
    same = Comparison(f"freed, pp {pp}")

    def compare_step(state: Any) -> Any:
        state, found = train(state, BATCH)
        same.losses([found], [expected(by_global, wanted)[0]])
        return state

    block, model.tau, wanted.tau = model.blocks[0], 2.0, 2.0
    del model
    state = compare_step(state)
    assert [array() is not None for array in arrays] == [True, True, *[False] * 6], "one block is held by the test"
    del block
    assert not any(array() is not None for array in arrays)
    state = compare_step(state)

    other = create()
    state = train.init(other)
    for other.tau in (1.0, 3.0):
        wanted.tau = other.tau
        state = compare_step(state)
    del other
    compare_step(state)
    same.require("losses")


def test_what_the_function_writes_is_refused() -> None:
    calls = SimpleNamespace(n=0)

    def counting(model: Net, batch: Any) -> jax.Array:
        calls.n += 1
        return (model(batch) ** 2).mean()

    def touching(model: Net, batch: Any) -> jax.Array:
        model.tau += 1.0
        return (model(batch) ** 2).mean()

    for loss, name in ((counting, "calls around it.n"), (touching, "tau of the model")):
        train = sw.train_step(loss, optax.sgd(0.1), plan_of(1), devices=jax.devices()[:1])
        with pytest.raises(sw.ShardwrightError, match=f"changes .*{name} while it runs.*has_aux=True"):
            train(train.init(create), BATCH)


def test_a_number_takes_the_dtype_of_what_it_meets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BETA", 1.5)
    values = PythonValues.of(by_global)
    (slot,) = (slot for slot in values.slots if slot.name == "global BETA")
    assert values.lift([slot]) == [slot]

    def run(value: Any) -> Any:
        with values.given([value]):
            return BETA * jnp.ones((2,), jnp.bfloat16)

    assert jax.eval_shape(run, values.inputs()[0]).dtype == jnp.bfloat16
    assert BETA == 1.5


class Lazy(ModuleType):
    """A module whose names are imported when they are asked for, and whose package is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"there is no package for {name}")


class Absent:
    """As MONAI stands in for such a package."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"there is no package for {name}")

    def __call__(self) -> None: ...


LAZY, ABSENT = Lazy("lazy"), Absent()


def with_absent_packages(model: Net, batch: Any) -> jax.Array:
    if BETA < 0:
        LAZY.kernel(batch)
        ABSENT.kernel(batch)
        ABSENT()
    return BETA * (model(batch) ** 2).mean()


def test_objects_that_answer_by_code_of_their_own_are_not_asked() -> None:
    assert "BETA" in " ".join(slot.name for slot in PythonValues.of(with_absent_packages).slots)
