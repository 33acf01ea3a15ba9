"""Seeded faults in training runs: does every other rank end soon, and say which rank failed, and where?

    python benchmarks/faults.py                      # 200 faults under the default timeouts
    python benchmarks/faults.py --count 20 --seed 1  # a sample

Three of four cases are of PyTorch: runs of two to eight ranks over pp, dp and tp whose victim is killed, stopped,
raises in the model, in its backward, in the step's body or in the data loader, runs out of memory, or is started
wrongly; and runs in which something takes long, which is no fault. The fourth is of JAX: two to four processes.
The exit code is 1 when a survivor did not end by itself within 70 s, did not name the victim and where both were, or
left processes or files behind.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import claims

ROOT = Path(__file__).resolve().parents[1]
SOON_S = 70.0
WORKERS = {"torch": "tests/torch/workers/faulty.py", "jax": "tests/jax/faulty.py"}
LIMIT_S = 240.0
"""After which a case is ended. Longer than SOON_S, which counts from the fault."""
SHARE = 5
"""How many cases one process starts, before what it found is printed."""
WORLDS = ((2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2))
IN_STEPS = (
    ("raise", ("forward", "backward", "body", "loader")),
    ("kill", ("forward", "backward", "body", "loader")),
    ("exit", ("forward", "backward")),
    ("stop", ("forward", "backward", "body", "loader")),
    ("memory", ("forward", "backward")),
    ("sleep", ("forward", "loader")),
)
AT_START = ("port", "missing", "twice", "world", "config")
NO_FAULTS = ("sleep", "hold", "none")
JAX_IN_STEPS = (("kill", "loader"), ("stop", "loader"), ("raise", "loader"), ("raise", "trace"), ("exit", "loader"),
                ("leave", "loader"), ("sleep", "loader"), ("kill", "trace"))  # fmt: skip
JAX_AT_START = ("port", "missing", "twice", "world")


def cases(count: int, seed: int) -> list[dict[str, Any]]:
    """Of every seven cases one is a fault of the start."""
    numbers = random.Random(seed)
    found: list[dict[str, Any]] = []
    for number in range(count):
        if number % 4 == 3:
            found.append(jax_case(number // 4, numbers))
            continue
        pp, dp, tp = numbers.choice(WORLDS)
        case: dict[str, Any] = {"pp": pp, "dp": dp, "tp": tp, "victim": numbers.randrange(pp * dp * tp)}
        if number % 7 == 0:
            case["fault"] = numbers.choice(AT_START)
            case["victim"] = max(1, case["victim"])  # rank 0 has the list of who came
        else:
            case["fault"], places = IN_STEPS[number % len(IN_STEPS)]
            case["where"], case["step"] = numbers.choice(places), numbers.randrange(1, 4)
        if case["fault"] == "sleep":
            case["timeout_s"] = 4.0
        found.append(case)
    return found


def jax_case(number: int, numbers: random.Random) -> dict[str, Any]:
    """Of every five one is a fault of the start."""
    dp = numbers.choice((2, 3, 4))
    case: dict[str, Any] = {"framework": "jax", "dp": dp, "victim": numbers.randrange(dp)}
    if number % 5 == 0:
        case["fault"] = numbers.choice(JAX_AT_START)
        case["victim"] = max(1, case["victim"])
    else:
        case["fault"], case["where"] = JAX_IN_STEPS[number % len(JAX_IN_STEPS)]
        case["step"] = numbers.randrange(1, 4)
    if case["fault"] == "sleep":
        case["timeout_s"] = 2.0
    return case


def jax_complaints(case: dict[str, Any], ended: list[dict[str, Any]], begun: float) -> list[str]:
    """What is wrong with how the processes of a case of JAX ended."""
    found = []
    for rank, end in enumerate(ended):
        at_start = case["fault"] in JAX_AT_START
        if rank == case["victim"] and not at_start:
            continue
        said = end["output"] + end["noted"].get("error", "")
        if end["was_killed"] or end["code"] in (0, None) or float(end["at"]) - begun > SOON_S:
            found.append(f"process {rank} ended with {end['code']} after {float(end['at']) - begun:.1f} s")
        elif at_start and "ClusterError" not in said:
            found.append(f"process {rank} said: {said[-300:]}")
        elif not at_start and not re.search(rf"process {rank}, .*: process {case['victim']}\b", said):
            found.append(f"process {rank} does not name process {case['victim']}: {said[-300:]}")
    return found


def complaints(case: dict[str, Any], ended: list[dict[str, Any]]) -> list[str]:
    """What is wrong with how the ranks of a case ended."""
    found = [f"rank {r} left {end['left']} processes" for r, end in enumerate(ended) if end["left"]]
    victim, fault = case["victim"], case["fault"]
    if fault in NO_FAULTS:
        return found + [
            f"rank {r} ended with {end['code']}: {end['noted'].get('error', '')[:300]}"
            for r, end in enumerate(ended)
            if end["code"] != 0 or "done" not in end["noted"]
        ]
    others = [(r, end) for r, end in enumerate(ended) if r != victim or fault in AT_START]
    if fault in AT_START:
        begun = max(float(end["noted"]["began"]) for end in ended)
    elif any("fault" in end["noted"] for end in ended):
        begun = min(float(end["noted"]["fault"]) for end in ended if "fault" in end["noted"])
    else:
        return [*found, "the fault did not happen"]
    if case.get("framework") == "jax":
        return found + jax_complaints(case, ended, begun)
    for rank, end in others:
        error = end["noted"].get("error", "")
        took_s = float(end["at"]) - begun
        if end["was_killed"] or end["code"] in (0, None):
            found.append(f"rank {rank} did not end by itself with an error: {end['code']}")
        elif took_s > SOON_S:
            found.append(f"rank {rank} took {took_s:.1f} s")
        elif fault in AT_START:
            if not re.search(r"ClusterError|DisagreementError|microbatches=0", error):
                found.append(f"rank {rank} said: {error[:300]}")
        elif not re.search(
            rf"rank {rank} \(.*\): .+: waited [\d.]+ s for|\[shardwright\] rank {rank} ", error, re.DOTALL
        ):
            found.append(f"rank {rank} does not say where it was: {error[:300]}")
        elif not re.search(rf"rank {victim}\b", error.partition("; ")[2] or error):
            found.append(f"rank {rank} does not name rank {victim}: {error[:300]}")
        elif fault == "raise" and "a fault in the" not in error:
            found.append(f"rank {rank} does not say what happened on rank {victim}: {error[:300]}")
    if fault in ("raise", "memory") and case["where"] != "loader":
        said = ended[victim]["noted"].get("first", "")
        if "[shardwright] rank" not in said:
            found.append(f"rank {victim} does not say where it failed: {said[:300]}")
    return found


def run(given: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run cases one after the other, those of each framework as forks of one process."""
    folder.mkdir()
    of_jax = [case for case in given if case.get("framework") == "jax"]
    found = run_of("torch", [case for case in given if case not in of_jax], folder / "torch")
    return found + run_of("jax", of_jax, folder / "jax")


