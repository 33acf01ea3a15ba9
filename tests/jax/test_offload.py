"""Units whose activations are on the host from forward to backward, and units that keep the results of products."""

from dataclasses import replace
from typing import Any

import jax
import optax
import pytest

import shardwright.jax as sw
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.schedule.actions import Kind
from tests.jax.chains import plan_of, reference
from tests.jax.test_recompute import BATCH, CASES, LAYERS, MICROBATCH, WIDTH, batches, kept_bytes, trained

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
