"""Checkpoints of JAX runs: any plan to any plan, with the optimizer, to the bit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.backends.jax.training.saved_state import original_boxes, read_whole
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.errors import CheckpointError, PlanError
from tests.comparison import Comparison
from tests.jax import test_pipeline_stacks as stacks
from tests.jax.plans import CONFIG, batches, gpt2_graph, megatron, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")

BEFORE, AFTER = 2, 5
PLANS: dict[str, Callable[[], sw.Plan]] = {
    "one": lambda: plan_of(gpt2_graph()),
    "dp2-s3": lambda: plan_of(gpt2_graph(), dp=2, shard=3),
    "tp2": lambda: megatron(gpt2_graph(), tp=2),
    "pp2": lambda: plan_of(gpt2_graph(), pp=2),
    "pp2-dp2-s1": lambda: plan_of(gpt2_graph(), pp=2, dp=2, shard=1),
    "tp2-dp2-s3": lambda: megatron(gpt2_graph(), tp=2, dp=2, shard=3),
    "pp2-tp2": lambda: megatron(gpt2_graph(), pp=2, tp=2),
    "tp4": lambda: megatron(gpt2_graph(), tp=4),
    "pp2-tp2-dp2-s2": lambda: megatron(gpt2_graph(), pp=2, tp=2, dp=2, shard=2),
    "dp4-s1": lambda: plan_of(gpt2_graph(), dp=4, shard=1),
    "pp2-v2": lambda: plan_of(gpt2_graph(), pp=2, schedule="interleaved-1f1b", virtual_stages=2),
    "pp4": lambda: plan_of(gpt2_graph(), pp=4),
    "one-program": lambda: plan_of(gpt2_graph(), pp=2, dp=2, schedule="gpipe", virtual_stages=1),
}
QUICK = (
    ("dp2-s3", "dp2-s3"), ("dp2-s3", "pp2-tp2"), ("pp2-tp2", "one"), ("one", "one-program"), ("one-program", "one"),
)  # fmt: skip
"""Plans that save, and plans that go on from these."""


def create(seed: int = 3) -> gpt2_flax.GPT2:
    return gpt2_flax.create(CONFIG, seed=seed)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)))


def step_of(plan: sw.Plan, **more: Any) -> sw.TrainStep:
    devices = jax.devices()[: plan.mesh.size]
    return sw.train_step(gpt2_flax.next_token_loss, optimizer(), plan, devices=devices, log_every=0, **more)


def step_under(name: str) -> sw.TrainStep:
    return step_of(PLANS[name](), one_program=name == "one-program")


def losses(train: sw.TrainStep, state: sw.TrainState, first: int, end: int) -> tuple[list[float], sw.TrainState]:
    found = []
    for batch in batches(end)[first:]:
        state, loss = train(state, batch)
        found.append(float(loss))
    return found, state


def tensors(path: Path, tag: str) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, as the bits that they are."""
    reader = Reader.open(path, tag)
    return {name: read_whole(reader, name).view(np.uint8) if reader.tensor(name).shape else read_whole(reader, name)
            for name in reader.index.tensors}  # fmt: skip


@dataclass
class Written:
    """Runs that were saved, each made once."""

    path: Path
    after: dict[str, list[float]] = field(default_factory=dict)

    def by(self, name: str) -> list[float]:
        """The losses of a run after it was saved under the name of its plan."""
        if name not in self.after:
            train = step_under(name)
            _, state = losses(train, train.init(create), 0, BEFORE)
            train.save_checkpoint(self.path, name, state, {"epoch": 1, "seen": jnp.arange(3)})
            self.after[name], _ = losses(train, state, BEFORE, BEFORE + AFTER)
        return self.after[name]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("checkpoints"))


def require_goes_on(written: Written, saved: str, plan: str) -> None:
    expected = written.by(saved)
    train = step_under(plan)
    state, content = train.resume_from_checkpoint(written.path, train.init(lambda: create(9)), saved)
    assert content["epoch"] == 1
    Comparison().equal(content["seen"], np.arange(3, dtype=np.int32)).require()
    again = f"{saved}.{plan}"
    train.save_checkpoint(written.path, again, state)
    before, after = tensors(written.path, saved), tensors(written.path, again)
    users = {name for name in before if name.startswith("user/")}
    Comparison().equal(after, {name: value for name, value in before.items() if name not in users}).require()
    assert int(state.step) == BEFORE
    found, _ = losses(train, state, BEFORE, BEFORE + AFTER)
    Comparison(f"{saved} to {plan}").losses(found, expected, moving=1e-3).require()


