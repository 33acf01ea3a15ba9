"""What the tests of the command line share: how to run it, and plan files made without a framework."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from tests.core.toy import decoder


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Stdout, which must be JSON and nothing else."""
        return json.loads(self.out)

    @property
    def flat_err(self) -> str:
        """Stderr as one line."""
        return " ".join(self.err.split())


def run(*arguments: object) -> Ran:
    """Run one command in this process. An error that is not a ShardwrightError is a failure of the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    return Ran(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(scope="session")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``pipeline``: pp 2 × dp 2; ``tensor``: dp 2 × tp 2; ``deeper``: pp 4. All of one toy decoder on four devices."""
    folder = tmp_path_factory.mktemp("plans")
    graph = decoder(layers=4)
    cluster = sw.Cluster("a100-80gb", nodes=1, devices_per_node=4)
    wanted = {"pipeline": {"pp": 2, "dp": 2}, "tensor": {"dp": 2, "tp": 2}, "deeper": {"pp": 4}}
    paths = {}
    for name, degrees in wanted.items():
        paths[name] = folder / f"{name}.json"
        rest = {axis: 1 for axis in ("pp", "tp", "dp") if axis not in degrees}
        usual = {"schedule": "1f1b", "shard": 0}
        sw.plan(graph, cluster, batch=16, microbatch=2, **usual, **degrees, **rest).save(paths[name])
    return paths


TORCH_MODELS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x

def with_loss():
    print("made by with_loss")
    return Net(), torch.zeros(2, 16), lambda output: output.square().mean()

class Tokens(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 16)
        self.head = torch.nn.Linear(16, 16)

    def forward(self, ids):
        return self.head(self.table(ids)).square().mean()

def of_tokens():
    return Tokens(), torch.zeros(2, 4, dtype=torch.long)

def marked():
    from shardwright.torch import set_tensor_parallelism

    net = Net()
    set_tensor_parallelism(net.layers[1], False)
    return net, torch.zeros(2, 16), lambda output: output.square().mean()

def without_loss():
    return Net(), torch.zeros(2, 16)

def squares(output):
    return output.square().mean()

def with_scalar_output():
    class Scalar(Net):
        def forward(self, x):
            return super().forward(x).square().mean()
    return Scalar(), torch.zeros(2, 16)

def no_pair():
    return Net()

def loss_is_no_function():
    return Net(), torch.zeros(2, 16), 3.0

def no_model():
    return "a model", torch.zeros(2, 16)

def broken():
    raise RuntimeError("no weights here")

def leaves():
    raise SystemExit("usage: train.py --data DIR")

def needs_size(size):
    return Net(), torch.zeros(2, size)
"""

JAX_MODELS = """
import jax
import jax.numpy as jnp

def without_loss():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(16, 32, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    sample = {"x": jax.ShapeDtypeStruct((2, 16), jnp.float32), "y": jax.ShapeDtypeStruct((2, 16), jnp.float32)}
    return nnx.eval_shape(lambda: Net(nnx.Rngs(0))), sample

def against_targets(model, sample):
    return jnp.square(model(sample["x"]) - sample["y"]).mean()

def with_loss():
    def apply(params, batch):
        x = batch
        for layer in params["layers"]:
            x = jax.nn.relu(x @ layer["weight"])
        return jnp.square(x).mean()
    weight = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    return apply, ({"layers": [{"weight": weight}] * 4}, jax.ShapeDtypeStruct((2, 16), jnp.float32))

def partitioned():
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tp"))
            self.up = nnx.Linear(16, 32, kernel_init=init, rngs=rngs)
            self.down = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x):
            return self.down(jax.nn.relu(self.up(x)))

    with nnx.use_eager_sharding(False):
        net = Net(nnx.Rngs(0))
    return net, jnp.zeros((2, 16)), lambda output: jnp.square(output).mean()
"""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torch_models.py, jax_models.py, and two files that are no Python."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "torch_models.py").write_text(TORCH_MODELS)
    (folder / "jax_models.py").write_text(JAX_MODELS)
    (folder / "does_not_parse.py").write_text("def model(:\n")
    (folder / "does_not_import.py").write_text("import shardwright\nimport a_module_that_is_not_there\n")
    return folder
