"""A script for Lightning: KIND FOLDER BATCH CONFIG [RESUME]; CONFIG is ``-`` in one process."""

import json
import os
import sys
from typing import Any

import lightning.pytorch as pl
import loop_models
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, DistributedSampler

kind, folder, batch, config, *resume = sys.argv[1:]
keys = {} if config == "-" else json.loads(config)
replicas = int(os.environ.get("WORLD_SIZE", "1")) if keys.get("ddp") else 1


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = loop_models.model(kind)
        self.losses: list[float] = []
        self.validation: list[float] = []

    def training_step(self, given: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**given).loss
        self.log("loss", loss)
        self.log_dict({"half": loss / 2, "constant": 3.0})
        return loss

    def validation_step(self, given: Any, number: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(**given).loss
        self.log("validation", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *given: Any) -> None:
        assert float(self.trainer.callback_metrics["constant"]) == 3.0
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def on_validation_epoch_end(self) -> None:
        self.validation.append(float(self.trainer.callback_metrics["validation"]))


def loader(data: Any, size: int) -> Any:
    rank = int(os.environ.get("RANK", "0")) % replicas
    return DataLoader(data, batch_size=size, sampler=DistributedSampler(data, replicas, rank, shuffle=False))


strategy: Any = "auto"
if keys:
    from shardwright.compat.lightning import SplitStrategy

    strategy = SplitStrategy(keys)
module = Module()
trainer = pl.Trainer(
    strategy=strategy, accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), max_steps=20, logger=False,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, accumulate_grad_batches=2,
    gradient_clip_val=0.5, use_distributed_sampler=False, val_check_interval=10,
    callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=10, save_top_k=-1)],
)  # fmt: skip
trainer.fit(
    module, loader(loop_models.Data(320, 1), int(batch)),
    loader(loop_models.Data(16, 2, is_masked=False), int(batch)), ckpt_path=resume[0] if resume else None,
)  # fmt: skip
if os.environ.get("RANK", "0") == "0":
    with open(f"{folder}.json", "w") as file:
        json.dump({"losses": module.losses, "validation": module.validation}, file)
