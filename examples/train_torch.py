"""Train Hugging Face's GPT-2 on English text, split over processes: the script that SageMaker's users know.

    torchrun --nproc-per-node 4 examples/train_torch.py --pp 2 --steps 20

trains 2 pipelines of 2 stages each. Without torchrun it runs the unsplit model in one process: the reference. The
vocabulary is bytes, and the text is that of `pydoc_data.topics`, so nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw


def text_dataset(length: int) -> TensorDataset:
    """Windows of `length` bytes."""
    data = torch.tensor(list("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.long)
    return TensorDataset(data[: data.numel() // length * length].view(-1, length))


@sw.step
def train_step(model, input_ids):
    loss = model(input_ids=input_ids, labels=input_ids).loss
    model.backward(loss)
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages; the other ranks are data-parallel replicas")
    parser.add_argument("--plan", help="a plan file, instead of --pp, --microbatches and --schedule")
    parser.add_argument("--microbatches", type=int, default=4, help="per replica")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--batch", type=int, default=16, help="samples per step, of all replicas together")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="where rank 0 writes the whole state dict at the end")
    args = parser.parse_args()

    split = {"pipeline_parallel_degree": args.pp, "microbatches": args.microbatches, "pipeline": args.schedule}
    sw.init(plan=args.plan) if args.plan else sw.init({**split, "ddp": True})
    sw.set_seed(0)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=128, n_layer=8, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = sw.DistributedModel(GPT2LMHeadModel(config))
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

    dataset = text_dataset(length=128)
    own_batch = args.batch // sw.dp_size()
    sampler = sw.sampler(dataset, batch_size=own_batch, shuffle=True, drop_last=True)
    loader = DataLoader(dataset, batch_size=own_batch, sampler=sampler)
    for number, (input_ids,) in zip(range(args.steps), loader, strict=False):
        optimizer.zero_grad()
        loss = train_step(model, input_ids).all_reduce_mean()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        if sw.rank() == 0:
            print(f"step {number:3d}  loss {loss.item():.4f}  gradient norm {norm.item():.3f}", flush=True)
    state = model.state_dict(rank0_only=True)
    if args.save and sw.rank() == 0:
        torch.save(state, args.save)
    sw.shutdown()


if __name__ == "__main__":
    main()