@pytest.mark.parametrize(("saved", "plan"), QUICK)
def test_any_plan_goes_on_from_any_plan(written: Written, saved: str, plan: str) -> None:
    require_goes_on(written, saved, plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("saved", PLANS)
def test_every_plan_goes_on_from_every_plan(written: Written, saved: str, plan: str) -> None:
    require_goes_on(written, saved, plan)


def test_held_boxes_are_those_of_the_original() -> None:
    """Against arrays that are brought to the held order."""
    from shardwright.backends.jax.tensor_parallel.blocks import to_held

    for blocks, ways in (((4, 4, 4), 2), ((8, 2, 6), 2), ((6, 3), 3)):
        whole = np.arange(sum(blocks) * 5, dtype=np.int32).reshape(5, sum(blocks))
        held = np.asarray(to_held(jnp.asarray(whole), 1, blocks, ways))
        for first in range(sum(blocks)):
            for end in range(first + 1, sum(blocks) + 1):
                box = Box((1, first), (3, end - first))
                seen = np.zeros(box.shape, dtype=int)
                for original, inside in original_boxes(box, {1: blocks}, ways):
                    one = whole[original.inside(Box.whole(whole.shape))]
                    Comparison().equal(held[inside.inside(Box.whole(held.shape))], one).require()
                    seen[inside.inside(box)] += 1
                assert (seen == 1).all()


def test_rows_of_stacks_go_to_other_stages(tmp_path: Path) -> None:
    graph = sw.capture(stacks.loss_fn, (stacks.params(), stacks.SAMPLE))
    trains = [
        sw.train_step(
            stacks.loss_fn, optax.adam(1e-2), stacks.plan_of(graph, pp), devices=jax.devices()[:pp], reduction="mean"
        )
        for pp in (1, 2, 3)
    ]
    state = trains[1].init(stacks.params())
    state, _ = trains[1](state, stacks.batches(1)[0])
    trains[1].save_checkpoint(tmp_path, "two", state)
    expected = [float(trains[1](trains[1].place(state), stacks.batches(2)[1])[1])]
    for number, train in enumerate(trains):
        other = jax.tree.map(jnp.zeros_like, stacks.params())
        resumed, _ = train.resume_from_checkpoint(tmp_path, train.init(other))
        train.save_checkpoint(tmp_path, f"again-{number}", resumed)
        Comparison().equal(tensors(tmp_path, f"again-{number}"), tensors(tmp_path, "two")).require()
        Comparison().losses([float(train(resumed, stacks.batches(2)[1])[1])], expected).require()


class Net(nnx.Module):
    """Dropout, whose keys are part of the state, and statistics of batches."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.5, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def squared(model: Net, batch: dict[str, jax.Array]) -> jax.Array:
    return (model(batch["x"]) ** 2).mean()


def test_keys_and_statistics_go_on(tmp_path: Path) -> None:
    def built(seed: int) -> Callable[[], Net]:
        return lambda: Net(nnx.Rngs(seed))

    graph = sw.capture(nnx.eval_shape(built(0)), {"x": jax.ShapeDtypeStruct((8, 4), jnp.float32)}, squared)
    plan = sw.plan(
        graph, sw.Cluster("cpu", devices_per_node=1), batch=8, microbatch=4, precision="fp32", loss_scope="replica"
    )
    train = sw.train_step(squared, optax.sgd(0.1, momentum=0.9), plan, devices=jax.devices()[:1], log_every=0)
    data = [{"x": np.random.default_rng(n).standard_normal((8, 4)).astype(np.float32)} for n in range(4)]

    def run(state: Any, first: int) -> tuple[list[float], Any]:
        found = []
        for batch in data[first : first + 2]:
            state, loss = train(state, batch)
            found.append(float(loss))
        return found, state

    _, state = run(train.init(built(0)), 0)
    train.save_checkpoint(tmp_path, "mid", state)
    expected, last = run(state, 2)
    resumed, _ = train.resume_from_checkpoint(tmp_path, train.init(built(5)))
    found, end = run(resumed, 2)
    assert found == expected, "the same masks"
    for kind in (nnx.Param, nnx.BatchStat):
        Comparison().equal(nnx.state(train.params(end), kind), nnx.state(train.params(last), kind)).require()


def test_what_does_not_fit_is_refused_by_name(written: Written, tmp_path: Path) -> None:
    written.by("one")
    train = step_of(PLANS["one"]())
    other = gpt2_flax.Config(n_layer=1, n_head=4, n_embd=32, vocab_size=64, n_positions=16)
    sample = {"input_ids": jax.ShapeDtypeStruct((16, 12), jnp.int32)}
    graph = sw.capture(nnx.eval_shape(lambda: gpt2_flax.create(other)), sample, gpt2_flax.next_token_loss)
    smaller = step_of(plan_of(graph))
    with pytest.raises(CheckpointError, match=r"does not fit the model: it has h\.1.*which is not here"):
        smaller.resume_from_checkpoint(written.path, smaller.init(lambda: gpt2_flax.create(other)), "one")
    sgd = sw.train_step(gpt2_flax.next_token_loss, optax.sgd(0.1), PLANS["one"](), devices=jax.devices()[:1])
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):
        sgd.resume_from_checkpoint(written.path, sgd.init(create), "one")
    state, _ = sgd.resume_from_checkpoint(written.path, sgd.init(create), "one", load_optimizer=False)
    with pytest.raises(CheckpointError, match=r"checkpoint 'on' .* did you mean 'one'"):
        sgd.resume_from_checkpoint(written.path, state, "on")
    with pytest.raises(CheckpointError, match=r"user_content/0 is of class builtins\.object"):
        sgd.save_checkpoint(tmp_path, "a", state, [object()])
    used = train.init(create)
    losses(train, used, 0, 1)
    with pytest.raises(PlanError, match="already given to a step"):
        train.save_checkpoint(tmp_path, "a", used)
    assert not list(tmp_path.iterdir())
