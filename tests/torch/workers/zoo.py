"""Splits model classes one by one in one launch, over the pipeline or over the tensor axis, and compares each with the
plain model.

Usage: zoo.py pipeline|tensor OUT.json CLASS...
"""

import sys
import traceback
import warnings
from dataclasses import asdict

import torch
import torch.distributed as dist
from launched import leave
from transformers.utils import logging

from tests.models.equality import plain_step, split_step
from tests.models.pieces import tensor_step

STEPS = {"pipeline": lambda name, ranks: split_step(name, ranks, plain_step(name)), "tensor": tensor_step}


def main() -> None:
    kind, out, *names = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    found: dict[str, object] = {}
    for name in names:
        try:
            mine = asdict(STEPS[kind](name, ranks))
        except Exception:
            traceback.print_exc()
            print(f"{name} fails on rank {dist.get_rank()}", flush=True)
            raise
        every: list[object] = [None] * ranks
        dist.all_gather_object(every, mine)
        found[name] = every
    leave(found, out)


if __name__ == "__main__":
    main()
