"""The simulation that plans of jobs call: the package's own, or plain list scheduling where it has none."""

import importlib.util
import sys
from types import ModuleType

import pytest

from tests.core.jobs.stand_in import list_schedule


@pytest.fixture(autouse=True)
def simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("shardwright.core.jobs.simulate") is not None:
        return
    simulate, policies = ModuleType("simulate"), ModuleType("policies")
    simulate.simulate_jobs = list_schedule  # type: ignore[attr-defined]
    policies.policy_names = lambda: ("sharded-lrtf", "fifo")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shardwright.core.jobs.simulate", simulate)
    monkeypatch.setitem(sys.modules, "shardwright.core.jobs.policies", policies)
