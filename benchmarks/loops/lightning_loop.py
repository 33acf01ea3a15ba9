"""A script for Lightning, as people have it: KIND FOLDER BATCH [CHECKPOINT]."""

import json
import os
import sys

import lightning.pytorch as pl
import loop_models
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

kind, folder, batch, *resume = sys.argv[1:]
replicas = int(os.environ.get("REPLICAS", "1"))
replica = int(os.environ.get("RANK", "0")) % replicas


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = loop_models.model(kind)
        self.found = {"losses": [], "validation": []}

    def training_step(self, given, number):
        loss = self.net(**given).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, given, number):
        loss = self.net(**given).loss
        self.log("validation", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *given):
        self.found["losses"].append(float(self.trainer.callback_metrics["loss"]))

    def on_validation_epoch_end(self):
        self.found["validation"].append(float(self.trainer.callback_metrics["validation"]))


def loader(data):
    sampler = DistributedSampler(data, replicas, replica, shuffle=False)
    return DataLoader(data, batch_size=int(batch), sampler=sampler)


module = Module()
trainer = pl.Trainer(
    accelerator="cpu", devices=1,
    max_steps=20, logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    accumulate_grad_batches=2, gradient_clip_val=0.5, use_distributed_sampler=False, val_check_interval=10,
    callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=10, save_top_k=-1)],
)  # fmt: skip
trainer.fit(
    module, loader(loop_models.Data(320, 1)), loader(loop_models.Data(16, 2, is_masked=False)),
    ckpt_path=resume[0] if resume else None,
)  # fmt: skip
if trainer.is_global_zero:
    with open(f"{folder}.json", "w") as file:
        json.dump(module.found, file)
