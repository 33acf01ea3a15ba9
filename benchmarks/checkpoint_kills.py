"""Training runs whose ranks are killed: does every run end with the weights of one that was left alone?

    python benchmarks/checkpoint_kills.py                          # 1,500 kills, some hours on 2 cores
    python benchmarks/checkpoint_kills.py --count 60 --seed 1      # a sample
    python benchmarks/checkpoint_kills.py --minutes 20             # as many as that takes

Runs of one to four ranks, over stages, replicas, sharded state and a tensor axis, save after every step, every second
time in the background, and are killed again and again: one rank by SIGKILL, at a call of the file system in the middle
of saving, at a random moment after saving began, or between steps. After each kill every complete checkpoint is read
whole, and the newest must be no older than before. Then the run goes on from it; once it comes to its end its weights
are those of the run that was left alone, to the bit. Ranks are forks of one process that has imported the libraries.
Case n is the same under every --count of one seed, and --first goes on where another command ended. The exit code is 1
when a claim does not hold.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import claims

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "pp 2": (2, {"pipeline_parallel_degree": 2}),
    "dp 2": (2, {}),
    "dp 2, shard 3": (2, {"shard": 3}),
    "tp 2": (2, {"tensor_parallel_degree": 2}),
    "pp 2, dp 2, shard 1": (4, {"pipeline_parallel_degree": 2, "shard": 1}),
    "tp 2, dp 2, shard 3": (4, {"tensor_parallel_degree": 2, "shard": 3}),
}
STEPS = 6
IN_SAVING = ("fsync", "replace")
"""Calls of the file system that saving alone makes: a kill there is inside of it."""
LATEST_S = 0.3
"""A random moment is at most so many seconds after saving began."""


def kill_of(numbers: random.Random, ranks: int) -> str:
    """Who is killed, and when: three of five inside of saving, one soon after it began, one between steps."""
    rank = numbers.randrange(ranks)
    kind = numbers.randrange(5)
    if kind < 3:
        return f"{rank}:{numbers.choice(IN_SAVING)}:{numbers.randrange(1, 16 if rank == 0 else 8)}"
    if kind == 3:
        return f"{rank}:save:{numbers.randrange(1, 4)}:{numbers.uniform(0.001, LATEST_S):.3f}"
    return f"{rank}:step:{numbers.randrange(1, 4)}"


def unreadable(folder: Path) -> tuple[list[str], int]:
    """What cannot be read of the complete checkpoints of a folder, and the step of the newest."""
    from shardwright.core.checkpoint import folder as folders
    from shardwright.core.checkpoint.boxes import Box
    from shardwright.core.checkpoint.reader import Reader
    from shardwright.core.errors import CheckpointError

    wrong, newest = [], 0
    for tag, marker in folders.complete(folder):
        try:
            reader = Reader(folder / tag, marker)
            for name, tensor in reader.index.tensors.items():
                for _, data in reader.boxes(name, Box.whole(tensor.shape)):
                    data.sum()
        except CheckpointError as error:
            wrong.append(f"{tag}: {error}")
        newest = max(newest, marker.step)
    return wrong, newest


class Runs:
    """Runs under one configuration, and what was found of them."""

    def __init__(self, name: str, folder: Path) -> None:
        from tests.torch.launch import on_ranks

        self.name, self.folder, self._launch = name, folder, on_ranks
        self.ranks, self.degrees = CONFIGS[name]
        self.wrong: list[str] = []
        self.expected = ""
        self._newest = 0

    def _on(self, where: Path, *kill: str) -> tuple[int, str]:
        out = self.folder / "out.json"
        out.unlink(missing_ok=True)
        asked = (str(where), str(out), str(STEPS), json.dumps(self.degrees), *kill)
        outcome = self._launch("checkpoint_kills.py", self.ranks, *asked, timeout_s=60)
        return outcome.code, outcome.text

    def digest(self) -> str:
        found: dict[str, Any] = json.loads((self.folder / "out.json").read_text(encoding="utf-8"))
        return str(found["digest"])

    def undisturbed(self) -> None:
        code, text = self._on(self.folder / "undisturbed")
        if code:
            raise SystemExit(f"{self.name}: the run that is left alone fails: {text[-2000:]}")
        self.expected = self.digest()

    def go_on(self, kill: str) -> bool:
        """Start the run again, with a kill. Whether it was killed; else it came to its end, and begins anew."""
        where = self.folder / "run"
        code, text = self._on(where, kill)
        if code and "CheckpointError" in text:
            self.wrong.append(f"{self.name}, {kill}: {text[-600:]}")
        if code:
            wrong, newest = unreadable(where)
            self.wrong += [f"{self.name}, {kill}: {one}" for one in wrong]
            if newest < self._newest:
                self.wrong.append(
                    f"{self.name}, {kill}: the checkpoint of step {self._newest} is lost, {newest} is left"
                )
            self._newest = max(self._newest, newest)
            return True
        self.end(kill)
        return False

    def end(self, kill: str = "none") -> None:
        """Compare the weights at the end of a run, and begin another."""
        if self.digest() != self.expected:
            self.wrong.append(f"{self.name}, {kill}: not the weights of the run that was left alone")
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        self._newest = 0

    def finish(self) -> None:
        """Let the run that was killed last come to its end."""
        if (self.folder / "run").exists():
            code, text = self._on(self.folder / "run")
            if code:
                self.wrong.append(f"{self.name}: does not come to its end: {text[-600:]}")
            else:
                self.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1500, help="kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--minutes", type=float, default=1e9, help="end after so many, with what was found until then")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    begun = time.monotonic()
    inside, kills, launches = 0, Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for number, name in enumerate(CONFIGS):
            (Path(folder) / str(number)).mkdir()
            runs[name] = Runs(name, Path(folder) / str(number))
            at = time.monotonic()
            runs[name].undisturbed()
            print(f"{name}: a run that is left alone takes {time.monotonic() - at:.0f} s", flush=True)
        case = args.first
        while sum(kills.values()) < args.count and time.monotonic() < until:
            name = list(CONFIGS)[case % len(CONFIGS)]
            kill = kill_of(random.Random(f"{args.seed}/{case}"), runs[name].ranks)
            launches += 1
            if runs[name].go_on(kill):
                kills[name] += 1
                inside += kill.split(":")[1] in IN_SAVING
            case += 1
        for one in runs.values():
            one.finish()
    wrong = [said for one in runs.values() for said in one.wrong]
    total = sum(kills.values())
    print(f"{total} kills in {launches} starts, {inside} of them inside of saving, {time.monotonic() - begun:.0f} s")
    for name, count in kills.items():
        print(f"  {name:20} {count} kills")
    print(f"next: --first {case}")
    judged = claims.checkpoint_kills(total, inside, wrong, args.count if args.minutes > 1e8 else 1)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
