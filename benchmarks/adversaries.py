"""Ranks that disagree: is each disagreement refused on every rank, or without effect?

    python benchmarks/adversaries.py                        # 300 random trials on four processes
    python benchmarks/adversaries.py --trials 20 --seed 3
    python benchmarks/adversaries.py --only 17 --seed 3     # one of them again

In each trial one rank differs from the others in one thing: a key of the configuration, the plan, the model, a batch,
the mode, the seed, the schedule, the optimizer, or the call that it makes; before the first step or at a later one. A
trial is passed when every rank raises a ShardwrightError within 70 s, with one text on all but a rank that failed by
itself; or when all ranks train to the losses and weights of the model that is not split. The exit code is 1 when any
trial is not passed.
"""

import argparse
import collections
import gc
import math
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import claims
import torch
import torch.distributed as dist
from adversary_trials import (
    MESHES,
    MICROBATCHES,
    RANKS,
    STEPS,
    WIDTH,
    Run,
    Strange,
    Trial,
    build,
    draw,
    loss_of,
    reference,
)

import shardwright.torch as sw
from shardwright.core.errors import DisagreementError, ShardwrightError
from shardwright.core.plan.plan import Plan

LIMIT_S = 70.0
HUNG_S = LIMIT_S + 20.0
"""After so long a trial is over, and its processes are ended."""


@dataclass
class Ended:
    """How a trial ended on one rank."""

    kind: str
    """"refused", "own error", "trained", "trained otherwise", "other error" or "hung"."""
    text: str
    seconds: float


def make_plans() -> dict[tuple[int, int, int], Plan]:
    found = {}
    graph = sw.capture(build(), {"x": torch.zeros(2, WIDTH)}, loss=lambda out: loss_of(out, torch.zeros(())))
    cluster = sw.Cluster("a100-80gb", devices_per_node=RANKS)
    for pp, dp, tp in MESHES:
        found[pp, dp, tp] = sw.plan(
            graph, cluster, batch=2 * MICROBATCHES * dp, pp=pp, dp=dp, tp=tp, microbatch=2, shard=0, recompute="none",
            schedule="1f1b", virtual_stages=1, precision="fp32", sequence_parallel=False,
        )  # fmt: skip
    return found


def run_trial(trial: Trial, rank: int, plans: dict[tuple[int, int, int], Plan]) -> Ended:
    begun = time.monotonic()
    try:
        run = Run(trial, rank, plans)
        run.begin()
        losses = [run.step(number) for number in range(STEPS)]
        weights = run.model.state_dict()
        seconds = time.monotonic() - begun
        apart = distance(losses, weights, trial)
        return Ended("trained" if apart <= 1e-4 else "trained otherwise", f"{apart:.1e} apart", seconds)
    except ShardwrightError as error:
        kind = "refused" if isinstance(error, DisagreementError) else "own error"
        return Ended(kind, f"{type(error).__name__}: {error}", time.monotonic() - begun)
    except Exception as error:
        kind = "own error" if rank == trial.odd and isinstance(error, (Strange, TypeError)) else "other error"
        return Ended(kind, "".join(traceback.format_exception(error))[-1500:], time.monotonic() - begun)


def distance(losses: Sequence[float], weights: dict[str, torch.Tensor], trial: Trial) -> float:
    """The largest relative difference from the model that is not split; infinite where one is not a number."""
    wanted_losses, wanted = reference(trial)
    if len(losses) != len(wanted_losses) or set(weights) != set(wanted):
        return math.inf
    worst = 0.0
    for found, value in zip(losses, wanted_losses, strict=True):
        apart = abs(found - value) / abs(value)
        if not apart <= worst:
            worst = apart if apart == apart else math.inf
    for name, tensor in wanted.items():
        if tuple(tensor.shape) != tuple(weights[name].shape):
            return math.inf
        apart = float((weights[name].double() - tensor.double()).norm() / max(1e-3, float(tensor.double().norm())))
        if not apart <= worst:
            worst = apart if apart == apart else math.inf
    return worst


