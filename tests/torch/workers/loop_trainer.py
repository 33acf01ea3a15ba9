"""A script for Hugging Face's `Trainer`: KIND FOLDER BATCH [RESUME]. Resuming, one import is another one where it is
split."""

import json
import os
import sys

import loop_models

if os.environ.get("SM_HP_MP_PARAMETERS") and len(sys.argv) > 4:
    from shardwright.compat.trainer import Trainer, TrainingArguments
else:
    from transformers import Trainer, TrainingArguments

kind, folder, batch, *resume = sys.argv[1:]
asked = json.loads(os.environ.get("ASKED", "{}"))
arguments = TrainingArguments(
    output_dir=folder, max_steps=20, per_device_train_batch_size=int(batch), gradient_accumulation_steps=2,
    per_device_eval_batch_size=int(batch), logging_steps=1, eval_strategy="steps", eval_steps=10, save_strategy="steps",
    save_steps=10, learning_rate=1e-3, weight_decay=0.01, max_grad_norm=0.5, report_to=[], disable_tqdm=True,
    dataloader_pin_memory=False, **({} if os.environ.get("SM_HP_MP_PARAMETERS") else {"use_cpu": True}), **asked,
)  # fmt: skip
trainer = Trainer(
    model=loop_models.model(kind), args=arguments, train_dataset=loop_models.Data(120, 1),
    eval_dataset=loop_models.Data(16, 2, is_masked=False),
    compute_metrics=lambda given: {"size": given.predictions.size, "sum": float(abs(given.predictions).mean())},
)  # fmt: skip
before = trainer.evaluate() if "first" in os.environ else {}
trainer.train(resume_from_checkpoint=resume[0] if resume else None)
if os.environ.get("RANK", "0") == "0":
    with open(f"{folder}.json", "w") as file:
        json.dump([before, *trainer.state.log_history], file)
