"""Training that goes on by itself after a failure, on as many ranks as are left.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/restarts_torch.py --folder checkpoints

Every start does the same: it plans for the ranks that there are, and goes on from the newest complete checkpoint, if
there is one. Under torchrun a run whose rank dies starts again; with ``--nnodes 1:2`` also without the node that died,
under the plan that it finds for the ranks that remain. ``--die RANK:STEP`` shows it: that rank kills itself at that
step, once.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from train_torch import text_dataset
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw

BATCH, LENGTH = 8, 32
CONFIG = GPT2Config(
    vocab_size=256, n_positions=LENGTH, n_embd=32, n_layer=4, n_head=4, resid_pdrop=0.1, use_cache=False,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip


@sw.step
def train_step(model, input_ids):
    loss = model(input_ids=input_ids, labels=input_ids).loss
    model.backward(loss)
    return loss


def plan_for(ranks: int) -> sw.Plan:
    """The best plan for so many ranks."""
    with torch.device("meta"):
        model, tokens = GPT2LMHeadModel(CONFIG), torch.zeros(2, LENGTH, dtype=torch.long)
    graph = sw.capture(model, {"input_ids": tokens, "labels": tokens})
    cluster = sw.Cluster("cpu", devices_per_node=ranks)
    return sw.plan(graph, cluster, batch=BATCH, microbatch=1, precision="fp32", recompute="none")


def die_once(rank: int, step: int, folder: Path) -> None:
    """Kill this process, unless it did so before the restart."""
    mark = folder / f"died-{rank}-{step}"
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints; all ranks share it")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--die", action="append", default=[], metavar="RANK:STEP")
    args = parser.parse_args()
    deaths = {tuple(map(int, death.split(":"))) for death in args.die}

    sw.init(plan=plan_for(int(os.environ.get("WORLD_SIZE", "1"))), log_every=0)
    sw.set_seed(0)
    torch.manual_seed(0)
    model = sw.DistributedModel(GPT2LMHeadModel(CONFIG))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    sampler = sw.sampler(text_dataset(LENGTH), batch_size=BATCH // sw.rdp_size(), drop_last=True)

    first = 0
    content = sw.resume_from_checkpoint(args.folder, missing_ok=True)
    if content is not None:
        first = content["step"] + 1
        scheduler.load_state_dict(content["scheduler"])
        sampler.load_state_dict(content["sampler"])
    loader = DataLoader(text_dataset(LENGTH), batch_size=BATCH // sw.rdp_size(), sampler=sampler)
    for step, (input_ids,) in zip(range(first, args.steps), loader, strict=False):
        if (sw.rank(), step) in deaths:
            die_once(sw.rank(), step, args.folder)
        optimizer.zero_grad()
        loss = train_step(model, input_ids).all_reduce_mean()
        optimizer.step()
        scheduler.step()
        if sw.rank() == 0:
            print(f"step {step:3d}  loss {loss.item():.6f}  on {sw.size()} ranks", flush=True)
        states = {"step": step, "scheduler": scheduler.state_dict(), "sampler": sampler.state_dict()}
        sw.save_checkpoint(args.folder, f"step_{step}", user_content=states, num_kept_partial_checkpoints=2)
    sw.shutdown()


if __name__ == "__main__":
    main()
