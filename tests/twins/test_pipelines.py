"""One plan file, two pipelines: GPT-2 trained by PyTorch in four processes and by JAX on four devices, from the same
weights on the same batches."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

pytest.importorskip("torch")
pytest.importorskip("transformers")

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import gpt2_flax  # noqa: E402
import twins  # noqa: E402

import shardwright.jax as sw  # noqa: E402
from tests.comparison import Comparison  # noqa: E402

STEPS = 20


def torch_losses(plan: Path) -> list[float]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-addr", "127.0.0.1",
        "--master-port", str(port), str(ROOT / "examples" / "demo_torch.py"), str(plan), str(STEPS),
    ]  # fmt: skip
    paths = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env={**os.environ, "PYTHONPATH": paths}, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [row["loss"] for row in sorted(rows, key=lambda row: row["step"])]


@pytest.mark.slow
def test_the_same_plan_file_trains_both_alike(tmp_path: Path) -> None:
    model = twins.torch_model()
    graph = sw.capture(model, twins.torch_batch(np.zeros((twins.BATCH, twins.LENGTH), np.int32)))
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=4)
    sw.plan(
        graph, cluster, batch=twins.BATCH, microbatch=twins.MICROBATCH, pp=2, dp=2, tp=1, precision="fp32",
        recompute="none", shard=0,
    ).save(tmp_path / "plan.json")  # fmt: skip
    twins.save_weights(model, tmp_path / "weights.npz")
    of_torch = torch_losses(tmp_path / "plan.json")

    abstract = nnx.eval_shape(lambda: gpt2_flax.create(twins.flax_config()))
    sample = {"input_ids": jax.ShapeDtypeStruct((twins.BATCH, twins.LENGTH), jnp.int32)}
    twin = sw.capture(abstract, sample, gpt2_flax.next_token_loss)
    plan = sw.Plan.load(tmp_path / "plan.json").rebind(twin)
    optimizer = optax.adamw(twins.LEARNING_RATE, eps=twins.EPSILON, weight_decay=twins.WEIGHT_DECAY)
    train = sw.train_step(gpt2_flax.next_token_loss, optimizer, plan, devices=jax.devices()[:4])
    state = train.init(twins.flax_model(tmp_path / "weights.npz"))
    of_jax = []
    for batch in twins.batches(STEPS):
        state, loss = train(state, {"input_ids": batch})
        of_jax.append(float(loss))
    assert len(of_torch) == STEPS
    Comparison().values(of_jax, of_torch, relative=0, absolute=1e-4).require()
    assert of_jax[0] - of_jax[-1] > 0.1, "nothing was learnt, so nothing was compared"
