"""Lengths of slices: how long the search takes, what unequal lengths bring, and TeraPipe's planner on the same tables.

    python benchmarks/slice_lengths.py [--terapipe CHECKOUT]

Tables are of 2,048 tokens in steps of 8 on 48 stages: a transformer's seconds by its FLOPs and the tokens before a
slice, with launches and short slices at a part of the rate, and tables of random costs. `--terapipe` names a clone of
github.com/zhuohan123/terapipe, whose `latency_model.py` finds lengths by the paper's dynamic programme (it needs numba,
scikit-learn and tqdm); its search skips bounds closer than 10 µs to the one before, so its steps may be longer.
"""

import argparse
import importlib
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import claims
import numpy as np

from shardwright.core.slices.lengths import Seconds, best_lengths

TOKENS, STEP, STAGES = 2048, 8, 48
LIMIT_S = 10.0
GAP_S = 1e-5
"""The least difference of two bounds that TeraPipe's planner tries."""


def transformer(hidden: int, rate: float, launch_s: float, least: int) -> Seconds:
    """The seconds of a layer, forward and backward, at ``rate`` FLOP/s; slices shorter than ``least`` take as long."""

    def seconds(length: int, context: int) -> float:
        products = 72 * max(length, least) * hidden**2
        attention = 12 * length * (context + length / 2) * hidden
        return launch_s + (products + attention) / rate

    return seconds


def random_costs(seed: int) -> Seconds:
    table = np.random.default_rng(seed).uniform(1e-3, 2e-2, (TOKENS // STEP + 1, TOKENS // STEP + 1))

    def seconds(length: int, context: int) -> float:
        return float(table[length // STEP, context // STEP]) * (1 + length / 256)

    return seconds


CASES: dict[str, Seconds] = {
    "175B, 2 layers a stage": transformer(12288, 2 * 40e12, 4e-3, 32),
    "13B, tensor axis of 8": transformer(5120, 8 * 40e12, 2e-3, 128),
    "1B": transformer(2048, 40e12, 1e-3, 256),
    "random": random_costs(0),
}


def best_uniform_s(cost: Seconds) -> float:
    """The shortest step of slices of one length."""

    def step_s(length: int) -> float:
        starts = range(0, TOKENS, length)
        seconds = [cost(min(length, TOKENS - start), start) for start in starts]
        return sum(seconds) + (STAGES - 1) * max(seconds)

    return min(step_s(length) for length in range(STEP, TOKENS + 1, STEP))


def peer_s(planning: Callable[..., Any], cost: Seconds) -> float:
    """The shortest step that TeraPipe's planner finds, over the bounds that it tries."""
    many = TOKENS // STEP
    grid = np.full((2, many + 1, many + 1), np.inf)
    for length in range(1, many + 1):
        for context in range(many - length + 1):
            grid[1, length, context] = cost(length * STEP, context * STEP)
    best, last = np.inf, 0.0
    for bound in np.unique(grid[np.isfinite(grid)]):
        if bound * STAGES > best:
            break
        if bound - last >= GAP_S:
            last = bound
            best = min(best, planning(grid, 1, TOKENS, STAGES, bound)[0])
    return float(best)


def planner_in(checkout: Path) -> Callable[..., Any]:
    """TeraPipe's dynamic programme for one bound; its file asks for the settings of models that are not used here."""
    settings = types.ModuleType("transformer_models")
    settings.__dict__.update(MODEL_CONFIGS={}, BATCH_CONFIGS={})
    sys.modules["transformer_models"] = settings
    sys.path.insert(0, str(checkout))
    found: Callable[..., Any] = importlib.import_module("latency_model").planning
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terapipe", type=Path, help="a clone of TeraPipe's repository")
    asked = parser.parse_args()
    planning = None
    if asked.terapipe is not None:
        planning = planner_in(asked.terapipe)
    print("| costs | slices | longest | shortest | step, s | equal lengths, s | whole, s | TeraPipe's, s | search, s |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = {}
    for name, cost in CASES.items():
        began = time.process_time()
        found = best_lengths(cost, TOKENS, STAGES, step=STEP)
        took_s = time.process_time() - began
        uniform_s, whole_s = best_uniform_s(cost), STAGES * cost(TOKENS, 0)
        peer = peer_s(planning, cost) if planning else None
        rows[name] = {"search": took_s, "uniform": found.step_s / uniform_s, "peer": peer and found.step_s / peer}
        said = "" if peer is None else f"{peer:.5f}"
        print(
            f"| {name} | {len(found.lengths)} | {max(found.lengths)} | {min(found.lengths)} | {found.step_s:.5f} "
            f"| {uniform_s:.5f} | {whole_s:.5f} | {said} | {took_s:.2f} |",
            flush=True,
        )
    judged = claims.slice_lengths(rows)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
