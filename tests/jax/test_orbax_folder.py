"""What users of Flax save by Orbax is a checkpoint to go on from, and the other way round."""

from pathlib import Path
from typing import Any

import jax
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import shardwright.jax as sw
from examples import gpt2_flax
from shardwright.backends.jax.training.orbax_folder import OrbaxFolder, write_orbax
from shardwright.core.checkpoint.copied import write_copy
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.errors import CheckpointError
from tests.comparison import Comparison
from tests.jax.plans import batches, create, gpt2_graph, plan_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
BEFORE, END = 2, 4


def started(**pins: Any) -> tuple[sw.TrainStep, sw.TrainState]:
    plan = plan_of(gpt2_graph(), **pins)
    devices = jax.devices()[: plan.mesh.size]
    train = sw.train_step(gpt2_flax.next_token_loss, optax.adamw(1e-2), plan, devices=devices, log_every=0)
    return train, train.init(create)


def steps(train: sw.TrainStep, state: sw.TrainState, first: int, end: int) -> tuple[list[float], sw.TrainState]:
    losses = []
    for batch in batches(end)[first:]:
        state, loss = train(state, batch)
        losses.append(float(loss))
    return losses, state


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A user's Orbax folder of a module, its optimizer and more; and the losses of the run that goes on."""
    folder = tmp_path_factory.mktemp("orbax") / "users"
    train, state = started()
    _, state = steps(train, state, 0, BEFORE)
    tree = {
        "params": nnx.state(train.params(state), nnx.Param),
        "opt_state": state.optimizer,
        "step": BEFORE,
        "epoch": 7,
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
    return folder, steps(train, state, BEFORE, END)[0]


def test_a_run_goes_on_from_an_orbax_folder(users: tuple[Path, list[float]], tmp_path: Path) -> None:
    folder, expected = users
    write_copy(OrbaxFolder(folder), tmp_path, "start")
    train, empty = started(dp=2, shard=3)
    state, content = train.resume_from_checkpoint(tmp_path, empty)
    assert int(state.step) == BEFORE
    assert int(content["epoch"]) == 7
    Comparison().losses(steps(train, state, BEFORE, END)[0], expected, moving=1e-3).require("losses")


def test_a_checkpoint_becomes_an_orbax_folder(tmp_path: Path) -> None:
    """Which Orbax restores, and flax puts into a module."""
    train, state = started(dp=2, shard=3)
    train.save_checkpoint(tmp_path / "own", "start", state)
    write_orbax(Reader.open(tmp_path / "own"), tmp_path / "orbax")
    tree = ocp.PyTreeCheckpointer().restore(tmp_path / "orbax")
    module = create()
    nnx.update(module, nnx.State(nnx.restore_int_paths(tree["params"])))
    found, wanted = (nnx.to_pure_dict(nnx.state(one, nnx.Param)) for one in (module, train.params(state)))
    Comparison().equal(found, wanted).require()
    assert set(tree["opt_state"]["0"]) == {"count", "mu", "nu"}


def test_what_is_no_orbax_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="no Orbax folder"):
        OrbaxFolder(tmp_path)
    train, state = started()
    train.save_checkpoint(tmp_path / "own", "start", state)
    with pytest.raises(CheckpointError, match="exists already"):
        write_orbax(Reader.open(tmp_path / "own"), tmp_path / "own")
