"""What users do wrong with sharded state, precision and optimizers: each is named, on every rank, with what to do."""

import json

import pytest
import torch
import torch.distributed as dist

import shardwright.torch as sw
from shardwright.backends.torch.machine import data_groups
from shardwright.backends.torch.machine.process import Launch, start
from shardwright.core.errors import ClusterError, MissingCapabilityError
from shardwright.torch.config import read_config
from tests.torch.launch import on_ranks

UNSCALE = "call scaler.unscale_(optimizer) before model.clip_grad_norm_"
WRAP = "wrap it, sw.DistributedOptimizer(optimizer)"
SHAPE = "changed the size of value"
REFUSED = {
    "clipped": UNSCALE, "clipped, pp": UNSCALE, "clipped, shard 3": UNSCALE, "clipped masters": UNSCALE,
    "before": WRAP, "before, shard 3": WRAP, "before, pp": WRAP, "before, plain": "trained 6 of 6 parameters",
    "hook": SHAPE, "hook, bf16": SHAPE, "module hook": SHAPE, "hook, pp": SHAPE,
    "outside": "nothing sums its gradients over the 2 replicas",
}  # fmt: skip


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    out = tmp_path_factory.mktemp("bad") / "input.json"
    outcome = on_ranks("bad_input.py", 2, str(out), *REFUSED, timeout_s=120)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_is_refused_on_every_rank(refused: dict[str, list[str]], case: str) -> None:
    for error in refused[case]:
        assert REFUSED[case] in error


def test_two_precisions_at_once_are_refused() -> None:
    with pytest.raises(sw.ShardwrightError, match="bf16 and fp16 are both True: steps compute in one of them"):
        read_config({"bf16": True, "fp16": True})


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        ({"pipeline_parallel_degree": 3}, 8, "do not divide the 8 ranks that are running: start a multiple of 3"),
        ({"tensor_parallel_degree": 3, "ddp": True}, 4, "choose degrees that divide 4"),
        ({"ddp": True, "shard": 3, "shard_group": 3}, 8, "3 replicas are to share state .* choose a divisor of 8"),
        ({"ddp": True, "sharded_data_parallel_degree": 4, "pipeline_parallel_degree": 2}, 4, "choose a divisor of 2"),
    ],
)
def test_degrees_and_groups_that_do_not_divide_are_refused(given: dict, ranks: int, said: str) -> None:
    with pytest.raises(sw.ShardwrightError, match=said):
        read_config(given).mesh(ranks)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shard": 4}, "shard=4: expected 0, 1, 2 or 3"), ({"shard": True}, "shard=True"),
        ({"shard": 1}, "ddp is False"), ({"ddp": True, "shard_group": 2}, "nothing is sharded"),
        ({"shard_group": 0, "shard": 1, "ddp": True}, "shard_group=0: expected a number of replicas"),
        ({"fp16": 1}, "fp16=1: expected True or False"), ({"log_every": True}, "log_every=True"),
        ({"log_every": -1}, "log_every=-1: expected a number of steps"),
    ],
)  # fmt: skip
def test_values_that_are_none_are_refused(given: dict, said: str) -> None:
    with pytest.raises(sw.ShardwrightError, match=said):
        read_config(given)


@pytest.fixture
def group() -> None:
    start(Launch("none"), torch.device("cpu"), 30.0)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_backend_without_reduce_scatter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: object, **__: object) -> None:
        raise RuntimeError("Backend mpi does not support _reduce_scatter_base")

    data_groups.require_reduce_scatter(dist.group.WORLD, torch.device("cpu"))
    monkeypatch.setattr(data_groups, "reduce_scatter_single", lacks)
    with pytest.raises(
        MissingCapabilityError, match=r"backend 'gloo' has no reduce-scatter .*does not support.*'nccl'"
    ):
        data_groups.require_reduce_scatter(dist.group.WORLD, torch.device("cpu"))


@pytest.mark.usefixtures("group")
def test_a_group_that_does_not_carry_the_devices_tensors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwright.backends.torch.machine.process.device_types", lambda group: ["cuda"])
    with pytest.raises(ClusterError, match=r"carries tensors of cuda alone, and this rank computes on cpu"):
        start(Launch("none"), torch.device("cpu"), 30.0)
