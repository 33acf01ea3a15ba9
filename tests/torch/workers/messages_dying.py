"""A rank dies, or stops answering, in the middle of a step by messages. Usage: messages_dying.py exit|stuck VICTIM."""

import os
import sys

import torch
from dynamic import batch, build
from launched import dying

import shardwright.torch as sw

HOW, VICTIM = sys.argv[1], int(sys.argv[2])


@sw.step
def train_step(model, batch):
    loss = model(**batch)
    model.backward(loss, reduction="mean")
    return loss


def main() -> None:
    sw.init(
        {
            "pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]),
            "microbatches": 4,
            "pipeline_mode": "messages",
            "wait_timeout_s": 600.0 if HOW == "exit" else 6.0,
        }
    )
    model = sw.DistributedModel(build("depth"))
    train_step(model, batch(0, 8))
    sw.barrier()
    if sw.rank() == VICTIM:
        fail = dying(HOW)
        held = {name.rpartition(".")[0] for name, _ in model.local_named_parameters()}
        for name in held:
            model.module.get_submodule(name).register_forward_pre_hook(fail)
    train_step(model, batch(1, 8))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