def work(rank: int, port: int, pipe: Connection, plans: dict[tuple[int, int, int], Plan], loud: bool) -> None:
    """One process: runs the trials that it is given."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not loud:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    while True:
        trial = pipe.recv()
        if trial is None:
            os._exit(0)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"trial {trial.number}", store), rank=rank, world_size=RANKS
        )
        ended = run_trial(trial, rank, plans)
        try:
            sw.shutdown()
            gc.collect()
            dist.destroy_process_group()
            gc.collect()
        except Exception as error:
            ended = Ended("other error", f"while shutting down: {error!r}", ended.seconds)
        torch.set_default_dtype(torch.float32)
        pipe.send(ended)


class Crew:
    """The processes, which run trial after trial until one of them hangs or ends."""

    def __init__(self, port: int, plans: dict[tuple[int, int, int], Plan], loud: bool) -> None:
        fork = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for rank in range(RANKS):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=work, args=(rank, port, theirs, plans, loud), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, trial: Trial) -> list[Ended]:
        for pipe in self.pipes:
            pipe.send(trial)
        begun = time.monotonic()
        found = []
        for pipe in self.pipes:
            left_s = max(0.0, begun + HUNG_S - time.monotonic())
            try:
                found.append(pipe.recv() if pipe.poll(left_s) else Ended("hung", "no answer", HUNG_S))
            except EOFError:
                found.append(Ended("other error", "the process ended", time.monotonic() - begun))
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def judged(trial: Trial, ended: Sequence[Ended]) -> str:
    """What is wrong with how a trial ended; empty when nothing is."""
    kinds = [one.kind for one in ended]
    if "hung" in kinds:
        return "a rank hung"
    if "other error" in kinds:
        return "an error of another kind"
    if max(one.seconds for one in ended) > LIMIT_S:
        return f"it took {max(one.seconds for one in ended):.0f} s"
    if all(kind == "trained" for kind in kinds):
        return ""
    if any(kind.startswith("trained") for kind in kinds):
        return "it trained to another result" if len(set(kinds)) == 1 else "only some ranks were told"
    texts = {one.text for one in ended if one.kind == "refused"}
    if len(texts) > 1:
        return "the ranks were told different things"
    if not texts and len({one.text for one in ended}) > 1:
        return "no rank was told of the others"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="run this trial alone, and show what processes print")
    parser.add_argument("--kind", default=None, help="run trials of this kind alone")
    given = parser.parse_args()
    trials = draw(given.seed, given.trials if given.only is None else given.only + 1)
    if given.only is not None:
        trials = trials[given.only :]
    if given.kind is not None:
        trials = [trial for trial in trials if trial.kind == given.kind]
    plans = make_plans()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    crew = Crew(store.port, plans, given.only is not None)
    counts: collections.Counter[str] = collections.Counter()
    reasons: dict[str, str] = {}
    longest_s, begun = 0.0, time.monotonic()
    for trial in trials:
        ended = crew.run(trial)
        reason = judged(trial, ended)
        longest_s = max(longest_s, *(one.seconds for one in ended))
        outcome = reason or ("the same result" if ended[0].kind == "trained" else "refused on every rank")
        counts[outcome] += 1
        reasons[str(trial)] = reason or ""
        said = next((one.text for one in ended if one.kind == "refused"), ended[0].text)
        print(f"{trial}: {outcome} ({max(one.seconds for one in ended):.1f} s): {said[:300]}", flush=True)
        if reason:
            for rank, one in enumerate(ended):
                print(f"    rank {rank} {one.kind} after {one.seconds:.1f} s: {one.text}", flush=True)
            crew.end()
            crew = Crew(store.port, plans, given.only is not None)
    for pipe in crew.pipes:
        pipe.send(None)
    for process in crew.processes:
        process.join(10)
    crew.end()
    print(
        f"\n{len(trials)} trials (seed {given.seed}) in {time.monotonic() - begun:.0f} s, the longest {longest_s:.1f} s"
    )
    for outcome, count in sorted(counts.items(), key=lambda item: -item[1]):
        print(f"  {count:4d}  {outcome}")
    found = claims.adversaries(reasons, longest_s, len(trials))
    print(found.verdict())
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
