"""A model runs slice by slice of its sequences with the losses and gradients of the unsplit model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.backends.jax.pipeline.actions import dispatch_order
from shardwright.backends.jax.tensor_parallel.blocks import restore
from shardwright.backends.jax.tensor_parallel.constrained_loss import held_by_blocks
from shardwright.core.errors import CaptureError, MissingCapabilityError
from shardwright.core.schedule import Schedule
from shardwright.core.schedule.catalogue import FAMILIES
from shardwright.core.schedule.passes.slices_as_stages import slices_as_stages
from tests.comparison import Comparison
from tests.jax import zoo_slices
from tests.jax.chains import module_reference, named, recording, reference, require_same_gradients, require_same_run
from tests.jax.zoo_slices import BATCH, LENGTH, VOCABULARY, Dropping, LinenGpt, Llama, batches, next_loss

MICROBATCH = 2


def llama(attend: Any, mask: Any = None, layers: int = 2) -> Callable[[], nnx.Module]:
    return lambda: Llama(layers, nnx.Rngs(0), attend, mask or (lambda ids: None))


def linen(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return next_loss(lambda ids: LINEN.apply({"params": params}, ids), batch)


GPT = gpt2_flax.Config(n_layer=4, n_head=2, n_embd=16, vocab_size=VOCABULARY, n_positions=16)
LINEN = LinenGpt(2)
MODELS: dict[str, Callable[[], Any]] = {
    "gpt": lambda: gpt2_flax.create(replace(GPT, n_layer=2), seed=3),
    "gpt-4": lambda: gpt2_flax.create(GPT, seed=3),
    "llama": llama(zoo_slices.causal),
    "window": llama(zoo_slices.written_out, zoo_slices.window),
    "documents": llama(zoo_slices.written_out, zoo_slices.documents),
    "linen": lambda: LINEN.init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"],
}


def graph_of(create: Callable[[], Any], loss: Callable[..., Any] = next_loss) -> Any:
    sample = {"ids": jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)}
    if loss is linen:
        return sw.capture((LINEN, {"params": jax.eval_shape(create)}), sample, next_loss)
    return sw.capture(nnx.eval_shape(create), sample, loss)


def planned(graph: Any, slices: Sequence[int], pp: int = 2, dp: int = 1, **pins: Any) -> sw.Plan:
    given: dict[str, Any] = {"precision": "fp32", "recompute": "none", "shard": 0, "schedule": "1f1b", "tp": 1} | pins
    if given["tp"] > 1:
        given = {"sequence_parallel": False} | given
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=pp * dp * given["tp"])
    plan = sw.plan(graph, cluster, batch=BATCH, microbatch=MICROBATCH, pp=pp, dp=dp, **given)
    return replace(plan, decision=replace(plan.decision, slice_lengths=tuple(slices)))


def trained(plan: sw.Plan, create: Callable[[], Any], loss: Callable[..., Any] = next_loss) -> Any:
    """The training under a plan, and its first state."""
    devices = jax.devices()[: plan.mesh.size]
    train = sw.train_step(loss, recording(optax.adamw(1e-3)), plan, devices=devices)
    return train, train.init(create() if loss is linen else create)


OFTEN = [
    ("gpt", 2, (5, 4, 3), {}),
    ("window", 2, (1, 11), {"schedule": "zb-h1"}),
    ("llama", 1, (5, 7), {"tp": 2}),
]
SELDOM = [
    ("llama", 2, (3, 7, 2), {"schedule": "gpipe"}),
    ("documents", 1, (6, 6), {"recompute": "full"}),
    ("linen", 2, (5, 4, 3), {}),
    ("gpt-4", 4, (5, 1, 3, 2, 1), {}),
    ("gpt", 1, (7, 5), {}),
    ("gpt", 2, (4, 8), {"dp": 2}),
    ("documents", 2, (4, 8), {"dp": 2, "recompute": "selective"}),
    ("gpt", 2, (5, 4, 3), {"tp": 2}),
    ("window", 1, (6, 6), {"tp": 2, "recompute": "full"}),
    ("llama", 2, (4, 8), {"dp": 2, "tp": 2}),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("name", "pp", "slices", "pins"), [*OFTEN, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM)]
)
def test_losses_and_gradients(name: str, pp: int, slices: tuple[int, ...], pins: dict[str, Any]) -> None:
    create, loss = MODELS[name], linen if name == "linen" else next_loss
    plan = planned(graph_of(create, loss), slices, pp, **pins)
    steps, optimizer = batches(1), optax.adamw(1e-3)
    expected = (
        reference(loss, create(), optimizer, steps, MICROBATCH)
        if loss is linen
        else module_reference(loss, create, optimizer, steps, MICROBATCH)
    )
    train, state = trained(plan, create, loss)
    state, found = train(state, steps[0])
    Comparison().losses([float(found)], expected.losses).require()
    tags = held_by_blocks(plan.parameter_layouts("jax"))
    gradients = {
        path: restore(value, tags.get(path, {}), plan.decision.tp) for path, value in named(state.optimizer[1]).items()
    }
    require_same_gradients(gradients, expected.gradients)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_dropout_draws_what_it_draws_without_slices() -> None:
    def create() -> Dropping:
        return Dropping(nnx.Rngs(0))

    graph, steps = graph_of(create), batches(1)
    found = []
    for slices in ((5, 7), ()):
        train, state = trained(planned(graph, slices, pp=2 if slices else 1), create)
        state, loss = train(state, steps[0])
        found.append((float(loss), named(state.optimizer[1])))
    (loss, gradients), (expected, expected_gradients) = found
    Comparison().losses([loss], [expected]).require()
    require_same_gradients(gradients, expected_gradients)


REFUSED = [
    (
        llama(zoo_slices.both_ways),
        (5, 4, 3),
        r"next_loss cannot run in.*reduce_max in layers\.0 attends in both",
    ),
    (
        llama(zoo_slices.in_two_masks, zoo_slices.padded),
        (6, 6),
        r"layers\.0 .*a mask of which it cannot be told that it",
    ),
    (llama(zoo_slices.masked_twice, lambda ids: ids != 0), (6, 6), r"layers\.0 .*a mask of which it cannot be told"),
    (MODELS["llama"], (5, 4), r"slices 5 \+ 4 have 9 tokens in all, and the batch has sequences of 12"),
]


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize(
    ("create", "slices", "message"), REFUSED, ids=("both ways", "in two masks", "twice", "lengths")
)
def test_refused_by_name(create: Callable[[], Any], slices: tuple[int, ...], message: str) -> None:
    train, state = trained(planned(graph_of(create), slices), create)
    with pytest.raises(CaptureError, match=message):
        train(state, batches(1)[0])


@pytest.mark.usefixtures("quick_compilation")
def test_sequences_are_padded_on_the_right() -> None:
    create = llama(zoo_slices.written_out, zoo_slices.padded)
    train, state = trained(planned(graph_of(create), (5, 4, 3)), create)
    steps = [zoo_slices.padded_right(batch) for batch in batches(1)]
    expected = module_reference(next_loss, create, optax.adamw(1e-3), steps, MICROBATCH)
    require_same_run(train, state, expected, steps)
    state = train.init(create)
    left = {"ids": np.flip(steps[0]["ids"], 1)}
    with pytest.raises(CaptureError, match=r"layers\.0 attends by a mask that hides all tokens up to its own"):
        train(state, left)


@pytest.mark.parametrize("name", ["window", "documents", "llama"])
def test_plans_take_attention_as_one_op_and_written_out(name: str) -> None:
    pins = {"pp": 2, "dp": 1, "tp": 1, "microbatch": MICROBATCH, "schedule": "1f1b", "recompute": "none"}
    cluster = sw.Cluster("cpu", devices_per_node=2)
    plan = sw.plan(graph_of(MODELS[name]), cluster, batch=BATCH, precision="fp32", slice_lengths=[5, 4, 3], **pins)
    assert plan.decision.slice_lengths == (5, 4, 3)
    graph = graph_of(llama(zoo_slices.both_ways))
    with pytest.raises(CaptureError, match="attends in both directions"):
        sw.plan(graph, cluster, batch=BATCH, precision="fp32", slice_lengths=[5, 4, 3], **pins)


def test_plans_refuse_what_the_runtime_does_not_do_in_slices() -> None:
    pins = {"pp": 1, "dp": 1, "tp": 1, "microbatch": MICROBATCH, "schedule": "1f1b", "recompute": "none"}
    cluster = sw.Cluster("cpu", devices_per_node=1)
    said = r"cumsum in layers\.0 reads the last tokens before a slice, which the jax runtime of this version"
    graph = graph_of(llama(lambda q, k, v, mask: q + jnp.cumsum(q, 1)))
    with pytest.raises(CaptureError, match=said):
        sw.plan(graph, cluster, batch=BATCH, precision="fp32", slice_lengths=[5, 4, 3], **pins)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.takes_slices and family.trains])
def test_actions_of_slices_have_an_order(name: str) -> None:
    """A slice does not wait for the last stage of the slice before it."""
    virtual = 2 if name in ("interleaved-1f1b", "interleaved-zb", "looped-bfs") else 1
    for slices in (2, 5):
        schedule = Schedule.build(name, ranks=4, microbatches=4, virtual_stages=virtual, slices=slices)
        made, order = slices_as_stages(schedule), dispatch_order(schedule)
        for rank, actions in enumerate(made.table):
            assert [a for a in order if made.stage_to_rank(a.stage) == rank] == [p for a in actions for p in a.flat]


def test_plans_that_no_runtime_of_slices_carries_out() -> None:
    graph = graph_of(MODELS["llama"])
    divided = planned(graph, (6, 6), pp=1, tp=2, sequence_parallel=True)
    with pytest.raises(MissingCapabilityError, match="2 slices and sequence_parallel=True"):
        sw.train_step(next_loss, optax.sgd(0.1), divided, devices=jax.devices()[:2])
    with pytest.raises(MissingCapabilityError, match="one_program=True was given, and the plan has 2 slices"):
        sw.train_step(next_loss, optax.sgd(0.1), planned(graph, (6, 6)), devices=jax.devices()[:2], one_program=True)
