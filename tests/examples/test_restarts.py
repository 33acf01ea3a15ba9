"""The example that goes on by itself: after a rank has died, on fewer ranks, and without a node that is gone."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.torch.forked import free_port
from tests.torch.launch import environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "restarts_torch.py"
LINE = re.compile(r"step +(\d+) +loss ([\d.]+) +on (\d+) ranks")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1"]


def run(folder: Path, ranks: int, *more: str) -> dict[int, tuple[float, int]]:
    """The loss of every step that was said last, and on how many ranks."""
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "2"]
    ran = subprocess.run(
        [*launcher, str(EXAMPLE), "--folder", str(folder), *more],
        env=environment(), timeout=400, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr[-4000:]
    return said(ran.stdout)


def said(text: str) -> dict[int, tuple[float, int]]:
    return {int(step): (float(loss), int(ranks)) for step, loss, ranks in LINE.findall(text)}


def require_same(found: dict[int, tuple[float, int]], wanted: dict[int, tuple[float, int]]) -> None:
    by_step = [{step: loss for step, (loss, _) in losses.items()} for losses in (found, wanted)]
    Comparison("losses").losses(*by_step, moving=1e-2).require("losses")


@pytest.mark.timeout(900)
def test_a_run_goes_on_after_a_death_and_on_fewer_ranks(tmp_path: Path) -> None:
    undisturbed = run(tmp_path / "undisturbed", 1, "--steps", "6")
    first = run(tmp_path / "disturbed", 2, "--steps", "4", "--die", "1:2")
    assert (tmp_path / "disturbed" / "died-1-2").exists()
    second = run(tmp_path / "disturbed", 1, "--steps", "6")
    assert sorted(second) == [4, 5], "it goes on where the run of two ranks ended"
    assert {ranks for _, ranks in first.values()} == {2}
    require_same(first | second, undisturbed)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_without_a_node_that_is_gone(tmp_path: Path) -> None:
    """Two agents of torchrun, one of which is killed with its ranks: the other starts again by itself."""
    steps = "40"
    undisturbed = run(tmp_path / "undisturbed", 2, "--steps", steps)
    port, folder = free_port(), tmp_path / "disturbed"

    def agent(hosts: int) -> subprocess.Popen[str]:
        store = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "restarts"]
        conf = ["--rdzv-conf", f"is_host={hosts},last_call_timeout=5,read_timeout=20"]
        sizes = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"]
        asked = [*TORCHRUN, *sizes, *store, *conf, str(EXAMPLE), "--folder", str(folder), "--steps", steps]
        return subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    agents = [agent(1), agent(0)]
    try:
        until = time.monotonic() + 300
        while not list(folder.glob("step_*/complete.json")):
            assert time.monotonic() < until, "the run does not begin"
            time.sleep(0.05)
        below = subprocess.run(["pgrep", "-P", str(agents[1].pid)], check=True, capture_output=True, text=True).stdout
        for process in [agents[1].pid, *map(int, below.split())]:
            os.kill(process, signal.SIGKILL)
        found: dict[int, tuple[float, int]] = {}
        lines: list[str] = []
        assert agents[0].stdout is not None
        for line in agents[0].stdout:  # the agent itself waits for the one that is gone, for minutes
            lines.append(line)
            found |= said(line)
            if int(steps) - 1 in found:
                break
        assert int(steps) - 1 in found, "".join(lines)[-4000:]
    finally:
        for each in agents:
            each.kill()
    assert {ranks for _, ranks in found.values()} == {1, 2}
    require_same(found, undisturbed)
