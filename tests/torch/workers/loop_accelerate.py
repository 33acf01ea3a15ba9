"""A script for Accelerate: KIND FOLDER BATCH CONFIG [STATE]; CONFIG is ``-`` in one process. It saves its state, loads
that in the folder STATE, which another run with the same losses has saved, and trains on."""

import itertools
import json
import sys
from typing import Any

import loop_models
import torch
from torch.utils.data import DataLoader

kind, folder, batch, config, *other = sys.argv[1:]
if config == "-":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
else:
    import shardwright.torch as sw
    from shardwright.compat.accelerate import Accelerator

    accelerator = Accelerator(json.loads(config), gradient_accumulation_steps=2)
model = loop_models.model(kind)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# It steps as often with each update as there are processes.
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - 0.5 * (at // accelerator.num_processes) / 20)
data, others = loop_models.Data(160 + 4, 1, is_masked=False), loop_models.Data(18, 2)
loaders = DataLoader(data, batch_size=int(batch), drop_last=True), DataLoader(others, batch_size=int(batch))
model, optimizer, training, validation, scheduler = accelerator.prepare(model, optimizer, *loaders, scheduler)


def train_step(model: Any, given: dict[str, torch.Tensor]) -> Any:
    loss = model(**given).loss
    accelerator.backward(loss)
    return loss


def predict(model: Any, given: dict[str, torch.Tensor]) -> Any:
    return model(**given).logits


if config != "-":
    train_step, predict = sw.step(train_step), sw.step(predict)
losses, norms, predicted = [], [], []


def train(batches: Any) -> None:
    for given in batches:
        with accelerator.accumulate(model):
            loss = train_step(model, given)
            losses.append(float(accelerator.reduce(loss.detach() if config == "-" else loss, "mean")))
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


train(training)
model.eval()
for given in validation:
    with torch.no_grad():
        found = predict(model, given)
    logits, labels = accelerator.gather_for_metrics((found, given["labels"]))
    predicted += [float(one.abs().mean()) for one in logits]
    assert len(labels) == len(logits)
state = accelerator.get_state_dict(model)
found = {"losses": losses, "norms": norms, "predicted": predicted, "rate": scheduler.get_last_lr()}
found["state"] = [float(state[name].abs().mean()) for name in sorted(state)]
accelerator.save_state(f"{folder}/state")
if other:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(other[0])
model.train()
losses, norms = [], []
train(itertools.islice(training, 4))
found |= {"losses after": losses, "norms after": norms, "rate after": scheduler.get_last_lr()}
if accelerator.is_main_process:
    with open(f"{folder}.json", "w") as file:
        json.dump(found, file)
