"""The maps of names by which checkpoints cross put twins' parameters beside each other as their plans do."""

from functools import cache
from typing import Any

import pytest

import shardwright as sw
from shardwright.core.errors import PlanError
from tests.twins import models
from tests.twins.capabilities import common
from tests.twins.crossing import BERT, NAMES

SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 2, "width": 64, "heads": 4, "length": 16},
    "bert": {"layers": 2, "width": 64, "heads": 4, "length": 16},
    "ncf": {"users": 64, "items": 32, "width": 8},
}


@cache
def plans(name: str) -> tuple[sw.Plan, ...]:
    graphs = common(*models.TWINS[name](**SIZES[name]))
    pins: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "microbatch": 2, "recompute": "none", "precision": "fp32"}
    return tuple(sw.plan(graph, sw.Cluster("cpu", devices_per_node=1), batch=2, shard=0, **pins) for graph in graphs)


def unaligned(name: str, names: Any) -> list[str]:
    return [each.field for each in sw.compare(*plans(name), names).differences if each.part == "names"]


@pytest.mark.parametrize("name", NAMES)
def test_a_map_is_the_alignment_of_the_plans(name: str) -> None:
    assert unaligned(name, NAMES[name]) == []


def test_what_a_map_relates_otherwise_is_named() -> None:
    swapped = {
        torch.replace("{part}", "query"): jax.replace("{part}", "key")
        for torch, jax in BERT.items()
        if "{part}" in torch
    }
    found = unaligned("bert", swapped | BERT)
    assert len(found) == 4  # weight and bias, of two layers


def test_a_parameter_that_a_map_lacks_is_named() -> None:
    assert len(unaligned("ncf", {"{side}_{kind}.weight": "{side}_{kind}.embedding"})) == 10


def test_models_that_are_no_twins_are_refused() -> None:
    with pytest.raises(PlanError, match="the models differ"):
        sw.compare(plans("gpt2")[0], plans("ncf")[1], "gpt2")
    with pytest.raises(PlanError, match="in jax"):
        sw.compare(plans("gpt2")[0], plans("gpt2")[0], "gpt2")
