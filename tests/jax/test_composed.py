"""Recompute, offload, divided gradients, stages, replicas and a tensor axis in one run, dropout on: losses of 20 steps
and first gradients are those of the unsplit model."""

from typing import Any

import jax
import pytest

from shardwright.core.schedule.actions import Kind
from tests.jax.test_tensor_parallel_models import plan_of, require_same

pytestmark = pytest.mark.usefixtures("quick_compilation")

DEGREES = {"pp": 2, "tp": 2, "dp": 2}
MIXED = {"h.0": "offload", "h.1": "full"}


@pytest.mark.parametrize(
    ("schedule", "recompute", "shard"),
    [
        ("zb-h1", MIXED, 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("1f1b", MIXED, 2),
                ("zb-h1", "full", 2),
                ("zb-h1", "elementwise", 1),
                ("zb-h1", {"h.*": "offload"}, 3),
            )
        ),
    ],
    ids=str,
)
def test_all_at_once_trains_as_the_unsplit_model(schedule: str, recompute: Any, shard: int) -> None:
    plan = plan_of("gpt2", **DEGREES, schedule=schedule, recompute=recompute, shard=shard)
    assert plan.mesh.size == len(jax.devices()) == 8
    asked = set(recompute.values()) if isinstance(recompute, dict) else {recompute}
    assert asked <= set(plan.unit_modes)
    assert plan.decision.shard == shard
    kinds = {action.kind for order in plan.build_schedule().table for action in order}
    assert (Kind.WEIGHT_GRAD in kinds) == (schedule == "zb-h1")
    require_same("gpt2", plan)
