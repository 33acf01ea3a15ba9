"""Plans that the search finds by itself for 4 and 8 local ranks train in both frameworks, in the memory predicted."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import found_plans

from shardwright.backends.capabilities import JAX, TORCH

OFTEN = "4 ranks of 11 MiB, batch 16"
"""Where memory decides what is found."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == OFTEN else pytest.mark.slow) for name in found_plans.CASES]
)
def test_what_is_found_is_what_both_runtimes_carry_out(name: str) -> None:
    case = found_plans.CASES[name]
    for plan in (found_plans.torch_plan(case), found_plans.jax_plan(case)):
        d = plan.decision
        policy = {"recompute": d.recompute, "shard": d.shard, "shard_group": d.shard_group, "dp": d.dp}
        assert [runtime.lack(**policy) for runtime in (TORCH, JAX)] == [None, None]
        assert max(plan.predicted.peak_memory_bytes) <= min(plan.provenance.device_memory_bytes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(found_plans.CASES))
def test_a_found_plan_trains_in_both(name: str) -> None:
    plan = found_plans.torch_plan(found_plans.CASES[name])
    of_torch, of_jax = found_plans.run_torch(name, plan), found_plans.run_jax(name)
    assert of_jax["losses"] == pytest.approx(of_torch["losses"], rel=1e-5)
    assert of_torch["losses"][0] - of_torch["losses"][-1] > 0.2, "nothing was learnt, so nothing was compared"
    for measured, predicted in zip(of_torch["peaks"], plan.predicted.peak_memory_bytes, strict=True):
        # What is gathered of shared parameters is counted unit by unit, tied ones twice.
        assert measured <= predicted <= (1.03 if plan.decision.shard < 2 else 1.2) * measured
    rows = (of_jax["peaks"], of_jax["predicted"], of_jax["compiled"])
    for measured, predicted, compiled in zip(*rows, strict=True):
        # Most above where everything is recomputed.
        assert 0.85 * measured <= predicted <= 1.2 * measured
        assert compiled == pytest.approx(measured, rel=0.03)
