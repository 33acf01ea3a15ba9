"""Puts model classes on a tensor axis one by one in one launch and compares each with the plain model.

Usage: tp_zoo.py OUT.json CLASS...
"""

import json
import sys
import traceback
import warnings
from dataclasses import asdict

import torch
import torch.distributed as dist
from transformers.utils import logging

from tests.models.pieces import tensor_step


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    found: dict[str, object] = {}
    for name in sys.argv[2:]:
        try:
            mine = asdict(tensor_step(name, ranks))
        except Exception:
            traceback.print_exc()
            print(f"{name} fails on rank {dist.get_rank()}", flush=True)
            raise
        every: list[object] = [None] * ranks
        dist.all_gather_object(every, mine)
        found[name] = every
    if dist.get_rank() == 0:
        with open(sys.argv[1], "w") as file:
            json.dump(found, file)
    dist.barrier()  # no rank closes its connections while another still talks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
