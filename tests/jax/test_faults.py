"""Several processes: one fails, ends, falls silent or does not come, and every other one ends soon and says which."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwright.jax as sw

ROOT = Path(__file__).parents[2]
SOON_S = 25.0
"""Far below the timeout of 60 s; a busy machine needs some of it."""

CASES: dict[str, dict[str, Any]] = {
    "killed": {"fault": "kill", "victim": 0},
    "stopped": {"fault": "stop", "victim": 1, "timeout_s": 3.0},
    "raised": {"fault": "raise", "victim": 1},
    "nan": {"fault": "nan"},
    "port": {"fault": "port", "timeout_s": 1.0},
    "missing": {"fault": "missing", "victim": 1, "dp": 3, "timeout_s": 4.0},
    "twice": {"fault": "twice", "victim": 2, "dp": 3},
    "world": {"fault": "world", "victim": 1},
    "killed stage": {"fault": "kill", "victim": 1, "stages": True},
    "raised in a stage": {"fault": "raise", "victim": 0, "stages": True},
    "left stage": {"fault": "leave", "victim": 0, "stages": True, "timeout_s": 4.0},
    "another batch": {"fault": "batch", "victim": 1, "stages": True},
    "another call": {"fault": "call", "victim": 0, "stages": True},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """How the processes of every case ended. The cases are run by one process, whose forks they are."""
    folder = tmp_path_factory.mktemp("faults")
    given = folder / "cases.json"
    given.write_text(json.dumps([{"case": case, "limit_s": 70.0} for case in CASES.values()]), encoding="utf-8")
    alike = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=1",
    }
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests/jax/faulty.py"), str(given), str(folder / "ranks")], capture_output=True,
        text=True, timeout=500, env=os.environ | alike, cwd=ROOT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return {name: case["ended"] for name, case in zip(CASES, json.loads(ended.stdout.splitlines()[-1]), strict=True)}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "killed",
            r"process 1, step 3 of this process, stage 0: process 0 \(pid \d+ on .*\) ended without a word; the",
        ),
        ("stopped", r"process 0, step 3 .*: process 1 \(pid .*\) has given no sign of life for [34] s; the last was '"),
        (
            "raised",
            r"process 0, step 3 .*: process 1 \(pid .*\) failed, after step 2 of.*: KeyError: 'a fault in the l",
        ),
    ],
)
def test_who_fails_is_named_to_the_others(found: dict[str, list[dict[str, Any]]], name: str, said: str) -> None:
    ended, victim = found[name], CASES[name]["victim"]
    fault = float(ended[victim]["noted"]["fault"])
    (other,) = [end for rank, end in enumerate(ended) if rank != victim]
    assert not other["was_killed"], other["output"][-3000:]
    assert other["code"] == 1, other["output"][-3000:]
    assert re.search(rf"\[shardwright\] {said}", other["output"]), other["output"][-3000:]
    if name != "stopped":  # which is blocked in a collective, where nothing can be raised
        assert re.search(f"PeerError: {said}", other["noted"]["error"]), other["noted"]["error"]
    assert float(other["at"]) - fault < SOON_S
    assert sum(end["left"] for end in ended) == 0, "processes are left behind"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "port",
            (r"process 0 cannot listen at 127.0.0.1:\d+: Address already in use", r"does not answer as the hub of"),
        ),
        ("missing", (r"process 1 of 3 did not come to 127.0.0.1:\d+ within 4 s: look",) * 2),
        ("twice", (r"process 1 came twice, as pid \d+ on \S+ and as pid \d+ on",) * 3),
        ("world", (r"process 1 \(pid .* was started as one of 3, and process 0 as one of 2: give",) * 2),
    ],
)
def test_a_run_that_cannot_start_says_why_in_every_process(
    found: dict[str, list[dict[str, Any]]], name: str, said: tuple[str, ...]
) -> None:
    for end, wanted in zip(found[name], said, strict=True):
        assert end["code"] == 1, end["output"][-3000:]
        assert re.search(f"ClusterError: .*{wanted}", end["noted"]["error"], re.DOTALL), end["noted"]["error"]
        assert not end["left"], "processes are left behind"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "killed stage",
            r"process 0, (after )?step \d of this process, stage 0: process 1 \(pid .* ended without a word",
        ),
        ("raised in a stage", r"process 1, .*, stage 1: process 0 \(pid .*\) failed, after step 2 of.*: KeyError"),
        ("left stage", r"process 1, .*, stage 1: process 0 left the run"),
    ],
)
def test_a_stage_that_fails_ends_the_others(found: dict[str, list[dict[str, Any]]], name: str, said: str) -> None:
    victim = CASES[name]["victim"]
    other = found[name][1 - victim]
    assert not other["was_killed"], other["output"][-3000:]
    assert other["code"] == 1, other["output"][-3000:]
    assert re.search(rf"\[shardwright\] {said}", other["output"]), other["output"][-3000:]
    assert float(other["at"]) - float(found[name][victim]["noted"]["fault"]) < SOON_S
    assert sum(end["left"] for end in found[name]) == 0, "processes are left behind"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("another batch", r"PlanError: the processes do not have the same batch: .* process 1 differs from process 0"),
        ("another call", r"PlanError: the processes do not have the same call \(a step, train.init, train.params\)"),
    ],
)
def test_stages_of_processes_that_do_unlike_things(
    found: dict[str, list[dict[str, Any]]], name: str, said: str
) -> None:
    errors = [end["noted"].get("error", "") for end in found[name]]
    assert any(re.search(said, error) for error in errors), found[name]
    for end, error in zip(found[name], errors, strict=True):
        assert not end["was_killed"], end["output"][-3000:]
        assert re.search(said, error) or "PeerError" in error or "[shardwright]" in end["output"], end["output"][-3000:]
        assert end["code"] == 1


def test_all_processes_stop_at_the_same_step_that_is_not_finite(found: dict[str, list[dict[str, Any]]]) -> None:
    assert len(found["nan"]) == 2
    for end in found["nan"]:
        assert re.search(r"NonFiniteError: step 2: the loss is nan", end["noted"]["error"]), end["output"][-3000:]
        assert end["code"] == 1
        assert not end["left"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"coordinator_address": "here"}, r"coordinator_address='here': expected 'host:port'"),
        ({"coordinator_address": None}, r"coordinator_address=None: .* set JAX_COORDINATOR_ADDRESS"),
        ({"coordinator_address": "a:70000"}, r"expected 'host:port'"),
        ({"num_processes": "two"}, r"num_processes='two': expected a whole number"),
        ({"process_id": None}, r"process_id=None: .* set JAX_PROCESS_ID"),
        ({"process_id": 2}, r"process_id=2 of num_processes=2: expected a number from 0"),
        ({"wait_timeout_s": 0}, r"wait_timeout_s=0: expected a number of seconds above 0"),
        ({"wait_timeout_s": "60"}, r"wait_timeout_s='60': expected a number of seconds"),
    ],
)
def test_arguments_that_are_none(given: dict[str, Any], said: str) -> None:
    arguments = {"coordinator_address": "127.0.0.1:1", "num_processes": 2, "process_id": 1} | given
    with pytest.raises(sw.ShardwrightError, match=said):
        sw.init(**arguments)
