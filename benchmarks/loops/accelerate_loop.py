"""A script for Accelerate, as people have it: KIND FOLDER BATCH [CHECKPOINT]."""

import json
import sys

import loop_models
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

kind, folder, batch, *resume = sys.argv[1:]
accelerator = Accelerator(gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
model = loop_models.model(kind)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 1 - 0.5 * at / 20)
training = DataLoader(loop_models.Data(320, 1, is_masked=False), batch_size=int(batch))
validation = DataLoader(loop_models.Data(16, 2, is_masked=False), batch_size=int(batch))
model, optimizer, training, validation, scheduler = accelerator.prepare(
    model, optimizer, training, validation, scheduler
)


def train_step(model, given):
    loss = model(**given).loss
    accelerator.backward(loss)
    return loss.detach()


def predict(model, given):
    return model(**given).logits


losses, norms, predicted = [], [], []
begin = 0
if resume:
    begin = 20
    accelerator.load_state(resume[0])
for number, given in enumerate(accelerator.skip_first_batches(training, begin), begin):
    if number == 20:
        accelerator.save_state(f"{folder}/state")
    with accelerator.accumulate(model):
        losses.append(float(accelerator.reduce(train_step(model, given), "mean")))
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        if accelerator.sync_gradients:
            scheduler.step()
        optimizer.zero_grad()
model.eval()
for given in validation:
    with torch.no_grad():
        logits = accelerator.gather_for_metrics(predict(model, given))
    predicted += [float(one.abs().mean()) for one in logits]
if accelerator.is_main_process:
    with open(f"{folder}.json", "w") as file:
        json.dump({"losses": losses, "norms": norms, "predicted": predicted}, file)
