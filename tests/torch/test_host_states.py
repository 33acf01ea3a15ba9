"""Parameters and optimizer states on the host: two ranks in `workers/host_states.py`, and parts of it here."""

import gc

import pytest
import torch

import shardwright as sw
from shardwright.backends.torch.machine.host_store import MappedFile, is_in_file
from shardwright.core.errors import MissingCapabilityError, PlanError, ShardwrightError
from shardwright.torch.config import read_config
from tests.comparison import Comparison
from tests.core.toy import decoder
from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("host_states.py", 2, timeout_s=400)


@pytest.mark.parametrize("check", checks_in("host_states.py"))
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


@pytest.fixture(scope="module")
def outcome_of_all() -> Outcome:
    return on_ranks("host_states.py", 2, "--all", timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("check", checks_in("host_states.py"))
def test_more_splits_on_two_ranks(outcome_of_all: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome_of_all.text, outcome_of_all.text[-4000:]


def test_a_tensor_of_the_file_gives_its_block_back() -> None:
    store = MappedFile()
    first = store.tensor(5000, torch.float32)
    view = first[10:20].fill_(3.0)
    assert is_in_file(view.untyped_storage())
    assert not is_in_file(torch.ones(5000).untyped_storage())
    size = store._size
    del first
    gc.collect()
    assert store.tensor(5000, torch.float32).sum() == 0, "a block in use is no other's"
    assert store._size == 2 * size
    assert view.sum() == 30
    del view
    gc.collect()
    again = store.tensor(5000, torch.int32)
    assert store._size == 2 * size
    assert not again.any()


@pytest.mark.parametrize(
    "make", [lambda: torch.randn(3, 5), lambda: torch.randn(5, 3).T, lambda: torch.randn(9, 5)[::3]]
)
def test_what_is_kept_is_the_same(make: object) -> None:
    given, store = make(), MappedFile()  # type: ignore[operator]
    kept = store.kept(given)
    Comparison().equal(kept, given).require()
    assert is_in_file(kept.untyped_storage())
    assert store.kept(kept) is kept


def test_bad_input() -> None:
    with pytest.raises(ShardwrightError, match="offload_states='optimiser': expected 'none', 'optimizer' or 'param"):
        read_config({"offload_states": "optimiser"})
    with pytest.raises(ShardwrightError, match=r"offload_states='parameters' and shard=2: .*shard=3; leave out one"):
        read_config({"offload_states": "parameters", "shard": 2})
    with pytest.raises(PlanError, match=r"offload_states='optimizer' and shard=3: .*shard=2; leave out shard"):
        sw.plan(decoder(), sw.Cluster("cpu"), batch=4, offload_states="optimizer", shard=3)
    assert read_config({"offload_states": "optimizer", "shard_group": 2}).shard_level == 2
    assert (
        read_config({"offload_states": "parameters", "sharded_data_parallel_degree": 2, "ddp": True}).shard_level == 3
    )


def test_jax_refuses_such_a_plan() -> None:
    from shardwright.backends.jax import CAPABILITIES

    with pytest.raises(MissingCapabilityError, match="offload_states='optimizer', and the jax runtime"):
        CAPABILITIES.require_states("optimizer")
