"""A step of one model class after the other, in one group of processes that is started again after a failure."""

import json
import os
import socket
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.utils import logging

from tests.comparison import Comparison

Step = Callable[[str, int], Any]
"""The step of a class on this rank of so many: a dataclass with ``same``, the report of a comparison."""


def work(
    rank: int, ranks: int, port: int, classes: Sequence[str], out: Path, step: Step, line: Callable[[Any], str]
) -> None:
    """Take the classes in order; end where ranks disagree about whether one failed, since they are out of step then."""
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks)
    )
    dist.init_process_group("gloo")
    for name in classes:
        begun = time.perf_counter()
        try:
            found: dict[str, Any] = asdict(step(name, ranks))
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = " ".join(str(error).split())
            found = {"error": f"{type(error).__name__}: {first[:400]} ({Path(place.filename).name}:{place.lineno})"}
        every: list[Any] = [None] * ranks
        dist.all_gather_object(every, found)
        result = merged(every) | {"class": name, "time_s": time.perf_counter() - begun}
        if rank == 0:
            with out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(line(result), flush=True)
        if len({"error" in one for one in every}) > 1:
            break
    dist.barrier()
    dist.destroy_process_group()


def merged(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks found: the first error, or the worst figures."""
    errors = [one["error"] for one in every if "error" in one]
    if errors:
        return {"equal": False, "reasons": [errors[0]], "mode": "fails"}
    same = Comparison.of_ranks(one["same"] for one in every)
    off = same.failures()
    reasons = [*off, *every[0].get("reasons", ())]
    return {**every[0], "same": same.summary(), "worst": same.worst, "reasons": reasons, "equal": not off}


def run(step: Step, ranks: int, classes: Sequence[str], out: Path | None, line: Callable[[Any], str]) -> list[Any]:
    """The results of all classes, a line of JSON for each in ``out``; ``line`` is printed of each."""
    with tempfile.TemporaryDirectory() as folder:
        out = out or Path(folder) / "results.jsonl"
        out.unlink(missing_ok=True)
        left = list(classes)
        while left:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            try:
                mp.spawn(work, (ranks, port, left, out, step, line), nprocs=ranks)
            except Exception as error:  # a process died: the class that it was at is the first without a result
                print(f"a process died: {str(error).strip().splitlines()[-1][:200]}", flush=True)
                left = left[1:] if not out.exists() else left
            done = [json.loads(text)["class"] for text in out.read_text().splitlines()] if out.exists() else []
            left = [name for name in left if name not in done]
        return [json.loads(text) for text in out.read_text().splitlines()] if out.exists() else []
