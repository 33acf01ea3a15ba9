"""`shardwright plan --from-smp`: keys of SageMaker's configuration as pins."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.errors import PlanWarning
from tests.cli.conftest import Ran, run

KEYS = {"partitions": 2, "microbatches": 2, "ddp": True, "shard_optimizer_state": True, "bf16": True}


def planned(models: Path, tmp_path: Path, keys: Any, *more: object, batch: int = 16) -> Ran:
    file = tmp_path / "config.json"
    file.write_text(keys if isinstance(keys, str) else json.dumps(keys), encoding="utf-8")
    cluster = ("--cluster", "h100", "--devices-per-node", 8, "--batch", batch)
    return run("plan", f"{models}/torch_models.py:with_loss", *cluster, "--from-smp", file, "--json", *more)


@pytest.mark.parametrize(
    "wrapped",
    [
        KEYS,
        {"smdistributed": {"modelparallel": {"enabled": True, "parameters": KEYS}}},
        {"mp_parameters": json.dumps(KEYS)},
    ],
    ids=["keys", "distribution", "hyperparameters"],
)
def test_keys_are_pins(models: Path, tmp_path: Path, wrapped: Any) -> None:
    ran = planned(models, tmp_path, wrapped)
    assert ran.code == 0, ran.err
    decision = ran.document["decision"]
    given = {
        "pp": 2, "tp": 1, "dp": 4, "microbatch": 2, "schedule": "interleaved", "shard": 1, "precision": "bf16",
        "placement_order": "DPT",
    }  # fmt: skip
    assert given.items() <= decision.items()
    assert "recompute" not in ran.document["provenance"]["pinned"], "what no key says is searched"


def test_defaults_and_what_shards_are_pins_too(models: Path, tmp_path: Path) -> None:
    keys = {"ddp": True, "sharded_data_parallel_degree": 4, "sdp_hierarchical_allgather": False, "bf16": True}
    with pytest.warns(PlanWarning, match="plans have nothing for sdp_max_live_parameters"):
        ran = planned(models, tmp_path, keys | {"sdp_param_persistence_threshold": 100, "sdp_max_live_parameters": 9})
    assert ran.code == 0, ran.out
    given = {"shard": 3, "shard_group": 4, "hierarchical_gathers": False, "whole_below_bytes": 200, "dp": 8}
    assert given.items() <= ran.document["decision"].items()
    alone = planned(models, tmp_path, {"partitions": 8, "shard_optimizer_state": True})
    assert alone.code or alone.document["decision"]["shard"] == 0


def test_the_weight_of_memory_takes_the_module_tree(models: Path, tmp_path: Path) -> None:
    ran = planned(models, tmp_path, KEYS | {"memory_weight": 0.3})
    assert ran.code == 0, ran.err
    options = dict(ran.document["input"]["options"])
    assert (options["partitioner"], options["memory_weight"]) == ("tree", 0.3)


def test_options_stand_beside_them(models: Path, tmp_path: Path) -> None:
    ran = planned(models, tmp_path, KEYS, "--recompute", "full", "--pp", 2)
    assert ran.code == 0, ran.err
    assert ran.document["decision"]["recompute"] == "full"


@pytest.mark.parametrize(
    ("keys", "more", "said"),
    [
        ("{", (), "no JSON file that can be read"),
        ("[1]", (), "expected a JSON object of keys"),
        ({"partition": 2}, (), "did you mean 'partitions'"),
        ('{"mp_parameters": "{"}', (), "no JSON file that can be read"),
        ({"partitions": 3, "ddp": True}, (), "do not divide the 8 ranks"),
        ({"partitions": 2}, (), "ddp"),
        ({"microbatches": 5, "ddp": True}, (), "5 microbatches on each of 8 replicas do not divide a batch of 16"),
        ({"auto_partition": False, "ddp": True}, (), "leaves the cut to the marks of a script's modules"),
        ({"partitions": 2, "ddp": True}, ("--pp", 4), "pp=4 is given, and"),
    ],
)
def test_what_is_wrong_is_said(models: Path, tmp_path: Path, keys: Any, more: tuple[object, ...], said: str) -> None:
    ran = planned(models, tmp_path, keys, *more)
    assert ran.code != 0
    assert said in ran.document["error"]["message"]
