"""Units whose activations are on the host from forward to backward, and units that keep the results of products."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright.jax as sw
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.schedule.actions import Kind
from tests.comparison import Comparison
from tests.jax.chains import plan_of, reference
from tests.jax.test_recompute import BATCH, CASES, LAYERS, MICROBATCH, WIDTH, batches, kept_bytes, trained, unrolled

pytestmark = pytest.mark.usefixtures("quick_compilation")

INSIDE = MICROBATCH * 4 * WIDTH * 4
"""The bytes of one value inside a block."""


def offloading(graph: sw.Graph, pp: int, away: int = LAYERS, recompute: str = "full") -> sw.Plan:
    plan = plan_of(graph, pp, batch=BATCH, microbatch=MICROBATCH, recompute=recompute)
    units = plan.recomputed_units[:away]
    return replace(plan, decision=replace(plan.decision, offloaded_units=units))


def on_host_bytes(train: sw.TrainStep) -> int:
    """What all stages hand from one forward to its backward over the host."""
    made = [
        (key, out, at)
        for launches in train.pipeline.launches
        for key, out, at in zip(
            launches[Kind.FORWARD].function.makes,
            jax.tree.leaves(launches[Kind.FORWARD].run.out_info),
            launches[Kind.FORWARD].run.output_shardings,
            strict=True,
        )
    ]
    assert all((at.memory_kind == "pinned_host") == (key[0] == "host") for key, _, at in made)
    return sum(out.size * out.dtype.itemsize for key, out, _ in made if key[0] == "host")


@pytest.mark.parametrize(
    ("name", "pp"),
    [
        *(("nnx", 2), ("linen", 2), ("function", 1)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("nnx", 1), ("linen", 1), ("function", 2))),
    ],
)
def test_offloaded_units_keep_on_the_host_what_others_keep_on_the_device(name: str, pp: int) -> None:
    case = CASES[name]
    graph = case.graph()
    expected = reference(case.alone, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    every, one = (trained(case, offloading(graph, pp, away), expected) for away in (LAYERS, 1))
    assert on_host_bytes(every) >= LAYERS * 2 * INSIDE
    assert 2 * INSIDE <= on_host_bytes(one) <= on_host_bytes(every) - (LAYERS - 1) * 2 * INSIDE
    assert kept_bytes(every) < INSIDE  # what lies between units


def test_layers_of_a_loop_are_refused_by_name() -> None:
    case = CASES["scan"]
    plan = offloading(case.graph(), 2)
    train = sw.train_step(case.loss, optax.sgd(1e-2), plan, devices=jax.devices()[:2])
    state = train.init(case.create())
    with pytest.raises(
        MissingCapabilityError, match=r"offloads units \[.*iterations of a loop over stacked parameters"
    ):
        train(state, batches()[0])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("nnx", "scan") else pytest.mark.slow) for name in CASES]
)
def test_products_are_kept_and_the_rest_is_computed_again(name: str) -> None:
    case: Any = CASES[name]
    graph = case.graph()
    expected = reference(case.alone, case.params, optax.sgd(1e-2), batches(), MICROBATCH)
    plans = [
        plan_of(graph, 2, batch=BATCH, microbatch=MICROBATCH, recompute=r) for r in ("full", "elementwise", "none")
    ]
    full, products, none = (kept_bytes(trained(case, plan, expected)) for plan in plans)
    entering = MICROBATCH * WIDTH * 4
    assert full + LAYERS * INSIDE <= products <= full + LAYERS * (INSIDE + entering)
    assert products < none


@pytest.mark.gpu
@jax.default_matmul_precision("highest")
def test_offloaded_units_leave_a_gpu() -> None:
    """The same losses and parameters as with all of them kept, and less of the device's memory."""
    if jax.default_backend() != "gpu":
        pytest.skip("needs a JAX that sees a GPU")
    rows, width, layers, steps = 8192, 1024, 8, 3
    keys = jax.random.split(jax.random.key(0), 2 * layers)
    params = {
        "layers": [
            {
                "i": jax.random.normal(keys[2 * n], (width, 4 * width)) / width**0.5,
                "b": jnp.zeros(4 * width),
                "o": jax.random.normal(keys[2 * n + 1], (4 * width, width)) / (4 * width) ** 0.5,
            }
            for n in range(layers)
        ]
    }
    batch = {"x": np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)}
    graph = sw.capture(unrolled, jax.eval_shape(lambda: (params, batch)))

    def run(plan: sw.Plan) -> tuple[list[float], Any, int]:
        train = sw.train_step(unrolled, optax.sgd(1e-2), plan, devices=jax.devices()[:1])
        state = train.init(jax.tree.map(jnp.array, params))
        losses = []
        for _ in range(steps):
            state, loss = train(state, batch)
            losses.append(float(loss))
        found = jax.tree.map(np.asarray, train.params(state))
        return losses, found, jax.devices()[0].memory_stats()["peak_bytes_in_use"]

    whole = plan_of(graph, 1, batch=rows, microbatch=rows, recompute="full")
    away = replace(whole, decision=replace(whole.decision, offloaded_units=whole.recomputed_units))
    found, weights, least = run(away)  # first: a device tells the most that it ever held
    plain, kept, most = run(plan_of(graph, 1, batch=rows, microbatch=rows))
    assert found == pytest.approx(plain, rel=1e-5)
    Comparison().values(weights, kept, relative=1e-4, absolute=1e-5).require()
    inside = rows * 4 * width * 4
    assert most - least > (layers - 2) * inside
