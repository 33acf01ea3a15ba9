"""What worker scripts share: checks one after the other, results of all ranks in one file, and a rank that dies."""

import gc
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ALL = "--all" in sys.argv
"""Whether checks run all of their cases, as in the slow tests; else as many as show each thing once."""


def chosen(checks: Iterable[Callable[[], None]]) -> list[Callable[[], None]]:
    """Those that are named on the command line, or all."""
    names = [name for name in sys.argv[1:] if name != "--all"]
    return [check for check in checks if not names or check.__name__ in names]


def run_checks(checks: Iterable[Callable[[], None]]) -> None:
    """Run checks on all ranks, and print `ok NAME` for each; any failure ends the launch."""
    dist.init_process_group("gloo")
    for check in checks:
        check()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()


def leave(results: Any, out: str | Path) -> None:
    """Write what the first rank found as JSON, and leave the group."""
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()  # no rank closes its connections while another still talks
    dist.destroy_process_group()
    gc.collect()  # a group that something still refers to keeps threads, which can abort an interpreter that ends


def whole_gradients(model: Any) -> dict[str, Any]:
    """The gradients of this rank's parameters, put together where it holds parts. Every rank calls this."""
    parts, found = model.runtime.split_model.parts, {}
    for name, parameter in sorted(model.local_named_parameters()):
        gradient = None if parameter.grad is None else parameter.grad.clone()
        if parts.is_part(name):
            gradient = parts.whole(name, torch.empty(0) if gradient is None else gradient)
        found[name] = gradient
    return found


def largest_share(model: Any) -> float:
    """The part of all parameters that the plan puts on the fullest pipeline rank."""
    plan = model.session.plan
    if plan is None:
        return 1.0
    entries = [plan.costs.classes[kind].parameter_elements for kind in plan.costs.unit_classes]
    ranks = Counter[int]()
    for rank, (first, end) in zip(
        plan.decision.stage_ranks, pairwise((*plan.decision.stage_starts, len(entries))), strict=True
    ):
        ranks[rank] += sum(entries[first:end])
    return max(ranks.values()) / sum(entries)


def dying(how: str) -> Callable[..., None]:
    """A hook that prints `dying at` in its third call, and then ends the process (`exit`) or stops it (`stuck`)."""
    calls = []

    def hook(*_: object) -> None:
        calls.append(time.time())
        if len(calls) == 3:
            print(f"dying at {time.time():.3f}", flush=True)
            if how == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGSTOP)

    return hook
