"""A model runs slice by slice of its sequences with the losses and gradients of the unsplit model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from shardwright.core.errors import CaptureError
from examples import gpt2_flax
from tests.jax import zoo_slices
from tests.jax.chains import Run, module_reference, recording, reference, require_same_run
from tests.jax.zoo_slices import BATCH, LENGTH, VOCABULARY, LinenGpt, Llama, batches, linen_loss, next_loss

MICROBATCH = 2
GPT = gpt2_flax.Config(n_layer=4, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=16)


def llama(attend: Any, mask: Any, layers: int = 4) -> Callable[[], nnx.Module]:
    return lambda: Llama(layers, nnx.Rngs(0), attend, mask)


@dataclass(frozen=True)
class Case:
    """A model by the function that makes it, and its loss."""

    create: Callable[[], Any]
    loss: Callable[..., Any] = next_loss
    is_linen: bool = False

    @property
    def given(self) -> Any:
        """What `sw.capture` takes."""
        return self.init() if self.is_linen else nnx.eval_shape(self.create)

    def init(self) -> Any:
        return self.create().init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32)) if self.is_linen else self.create()


MODELS = {
    "gpt": Case(lambda: gpt2_flax.create(GPT, seed=3)),
    "llama": Case(llama(zoo_slices.causal, lambda ids: None)),
    "window": Case(llama(zoo_slices.written_out, zoo_slices.window)),
    "documents": Case(llama(zoo_slices.written_out, zoo_slices.documents)),
    "linen": Case(lambda: LinenGpt(4), linen_loss, is_linen=True),
}


@cache
def graph_of(name: str) -> Any:
    case = MODELS[name]
    return sw.capture(case.given, {"ids": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}, case.loss)


@cache
def expected(name: str) -> Run:
    case = MODELS[name]
    if case.is_linen:
        return reference(case.loss, case.init(), optax.adamw(1e-3), batches(3), MICROBATCH)
    return module_reference(case.loss, case.create, optax.adamw(1e-3), batches(3), MICROBATCH)


def planned(graph: Any, slices: Sequence[int], pp: int, dp: int = 1, **pins: Any) -> sw.Plan:
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=pp * dp)
    given = {"precision": "fp32", "recompute": "none", "shard": 0, "schedule": "1f1b", "tp": 1} | pins
    plan = sw.plan(graph, cluster, batch=BATCH, microbatch=MICROBATCH, pp=pp, dp=dp, **given)
    return replace(plan, decision=replace(plan.decision, slices=tuple(slices)))


CASES = [
    ("gpt", 2, (5, 4, 3), {}),
    ("llama", 4, (3, 7, 2), {"schedule": "gpipe"}),
    ("window", 2, (1, 5, 1, 2, 3), {"schedule": "zb-h1"}),
    ("documents", 2, (6, 6), {"recompute": "full"}),
    ("linen", 4, (5, 4, 3), {}),
    ("gpt", 1, (7, 5), {}),
    ("gpt", 2, (4, 8), {"dp": 2}),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(("name", "pp", "slices", "pins"), CASES)
def test_losses_and_gradients(name: str, pp: int, slices: tuple[int, ...], pins: dict[str, Any]) -> None:
    plan = planned(graph_of(name), slices, pp, **pins)
    case = MODELS[name]
    devices = jax.devices()[: pp * pins.get("dp", 1)]
    train = sw.train_step(case.loss, recording(optax.adamw(1e-3)), plan, devices=devices)
    require_same_run(train, train.init(case.init() if case.is_linen else case.create), expected(name), batches(3))
