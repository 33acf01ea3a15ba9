"""Cuts and schedules of pipelines with few microbatches against exhaustive search by the simulator.

    python benchmarks/few_microbatches.py [--cases 300] [--log few_microbatches.jsonl]

Every case is a chain of 6 to 14 unequal units on 2 to 4 ranks with one or two stages each and 2 to 8 microbatches, over
links of four kinds; in every third one memory binds (`tests/core/uneven.py`). The plan's step is compared with the
least over every cut and every schedule of the catalogue, each simulated, and each a plan that fits. Finished cases are
kept in `--log`, so that a run that was cut short goes on where it stopped.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims

from tests.core.uneven import exhaustive, random_case, searched

LIMIT = 0.005
"""The most by which a plan may be slower."""


def measured(seed: int) -> dict[str, Any]:
    case = random_case(seed)
    began = time.process_time()
    found = searched(case)
    ended = time.process_time()
    best = exhaustive(case)
    if found is None or best is None:
        raise SystemExit(f"case {seed}: the search finds {found}, enumeration {best}")
    return {
        "seed": seed, "ranks": case.ranks, "virtual": case.virtual_stages, "microbatches": case.microbatches,
        "memory": seed % 3 == 0, "found_s": found, "best_s": best[0], "schedule": best[1], "search_s": ended - began,
    }  # fmt: skip


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| cases | number | slower than the best, worst | mean | above 0.5% |", "|---|---|---|---|---|"]
    groups = [
        ("all", rows),
        ("memory binds", [row for row in rows if row["memory"]]),
        ("memory does not bind", [row for row in rows if not row["memory"]]),
        *((f"{m} microbatches", [row for row in rows if row["microbatches"] == m]) for m in range(2, 9)),
    ]
    for name, group in groups:
        if group:
            slower = [row["found_s"] / row["best_s"] - 1 for row in group]
            above = sum(not by <= LIMIT for by in slower)
            lines.append(f"| {name} | {len(group)} | {max(slower):.3%} | {statistics.fmean(slower):.4%} | {above} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=300)
    parser.add_argument("--log", type=Path, help="a file that keeps the finished cases")
    given = parser.parse_args()
    log: Path | None = given.log
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log is not None and log.exists() else []
    done = {row["seed"] for row in rows}
    for seed in range(given.cases):
        if seed in done:
            continue
        rows.append(measured(seed))
        if log is not None:
            with log.open("a") as file:
                print(json.dumps(rows[-1]), file=file)
    rows = [row for row in rows if row["seed"] < given.cases]
    print(table(rows))
    verdict = claims.few_microbatches([row["found_s"] / row["best_s"] - 1 for row in rows], given.cases, LIMIT)
    print(verdict.verdict())
    return verdict.exit_code


if __name__ == "__main__":
    sys.exit(main())
