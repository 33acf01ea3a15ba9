"""A file of jobs of JAX: trained by the command to the weights of training alone, saved, and what is refused."""

import json
import runpy
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import load_file
from typer.testing import CliRunner

from shardwright.cli import app
from tests.comparison import Comparison

MODELS = """
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

class Blocks(nnx.Module):
    def __init__(self, width, rngs):
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(6)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + jnp.tanh(layer(x))
        return x

def loss(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

def model():
    x = np.ones((8, 24), np.float32)
    return Blocks(24, nnx.Rngs(0)), {"x": x, "y": x}, loss

def batches():
    draw = np.random.default_rng(1)
    return [{key: draw.normal(size=(8, 24)).astype(np.float32) for key in "xy"} for _ in range(3)]

def training(model):
    return optax.sgd(optax.exponential_decay(0.1, 1, 0.5))
"""
JOBS = """
[[jobs]]
name = "a"
model = "models.py:model"
steps = 3
batch = 8
microbatch = 4
clip_norm = 0.1
learning_rate = 1e-2
reduction = "mean"
data = "models.py:batches"
output = "{0}/runs/a"

[[jobs]]
name = "b"
model = "models.py:model"
steps = 3
batch = 8
optimizer = "sgd"
training = "models.py:training"
data = "models.py:batches"
output = "{0}/runs/b"
"""


def test_a_file_of_jobs_is_trained_and_saved(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    (tmp_path / "jobs.toml").write_text(JOBS.format(tmp_path), encoding="utf-8")
    ran = CliRunner().invoke(app, ["jobs", "run", str(tmp_path / "jobs.toml"), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)["jobs"]
    assert [own["failure"] for own in found.values()] == ["", ""]
    module = runpy.run_path(str(tmp_path / "models.py"))
    compared = Comparison("jobs run")
    clipped = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
    for name, optimizer in (("a", clipped), ("b", module["training"](None))):
        model, _, loss = module["model"]()
        graphdef, params = nnx.split(model)
        state = optimizer.init(params)
        for batch in module["batches"]():
            gradients = jax.grad(lambda p, b=batch, g=graphdef, of=loss: of(nnx.merge(g, p), b))(params)
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        wanted = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}
        saved = load_file(tmp_path / "runs" / name / "model.safetensors")
        compared.where = name
        compared.values(saved, wanted, relative=1e-4, absolute=1e-6, what="weights")
        assert load_file(tmp_path / "runs" / name / "optimizer.safetensors")
        assert json.loads((tmp_path / "runs" / name / "losses.json").read_text()) == found[name]["losses"]
    compared.require()
    text = (tmp_path / "jobs.toml").read_text(encoding="utf-8")
    for before, after, said in (
        ('data = "models.py:batches"\noutput', "output", "job 'a' has no data"),
        ("learning_rate = 1e-2\n", "", "give learning_rate"),
        ('"sgd"\ntraining = "models.py:training"', '"asgd"', "optax has no optimizer 'asgd'"),
        ("models.py:training", "models.py:loss", "its training function failed"),
    ):
        (tmp_path / "jobs.toml").write_text(text.replace(before, after, 1), encoding="utf-8")
        ran = CliRunner().invoke(app, ["jobs", "run", str(tmp_path / "jobs.toml")])
        assert ran.exit_code != 0, said
        assert said in " ".join(f"{ran.output} {ran.exception}".split()), ran.output
