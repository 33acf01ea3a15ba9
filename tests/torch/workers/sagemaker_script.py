"""A script as it is written for SageMaker's library; only that its results are written down: … OUT.json."""

import json
import sys

import models
import smdistributed.modelparallel.torch as smp
import torch

smp.init()
torch.manual_seed(0)
model = smp.DistributedModel(models.build("gpt2"))
optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))


@smp.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


losses = []
for step in range(3):
    optimizer.zero_grad()
    share = smp.rdp_rank(), smp.rdp_size()
    batch = {key: tensor.chunk(share[1])[share[0]] for key, tensor in models.batch("gpt2", step, 8).items()}
    losses.append(float(train_step(model, batch).reduce_mean()))
    optimizer.step()
gathered = smp.allgather({"losses": losses, "place": [smp.pp_rank(), smp.rdp_rank()]}, smp.CommGroup.WORLD)
if smp.rank() == 0:
    with open(sys.argv[1], "w") as file:
        json.dump(gathered, file)
smp.barrier()
