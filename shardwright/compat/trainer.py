"""Hugging Face's `Trainer` over a split model: one import is another one.

    from shardwright.compat.trainer import Trainer, TrainingArguments

`Trainer` has a path for SageMaker's library. It is taken where SageMaker's names are installed (`shardwright.compat`)
and the environment says what SageMaker's launcher would; the classes here repair what is broken on that path in
releases 4.57 and 5: no optimizer is made, loaders give every process other samples, the norm of gradients is that of
one stage, the loss is the model's own whatever `compute_loss` says, and files of several processes have one name.
"""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import shardwright.compat
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.training.call import LossOfBatch
from shardwright.core.errors import MissingCapabilityError, MissingFrameworkError, ShardwrightError
from shardwright.torch import groups
from shardwright.torch.config import ENVIRONMENT
from shardwright.torch.model import DistributedModel
from shardwright.torch.optimizer import DistributedOptimizer
from shardwright.torch.session import current

FRAMEWORK = "SM_FRAMEWORK_PARAMS"
"""The variable in which SageMaker's launcher says that processes of a model-parallel run were started."""

shardwright.compat.install()
try:
    import transformers.trainer as _trainer
    from transformers.trainer import Trainer as _Trainer
    from transformers.training_args import TrainingArguments as _TrainingArguments
    from transformers.utils.import_utils import is_sagemaker_mp_enabled
except ImportError as failed:
    raise MissingFrameworkError(
        f"shardwright.compat.trainer needs Hugging Face's transformers and accelerate: pip install transformers "
        f"accelerate ({failed})"
    ) from failed

from shardwright.compat import broadcast_masks  # noqa: E402
from shardwright.compat import modelparallel as smp  # noqa: E402
from shardwright.compat.accelerate import Accelerator  # noqa: E402
from shardwright.compat.plain_checkpoints import is_first_of_batch, load_weights, numbered, split_optimizer  # noqa: E402
from shardwright.compat.whole_batches import batches, samples, whole  # noqa: E402

broadcast_masks.install()
OPTIMIZER, SCHEDULER = "optimizer.pt", "scheduler.pt"
"""The files of the optimizer and of the scheduler in a checkpoint of `Trainer`."""


def _require_enabled() -> None:
    if not is_sagemaker_mp_enabled() or not hasattr(_trainer, "smp"):
        raise ShardwrightError(
            f"Trainer takes the path of a split model only where the environment says so before transformers is "
            f"imported: {ENVIRONMENT}='{{\"partitions\": 2, …}}' and {FRAMEWORK}='{{\"sagemaker_mpi_enabled\": true}}'"
        )


class TrainingArguments(_TrainingArguments):  # type: ignore[misc]
    """``transformers.TrainingArguments`` of a rank of this run: its device is that of the run, a CPU too."""

    @functools.cached_property
    def _setup_devices(self) -> torch.device:
        _require_enabled()
        if getattr(self.accelerator_config, "use_configured_state", False):
            raise MissingCapabilityError("accelerator_config: use_configured_state=True is not possible; leave it out")
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        self.distributed_state = None
        device = current().bound.device
        self._n_gpu = 1 if device.type == "cuda" else 0
        return device


_REFUSED: dict[str, str] = {
    "bf16": "the precision of a split model is a key of its configuration, 'bf16': true",
    "fp16": "the precision of a split model is a key of its configuration; take 'bf16': true",
    "bf16_full_eval": "evaluation runs in the precision of training, 'bf16': true in the configuration",
    "fp16_full_eval": "evaluation runs in the precision of training, 'bf16': true in the configuration",
    "fsdp": "state is sharded by the configuration, 'sharded_data_parallel_degree'",
    "deepspeed": "state is sharded by the configuration, 'sharded_data_parallel_degree'",
    "parallelism_config": "the degrees are keys of the configuration",
    "torch_compile": "blocks are compiled by a key of the configuration, 'compile': true",
    "auto_find_batch_size": "a model is split once; choose the batch size",
    "neftune_noise_alpha": "noise in embeddings is not carried out",
    "use_liger_kernel": "its kernels are not carried out",
    "save_on_each_node": "checkpoints are whole, and rank 0 writes them",
    "include_num_input_tokens_seen": "tokens are not counted over replicas",
}
"""Arguments of `TrainingArguments` that are not carried out, and what to do instead."""


