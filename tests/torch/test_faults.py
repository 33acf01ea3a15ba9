"""One rank fails, in the model, in its body, in its loader, by a signal or at the start: every other one ends soon and
says which, at which stage and action. What only takes long is no fault."""

import json
import os
import re
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import pytest

from tests.torch.forked import SHARED, shared_by
from tests.torch.launch import ROOT, WORKERS, environment

SOON_S = 20.0
"""Far below the timeout of waits, which is 60 s; a busy machine needs some of it."""
STOPPED_S = 4.0

CASES: dict[str, dict[str, Any]] = {
    "model": {"fault": "raise", "where": "forward", "victim": 3, "pp": 2, "dp": 2},
    "tensor axis": {"fault": "raise", "where": "backward", "victim": 1, "tp": 2},
    "body": {"fault": "raise", "where": "body", "victim": 1, "dp": 2},
    "loader": {"fault": "raise", "where": "loader", "victim": 0, "pp": 2},
    "memory": {"fault": "memory", "where": "backward", "victim": 1, "pp": 2},
    "killed": {"fault": "kill", "where": "forward", "victim": 0, "tp": 2},
    "stopped": {"fault": "stop", "where": "forward", "victim": 1, "pp": 3, "timeout_s": STOPPED_S},
    "stopped host": {"fault": "stop", "where": "backward", "victim": 0, "dp": 2, "timeout_s": STOPPED_S},
    "stopped host between steps": {"fault": "stop", "where": "loader", "victim": 0, "dp": 2, "timeout_s": STOPPED_S},
    "long": {"fault": "hold", "where": "forward", "victim": 1, "pp": 2, "timeout_s": 1.5},
    "port": {"fault": "port", "pp": 2},
    "missing": {"fault": "missing", "victim": 1, "pp": 3, "timeout_s": 2.0},
    "twice": {"fault": "twice", "victim": 2, "pp": 3},
    "world": {"fault": "world", "victim": 1, "pp": 1, "dp": 2},
    "config": {"fault": "config", "victim": 1, "pp": 2},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """How the ranks of every case ended. The cases are run by one process, whose forks they are."""
    folder = tmp_path_factory.mktemp("faults")
    temporary = folder / "temporary"
    temporary.mkdir()
    given = folder / "cases.json"
    given.write_text(json.dumps([{"case": case, "limit_s": 60.0} for case in CASES.values()]), encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(WORKERS / "faulty.py"), str(given), str(folder / "ranks")], capture_output=True, text=True,
        timeout=400, env=environment() | {"TMPDIR": str(temporary)}, cwd=ROOT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    left = [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor")]  # torch's cache
    assert not left, "files are left behind"
    found = {name: case["ended"] for name, case in zip(CASES, json.loads(ended.stdout.splitlines()[-1]), strict=True)}
    shared = {name for case in found.values() for end in case for name in end["shared"]}
    assert not shared & set(os.listdir(SHARED)), "shared memory is left behind"
    return found


def survivors(name: str, found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The ranks but the victim, all of which ended by themselves, with an error, and left nothing behind."""
    ended = found[name]
    others = [end for rank, end in enumerate(ended) if rank != CASES[name]["victim"]]
    assert len(others) == len(ended) - 1 >= 1
    for end in others:
        assert not end["was_killed"], end["output"][-3000:]
        assert end["code"] not in (0, None)
        assert not end["left"]
    return others


def seconds(name: str, found: dict[str, list[dict[str, Any]]]) -> float:
    """From the fault to the last end."""
    fault = min(float(end["noted"]["fault"]) for end in found[name] if "fault" in end["noted"])
    return max(float(end["at"]) for end in found[name]) - fault


@pytest.mark.parametrize(
    ("name", "at"),
    [
        (
            "model",
            r"rank 3 \(pp 1, dp 1\): stage 1, action 1F0, microbatch 0, in layers\.\d \(call 0\): failed: Key",
        ),
        ("tensor axis", r"rank 1 \(tp 1\): stage 0, action 0B0, microbatch 0: failed: KeyError: 'a fault in the backw"),
        ("loader", r"rank 0 \(pp 0\): between steps: failed: KeyError: 'a fault in the loader'"),
        ("memory", r"rank 1 \(pp 1\): stage 1, action 1B0, microbatch 0: failed: RuntimeError: .*memory"),
    ],
)
def test_an_error_is_told_to_all_ranks(found: dict[str, list[dict[str, Any]]], name: str, at: str) -> None:
    """The peers' errors name the rank, where it was and its error, and where they themselves were."""
    for end in survivors(name, found):
        error = end["noted"]["error"]
        assert "PeerError" in error
        assert re.search(at, error, re.DOTALL), error
        assert re.search(r"PeerError: rank \d \(.*\): .*: waited [\d.]+ s for ", error), error
    assert seconds(name, found) < SOON_S


def test_after_an_error_in_the_body_on_one_rank_all_ranks_may_go_on(found: dict[str, list[dict[str, Any]]]) -> None:
    """It is told to all ranks before any messages travel, and the next step runs."""
    (peer,) = survivors("body", found)
    assert "recording the step failed on rank 1: KeyError: 'a fault in the body'" in peer["noted"]["first"]
    assert [end["noted"]["again"] for end in found["body"]] == ["", ""]


@pytest.mark.parametrize("name", ["model", "tensor axis", "memory"])
def test_the_failing_rank_keeps_its_error_and_says_where(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    error = found[name][CASES[name]["victim"]]["noted"]["first"]
    assert ("KeyError: 'a fault" in error) or "RuntimeError" in error
    assert re.search(r"\[shardwright\] rank \d \(.*\): stage \d, action \d[FB]\d, microbatch \d", error), error


@pytest.mark.parametrize("name", ["model", "tensor axis", "memory"])
def test_the_step_after_is_refused_by_what_failed(found: dict[str, list[dict[str, Any]]], name: str) -> None:
    """On every rank that tries one, the one that failed among them."""
    tried = [end["noted"]["again"] for end in found[name] if "again" in end["noted"]]
    assert len(tried) == len(found[name])
    for error in tried:
        assert "no step can be run any more" in error
        assert "a fault in the" in error or "memory" in error
        assert "batches of the same shapes" not in error


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("killed", r"action 0F0.* waited [\d.]+ s for tp peers.* rank 0 ended without a word"),
        (
            "stopped",
            r"waited [\d.]+ s for .* rank 1 has given no sign of life for [45] s; the last was 'rank 1",
        ),
        ("stopped host", r"rank 0 at 127\.0\.0\.1:\d+, which holds the store of the run, has given no sign of life"),
        (
            "stopped host between steps",
            r"rank 0 at 127\.0\.0\.1:\d+, which holds the store of the run, has given no sign of life",
        ),
    ],
)
def test_a_rank_that_says_nothing_more_is_named(found: dict[str, list[dict[str, Any]]], name: str, at: str) -> None:
    for end in survivors(name, found):
        assert re.search(at, end["noted"]["error"], re.DOTALL), end["noted"]["error"]
    assert seconds(name, found) < SOON_S


def test_what_takes_long_is_no_fault(found: dict[str, list[dict[str, Any]]]) -> None:
    """Three times the timeout in one call that keeps the interpreter to itself, so that no thread of it can speak."""
    assert [end["noted"].get("done") for end in found["long"]] == ["", ""], found["long"][0]["output"][-3000:]
    assert [end["code"] for end in found["long"]] == [0, 0]
    assert seconds("long", found) > 3 * CASES["long"]["timeout_s"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "port",
            (r"rank 0 cannot listen at 127.0.0.1:\d+.*Set MASTER_PORT", r"what listens at 127.0.0.1:\d+ is no"),
        ),
        ("missing", (r"ranks 1 of 3 did not come to 127.0.0.1:\d+ within 2 s",) * 2),
        ("twice", (r"rank 1 came twice, as process \d+ on \S+ and as process \d+ on",) * 3),
        ("world", (r"rank 1 .*was started for a world of 3 ranks, and rank 0 for one of 2: give every",) * 2),
        (
            "config",
            (r"sw.init failed on rank 1: .*microbatches=0: expected a", r"microbatches=0: expected a whole n"),
        ),
    ],
)
def test_a_run_that_cannot_start_says_why_on_every_rank(
    found: dict[str, list[dict[str, Any]]], name: str, said: tuple[str, ...]
) -> None:
    ended = found[name]
    assert len(ended) == len(said)
    for end, wanted in zip(ended, said, strict=True):
        assert end["code"] == 1
        assert re.search(wanted, end["noted"]["error"], re.DOTALL), end["noted"]["error"]


def test_shared_memory_is_found_with_the_process_that_has_it() -> None:
    mine = SharedMemory(create=True, size=1)
    try:
        assert mine.name in shared_by(os.getpid())
        assert mine.name not in shared_by(os.getppid())
        mine.close()
        assert mine.name not in shared_by(os.getpid())
    finally:
        mine.unlink()
