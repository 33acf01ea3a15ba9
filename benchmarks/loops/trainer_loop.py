"""A script for Hugging Face's Trainer, as people have it: KIND FOLDER BATCH [CHECKPOINT]."""

import json
import sys

import loop_models
from transformers import Trainer, TrainingArguments

kind, folder, batch, *resume = sys.argv[1:]
arguments = TrainingArguments(
    output_dir=folder, max_steps=20, per_device_train_batch_size=int(batch), gradient_accumulation_steps=2,
    per_device_eval_batch_size=int(batch), logging_steps=1, eval_strategy="steps", eval_steps=10, save_strategy="steps",
    save_steps=10, learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5, report_to=[], disable_tqdm=True,
    dataloader_pin_memory=False,
)  # fmt: skip
trainer = Trainer(
    model=loop_models.model(kind), args=arguments, train_dataset=loop_models.Data(120, 1),
    eval_dataset=loop_models.Data(16, 2, is_masked=False),
)  # fmt: skip
trainer.train(resume_from_checkpoint=resume[0] if resume else None)
if trainer.is_world_process_zero():
    log = trainer.state.log_history
    found = {key: [entry[key] for entry in log if key in entry] for key in ("loss", "grad_norm", "eval_loss")}
    with open(f"{folder}.json", "w") as file:
        json.dump(found, file)