def run_of(framework: str, given: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Run cases of one framework."""
    if not given:
        return []
    folder.mkdir()
    file = folder / "cases.json"
    bare = [{name: value for name, value in case.items() if name != "framework"} for case in given]
    file.write_text(json.dumps([{"case": case, "limit_s": LIMIT_S} for case in bare]), encoding="utf-8")
    (folder / "temporary").mkdir()
    alike = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder / "temporary")}
    alike["JAX_PLATFORMS"] = "cpu"
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, str(ROOT / WORKERS[framework]), str(file), str(folder / "ranks")],
        stdout=subprocess.PIPE, text=True, env=os.environ | alike | {"PYTHONPATH": paths}, check=True,
    )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    left = [p.name for p in (folder / "temporary").iterdir() if not p.name.startswith("torchinductor")]
    for case, asked in zip(found, given, strict=True):
        case["case"] |= asked
        case["complaints"] = complaints(case["case"], case["ended"])
    if left:
        found[-1]["complaints"].append(f"files are left: {left}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4, help="how many cases run at once")
    arguments = parser.parse_args()
    given = cases(arguments.count, arguments.seed)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        shares = [given[first : first + SHARE] for first in range(0, len(given), SHARE)]
        found = []
        for part in pool.map(run, shares, [Path(folder) / str(number) for number in range(len(shares))]):
            for case in part:
                found.append(case)
                said = "; ".join(case["complaints"]) or "as it should be"
                print(f"{len(found)}: {json.dumps(case['case'])}: {said} ({slowest_s(case):.1f} s)", flush=True)
    bad = [case for case in found if case["complaints"]]
    print("\n| fault | runs | as it should be | slowest, s |\n|---|---|---|---|")
    for case in found:
        case["kind"] = f"{case['case']['fault']}{', JAX' if case['case'].get('framework') == 'jax' else ''}"
    counts = Counter(case["kind"] for case in found)
    for fault, count in sorted(counts.items()):
        of = [case for case in found if case["kind"] == fault]
        print(f"| {fault} | {count} | {count - sum(case in bad for case in of)} | {max(map(slowest_s, of)):.1f} |")
    left = {name for case in found for end in case["ended"] for name in end["shared"]} & set(os.listdir("/dev/shm"))
    print(f"\n{len(found) - len(bad)} of {len(found)} ended as they should, in {time.monotonic() - begun:.0f} s")
    reasons = {f"{n}: {json.dumps(case['case'])}": case["complaints"] for n, case in enumerate(found)}
    judged = claims.faults(reasons, sorted(left), arguments.count)
    print(judged.verdict())
    return judged.exit_code


def slowest_s(case: dict[str, Any]) -> float:
    """From the fault, or the last start, to the end of the last rank."""
    noted = [end["noted"] for end in case["ended"]]
    begun = [float(n["fault"]) for n in noted if "fault" in n] or [max(float(n["began"]) for n in noted)]
    return max(float(end["at"]) for end in case["ended"]) - min(begun)


if __name__ == "__main__":
    sys.exit(main())
