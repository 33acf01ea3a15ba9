"""State shared by groups of replicas: the unsplit model's training, in the memory that a group's shard takes."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.backends.capabilities import JAX
from shardwright.backends.jax.machine.mesh import GROUPS, mesh_of
from shardwright.core.model.graph import Graph
from tests.comparison import Comparison
from tests.jax import plans
from tests.jax.chains import Run, module_reference, named, recording
from tests.jax.plans import BATCH, STEPS, batches, create, gpt2_graph, megatron

pytestmark = pytest.mark.usefixtures("quick_compilation")

FORMS = {"alone": (1, 8, 1, 4), "pp 2": (2, 4, 1, 2), "tp 2": (1, 4, 2, 2)}
"""(pp, dp, tp, replicas that share) on 8 devices."""
SOME = (("alone", 1, 1), ("alone", 3, 2), ("pp 2", 3, 4), ("tp 2", 2, 4))
ALL = [(form, shard, times) for form in FORMS for shard in (1, 2, 3) for times in (1, 2 if form == "alone" else 4)]
CASES = [*SOME, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in SOME)]


@cache
def graph() -> Graph:
    return gpt2_graph()


@cache
def unsplit() -> Run:
    return module_reference(gpt2_flax.next_token_loss, create, optax.adamw(1e-3), batches(), BATCH)


def plan_of(pp: int, dp: int, tp: int, times: int, **pins: Any) -> sw.Plan:
    """A plan that accumulates ``times`` microbatches."""
    stages = {"schedule": "1f1b", "virtual_stages": 1} if pp > 1 else {}
    return megatron(graph(), dp, tp, BATCH // (dp * times), pp=pp, **stages, **pins)


def held_share(tree: Any) -> float:
    """The share of the arrays of a tree that one device holds, of those of one stage where there are several."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.ndim]
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)


def require_unsplit_training(plan: sw.Plan) -> None:
    """Losses of 20 steps, all gradients of the first, all parameters after the last; what a device holds."""
    count, split_both = plan.mesh.size, plan.decision.tp > 1 and plan.decision.pp > 1
    train = sw.train_step(gpt2_flax.next_token_loss, recording(optax.adamw(1e-3)), plan, devices=jax.devices()[:count])
    state = train.init(create)
    same = Comparison()
    losses = []
    for batch in batches():
        state, loss = train(state, batch)
        if not losses and not split_both:  # else fused matrices are in another order
            seen = train.original(state) if plan.decision.pp == 1 else state
            same.gradients(named(seen.optimizer[1]), unsplit().gradients)
        losses.append(float(loss))
    same.losses(losses, unsplit().losses, moving=1e-3)
    trained = nnx.state(train.params(state, at=jax.devices()[0]), nnx.Param)
    same.values(named(trained), unsplit().params, relative=1e-3, absolute=1e-4, what="parameters")
    same.require()
    whole = {1: 1.0, 2: 0.52}[plan.decision.tp]  # half of all but norms and positions
    share = whole / (plan.decision.shard_group or 1)
    assert held_share(state.optimizer[0][0].mu) == pytest.approx(share, rel=0.05)
    assert held_share(state.params) == pytest.approx(share if plan.decision.shard == 3 else whole, rel=0.05)


@pytest.mark.parametrize(("form", "shard", "times"), CASES)
def test_a_run_in_groups_is_the_unsplit_run(form: str, shard: int, times: int) -> None:
    pp, dp, tp, group = FORMS[form]
    plan = plan_of(pp, dp, tp, times, shard=shard, shard_group=group)
    assert mesh_of(plan).axis_size(GROUPS) == dp // group
    require_unsplit_training(plan)


@pytest.mark.slow
@pytest.mark.parametrize("shard", [1, 2, 3])
def test_with_a_pipeline_and_a_tensor_axis_on_sixteen_devices(shard: int) -> None:
    flags = "--xla_force_host_platform_device_count=16 --xla_cpu_use_fusion_emitters=false"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.test_shard_groups", str(shard)], capture_output=True, text=True, check=False,
        timeout=400, cwd=root, env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"steps": STEPS}


def test_neighbours_share_and_groups_hold_the_same() -> None:
    plan = plan_of(1, 8, 1, 2, shard=3, shard_group=4)
    train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan)
    state = train.init(create)
    leaf = max(jax.tree.leaves(state.params), key=lambda leaf: leaf.size)
    parts = {shard.device.id: shard.index for shard in leaf.addressable_shards}
    assert len(set(map(str, parts.values()))) == 4
    assert [str(parts[number]) for number in range(4)] == [str(parts[number + 4]) for number in range(4)]


def test_a_group_of_one_shares_nothing_and_one_of_all_is_the_whole_axis() -> None:
    for group in (1, 8, None):
        plan = plan_of(1, 8, 1, 2, shard=1, shard_group=group)
        train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), plan)
        share = held_share(train.init(create).optimizer[0].mu)
        assert share == pytest.approx(1.0 if group == 1 else 1 / 8, rel=0.1)


def test_a_plan_file_with_groups_trains_the_same(tmp_path: Path) -> None:
    stages: dict[str, Any] = {"shard": 3, "shard_group": 2}
    plan = plans.plan_of(graph(), 4, 2, 1, **stages)
    plan.save(tmp_path / "plan.json")
    losses = []
    for each in (plan, sw.Plan.load(tmp_path / "plan.json")):
        train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-3), each)
        _, loss = train(train.init(create), batches(1)[0])
        losses.append(float(loss))
    assert losses[0] == losses[1]
    Comparison("a plan file").losses(losses[0], unsplit().losses[0]).require()


def test_the_search_offers_groups_and_what_does_not_divide_is_refused() -> None:
    assert JAX.lack(recompute="none", shard=3, shard_group=2, dp=8) is None
    with pytest.raises(sw.ShardwrightError, match=r"shard_group=3 does not divide dp=8"):
        plan_of(1, 8, 1, 2, shard=1, shard_group=3)
    with pytest.raises(sw.ShardwrightError, match=r"shard=0 and shard_group=2"):
        plan_of(1, 8, 1, 2, shard=0, shard_group=2)


def test_one_program_for_all_stages_refuses_shared_state() -> None:
    stages = {"pp": 2, "schedule": "gpipe", "virtual_stages": 1}
    with pytest.raises(sw.ShardwrightError, match="shard=1, which one program for all stages does not lay out"):
        sw.train_step(
            gpt2_flax.next_token_loss, optax.adamw(1e-3),
            megatron(graph(), 4, 1, 2, shard=1, shard_group=2, **stages), one_program=True,
        )  # fmt: skip


if __name__ == "__main__":
    jax.config.update("jax_disable_most_optimizations", True)
    require_unsplit_training(plan_of(2, 4, 2, 4, shard=int(sys.argv[1]), shard_group=2))
    print(json.dumps({"steps": STEPS}))
