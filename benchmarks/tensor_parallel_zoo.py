"""Hugging Face classes of every kind on a tensor axis against the plain model: the result, the share of parameters that
lies in pieces, and why the rest is whole.

    python benchmarks/tensor_parallel_zoo.py                       # 44 classes, 2 ranks: some minutes on two cores
    python benchmarks/tensor_parallel_zoo.py --ranks 4 --classes T5ForConditionalGeneration CLIPModel

Tiny models from configurations as they are, random weights, train mode, dropout on, two microbatches of two samples:
the loss within 1e-5, every gradient within 1e-4 of its norm plus 1e-6 of the norm of all. One group of processes takes
the classes one by one, and is started again after a failure.
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import claims
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers.utils import logging

from tests.comparison import Comparison
from tests.models.pieces import CLASSES, tensor_step

SHOWN = 3
"""Reasons in the table; the file that --json names has all."""


def work(rank: int, ranks: int, port: int, classes: Sequence[str], out: Path) -> None:
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
            found: dict[str, Any] = asdict(tensor_step(name, ranks))
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
        return {"equal": False, "reasons": [errors[0]], "mode": "fails", "split": 0.0}
    same = Comparison.of_ranks(one["same"] for one in every)
    off = same.failures()
    reasons = [*off, *every[0]["reasons"]]
    return {**every[0], "same": same.summary(), "worst": same.worst, "reasons": reasons, "equal": not off}


def line(result: dict[str, Any]) -> str:
    reasons = [" ".join(reason.split())[:160] for reason in result["reasons"]]
    more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
    return (
        f"| {result['class']} | {'yes' if result['equal'] else 'NO'} | {result['mode']} | {result['split']:.1%} | "
        f"{'; '.join(reasons[:SHOWN])}{more} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--classes", nargs="+", default=list(CLASSES))
    parser.add_argument("--json", type=Path, help="where all results go, a line of JSON for each class")
    arguments = parser.parse_args()
    print("| class | equal | run | parameters in pieces | why the rest is whole |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.json or Path(folder) / "results.jsonl"
        out.unlink(missing_ok=True)
        left = list(arguments.classes)
        while left:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            try:
                mp.spawn(work, (arguments.ranks, port, left, out), nprocs=arguments.ranks)
            except Exception as error:  # a process died: the class that it was at is the first without a result
                print(f"a process died: {str(error).strip().splitlines()[-1][:200]}", flush=True)
                left = left[1:] if not out.exists() else left
            done = [json.loads(text)["class"] for text in out.read_text().splitlines()] if out.exists() else []
            left = [name for name in left if name not in done]
        results = [json.loads(text) for text in out.read_text().splitlines()]
    equal = sum(result["equal"] for result in results)
    shares = sorted(result["split"] for result in results)
    print(f"\n{equal} of {len(arguments.classes)} equal; median share of parameters in pieces "
          f"{shares[len(shares) // 2]:.1%}")  # fmt: skip
    judged = claims.tensor_parallel_zoo(results, arguments.classes, tuple(arguments.classes) == CLASSES)
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