def _require_possible(args: Any) -> None:
    for name, instead in _REFUSED.items():
        given = getattr(args, name, None)
        if given and given != "no":
            raise MissingCapabilityError(f"TrainingArguments({name}={given!r}): {instead}; leave it out")
    if current().config.fp16:
        raise MissingCapabilityError("fp16 and Trainer: losses are not scaled there; take 'bf16': true")
    if batches() > 1 and not getattr(args, "average_tokens_across_devices", True):
        raise MissingCapabilityError(
            "average_tokens_across_devices=False: gradients are those of the batch of all replicas; leave it at True"
        )


class Trainer(_Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` of a model that is split over the ranks of this run.

    Losses, gradients and their norm are those of a run in one process on the batch of all replicas. Label smoothing,
    ``compute_loss_func`` and an own ``compute_loss`` count as there. A checkpoint is that of a run in one process: it
    is resumed under any split, by ``transformers.Trainer`` too, and this resumes what that has written.

    Evaluation runs each batch as one microbatch.

    Raises:
        ShardwrightError: the environment does not say that the run is a model-parallel one.
        MissingCapabilityError: an argument that is not carried out.
    """

    model_wrapped: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _require_enabled()
        self._steps = _StepFunctions(self)
        super().__init__(*args, **kwargs)
        own = getattr(type(self), "compute_loss", None) is not _Trainer.compute_loss
        if own and batches() > 1:
            raise MissingCapabilityError(
                f"{type(self).__name__}.compute_loss over {batches()} replicas: whether it is scaled for all of them "
                f"cannot be told; give Trainer(compute_loss_func=…)"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Make the `Accelerator` that knows of the split model."""
        _require_possible(self.args)
        before, _trainer.Accelerator = _trainer.Accelerator, Accelerator
        try:
            super().create_accelerator_and_postprocess()
        finally:
            _trainer.Accelerator = before

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train with the batch of a rank that the arguments ask for. A checkpoint's own, which releases 4 take instead,
        is of the ranks that wrote it."""
        return super()._inner_training_loop(self.args.train_batch_size, *args, **kwargs)

    # The model and its optimizer -------------------------------------------------------------------------------------

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """The split model. Gradients of an accumulation are held back by `Accelerator.no_sync`, not by a count of
        passes, which a short last one would put out of step."""
        if not isinstance(self.model_wrapped, DistributedModel):
            self.model_wrapped = DistributedModel(self.model)
        return self.accelerator.prepare_model(self.model_wrapped)

    def create_optimizer(self, model: Any = None) -> Any:
        """The optimizer of the split model."""
        if not _is_split(self.optimizer):
            # Releases 4 ask what they call the wrapped model for its parameters, and by names with a prefix for those
            # that decay.
            wrapped, self.model_wrapped = self.model_wrapped, self.model
            try:
                super().create_optimizer()
            finally:
                self.model_wrapped = wrapped
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The schedule of learning rates; `Trainer` of releases 5 makes no optimizer before, on this path."""
        self.create_optimizer()
        return super().create_scheduler(num_training_steps, optimizer)

    # Steps -----------------------------------------------------------------------------------------------------------

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run a step, and give the loss of the batch of all replicas."""
        model.train()
        accumulated = float(getattr(self, "current_gradient_accumulation_steps", 1))
        if num_items_in_batch is not None:
            num_items_in_batch = torch.as_tensor(num_items_in_batch, device=self.args.device)
        self._steps.train(model, dict(inputs), num_items_in_batch, accumulated)
        losses: Sequence[LossOfBatch] | None = model.model_run.batch_losses
        assert losses is not None
        return losses[0].total().detach().to(self.args.device)

    def loss_of_microbatch(
        self, model: Any, inputs: dict[str, Any], num_items: torch.Tensor | None, accumulated: float
    ) -> torch.Tensor:
        """The loss of a microbatch, scaled as its share of an update asks for: inside the step."""
        loss, _ = self.loss_and_outputs(model, inputs, num_items)
        is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if is_scaled is None:
            is_scaled = (self.model_accepts_loss_kwargs and num_items is not None) or bool(self.compute_loss_func)
        return loss / accumulated if not is_scaled else loss

    def loss_and_outputs(
        self, model: Any, inputs: dict[str, Any], num_items: torch.Tensor | None
    ) -> tuple[torch.Tensor, Any]:
        """What `compute_loss` gives, but for the number of replicas: inside a step."""
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items)
        takes_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self.args.average_tokens_across_devices and takes_count and num_items is not None:
            loss = loss / batches()  # which compute_loss has multiplied it by, for a mean over replicas
        return loss, outputs

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """The loss, the outputs and the labels of a batch."""
        names = self.label_names
        has_labels = bool(names) and all(inputs.get(name) is not None for name in names)
        returns_loss = inputs.get("return_loss")
        returns_loss = self.can_return_loss if returns_loss is None else returns_loss
        wants_loss = bool(has_labels or (not names and returns_loss))
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"] if config else [])
        labels = tuple(inputs.get(name).to(self.args.device) for name in names) if wants_loss and names else None
        if labels is not None and len(labels) == 1:
            labels = labels[0]
        with torch.no_grad():
            count = self._own_count(inputs) if wants_loss else None
            loss, logits = self._steps.evaluate(
                model, pytree.tree_map(whole, dict(inputs)), count, wants_loss, prediction_loss_only,
                ",".join(ignore_keys),
            )  # fmt: skip
        found = None if loss is None else loss.reduce_mean().detach()
        if prediction_loss_only:
            return found, None, None
        outputs = pytree.tree_map(lambda leaf: leaf.concat().detach(), logits)
        return found, outputs[0] if len(outputs) == 1 else outputs, labels

    def _own_count(self, inputs: Any) -> torch.Tensor | None:
        """The number of items in this rank's batch, of one entry; None where the loss takes none."""
        before, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            count = self._get_num_items_in_batch([inputs], self.args.device)
        finally:
            self.args.average_tokens_across_devices = before
        return None if count is None else torch.as_tensor(count, device=self.args.device).reshape(1)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the model, on rank 0. ``save_pretrained`` notes things in the model's configuration, which steps read:
        they are put back, as other ranks do not have them."""
        config = getattr(self.model, "config", None)
        before = None if config is None else dict(vars(config))
        super()._save(output_dir, state_dict)
        if before is not None:
            vars(config).clear()
            vars(config).update(before)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = split_optimizer(self.optimizer).state_dict(rank0_only=True)
        if groups.rank() == 0:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            torch.save(numbered(state), os.path.join(output_dir, OPTIMIZER))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))
        groups.barrier()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        paths = [Path(checkpoint) / name for name in (OPTIMIZER, SCHEDULER)]
        if not all(path.is_file() for path in paths):
            return  # as of save_only_model
        optimizer, scheduler = (torch.load(path, map_location="cpu", weights_only=True) for path in paths)
        split_optimizer(self.optimizer).load_state_dict(optimizer)
        self.lr_scheduler.load_state_dict(scheduler)
        split_model = self._wrap_model(self.model).runtime.split_model  # dropout goes on where it was
        split_model.steps_run = self.state.global_step * self.args.gradient_accumulation_steps

    def _save_rng_state(self, output_dir: str) -> None:
        if is_first_of_batch():
            super()._save_rng_state(output_dir)  # the others would write files of the same names

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        left_out = getattr(self.model, "_keys_to_ignore_on_save", None) or ()
        load_weights(self._wrap_model(self.model), resume_from_checkpoint, left_out)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class _StepFunctions:
    """The steps of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        @smp.step
        def train(model: Any, inputs: dict[str, Any], num_items: torch.Tensor | None, accumulated: float) -> Any:
            loss = trainer.loss_of_microbatch(model, inputs, num_items, accumulated)
            model.backward(loss)
            return loss

        @smp.step
        def evaluate(
            model: Any,
            inputs: dict[str, Any],
            count: torch.Tensor | None,
            wants_loss: bool,
            loss_only: bool,
            ignored: str,
        ) -> tuple[Any, tuple[Any, ...]]:
            inputs = pytree.tree_map(samples, inputs)
            loss = None
            if wants_loss:
                count = None if count is None else count.sum()  # of all tensor-parallel peers in this microbatch
                loss, outputs = trainer.loss_and_outputs(model, inputs, count)
                loss = loss.mean()
            else:
                outputs = model(**inputs)
            if loss_only:
                return loss, ()
            if not isinstance(outputs, dict):
                return loss, tuple(outputs[1:] if wants_loss else outputs)
            left_out = (*ignored.split(","), *(["loss"] if wants_loss else []))
            return loss, tuple(value for key, value in outputs.items() if key not in left_out)

        self.train, self.evaluate = train, evaluate


def _is_split(optimizer: Any) -> bool:
    return isinstance(optimizer, DistributedOptimizer) or isinstance(
        getattr(optimizer, "optimizer", None), DistributedOptimizer
    )
