# torchrun --nproc-per-node 2 examples/quickstart_torch.py
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw

sw.init({"pipeline_parallel_degree": 2, "microbatches": 4, "pipeline": "1f1b"})
model = sw.DistributedModel(GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=256)))
optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


@sw.step
def train_step(model, tokens):
    loss = model(input_ids=tokens, labels=tokens).loss
    model.backward(loss)
    return loss


for _ in range(5):
    optimizer.zero_grad()
    loss = train_step(model, torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(0)))
    model.clip_grad_norm_(1.0)
    optimizer.step()
    if sw.rank() == 0:
        print(f"loss {loss.reduce_mean().item():.4f}")
