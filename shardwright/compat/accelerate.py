"""Hugging Face Accelerate over a split model.

    from shardwright.compat.accelerate import Accelerator

    accelerator = Accelerator({"pipeline_parallel_degree": 2, "microbatches": 4})
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    @sw.step
    def train_step(model, batch):
        loss = model(**batch).loss
        accelerator.backward(loss)
        return loss

The rest of a script stays as it is: loaders, accumulation, clipping, metrics and schedulers.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwright.backends.torch.compat import pytree
from shardwright.compat.plain_checkpoints import is_first_of_batch, load_weights, numbered, split_optimizer
from shardwright.compat.whole_batches import batches, group_of_batches, place_of_batch
from shardwright.core.errors import CheckpointError, MissingCapabilityError, MissingFrameworkError, ShardwrightError
from shardwright.torch import groups
from shardwright.torch.model import DistributedModel
from shardwright.torch.optimizer import DistributedOptimizer
from shardwright.torch.output import StepOutput
from shardwright.torch.session import init, is_initialized

try:
    import accelerate
    from accelerate import checkpointing
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler
    from accelerate.state import PartialState
    from accelerate.utils import load
except ImportError as failed:
    raise MissingFrameworkError(
        f"shardwright.compat.accelerate needs Hugging Face Accelerate: pip install accelerate ({failed})"
    ) from failed


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An ``accelerate.Accelerator`` whose models are split over the ranks of this run.

    `prepare` makes a `DistributedModel` of a model and a `DistributedOptimizer` of an optimizer, in that order. Data
    loaders give each replica its share: ``num_processes`` is the number of ranks that take different batches, and
    ``process_index`` the place among them. The other ranks of a replica are given its batch. ``is_main_process`` is
    rank 0. The forward and the backward pass belong into a function decorated with ``@sw.step``.

    Args:
        config: the configuration of `shardwright.torch.init`, which is called unless it was before.
        options: those of ``accelerate.Accelerator``.

    Raises:
        ShardwrightError: a configuration is given and the run has begun already; a second model.
        MissingCapabilityError: an option that is not carried out: mixed precision, a plugin, dispatched batches.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        if not is_initialized():
            init(config)
        elif config is not None:
            raise ShardwrightError("Accelerator was given a configuration, and sw.init has taken one: leave one out")
        _require_possible(options)
        super().__init__(**options)
        _require_precision(self.mixed_precision)  # of the environment
        if self.dispatch_batches:
            raise MissingCapabilityError("dispatch_batches=True: every rank reads its own batches; leave it out")
        self.dataloader_config.dispatch_batches = False  # not decided by the class of the data set
        if batches() > 1:  # replicas shuffle alike, each for its share
            self.dataloader_config.use_seedable_sampler = True
            if self.dataloader_config.data_seed is None:
                self.dataloader_config.data_seed = groups.allgather(torch.initial_seed())[0]
        shared = PartialState()  # which knows of no ranks on CPUs
        shared.num_processes, shared.process_index = groups.size(), groups.rank()
        shared.local_process_index = groups.local_rank()
        self._split_model: DistributedModel | None = None

    @property
    def num_processes(self) -> int:
        """The number of ranks that take different batches."""
        return batches()

    @property
    def process_index(self) -> int:
        """This rank's place among the ranks that take different batches."""
        return place_of_batch()

    @property
    def local_process_index(self) -> int:
        """This rank's place on its node."""
        return groups.local_rank()

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return groups.rank() == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return groups.local_rank() == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return groups.rank() == groups.size() - 1

    # Preparing -------------------------------------------------------------------------------------------------------

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """The model, split over the ranks of this run."""
        if not isinstance(model, DistributedModel):
            model = DistributedModel(model)
        self._split_model = model
        if not any(known is model for known in self._models):
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """The optimizer of the split model, which was prepared before."""
        if not isinstance(optimizer, DistributedOptimizer | AcceleratedOptimizer):
            optimizer = DistributedOptimizer(optimizer)
        if isinstance(optimizer, AcceleratedOptimizer):
            if not any(known is optimizer for known in self._optimizers):
                self._optimizers.append(optimizer)
            return optimizer
        return super().prepare_optimizer(optimizer, device_placement=False)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """The scheduler, which steps once for each batch that an update is over, as Accelerate's does."""
        if not isinstance(scheduler, AcceleratedScheduler):
            scheduler = SplitScheduler(
                scheduler, self._optimizers, step_with_optimizer=self.step_scheduler_with_optimizer,
                steps=1 if self.split_batches else batches(),
            )  # fmt: skip
        if not any(known is scheduler for known in self._schedulers):
            self._schedulers.append(scheduler)
        return scheduler

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The module that was prepared. Parameters that other ranks hold are on the meta device."""
        if isinstance(model, DistributedModel):
            return model.module
        return super().unwrap_model(model, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        """As in Accelerate. The split model stays: there is one in a process."""
        found = super().free_memory(*objects)
        if self._split_model is not None:
            self._models.append(self._split_model)
        return found

    # Training --------------------------------------------------------------------------------------------------------

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Give the loss of a microbatch, inside ``@sw.step``, divided by the number of steps that gradients add up
        over."""
        if kwargs:
            raise MissingCapabilityError(f"accelerator.backward takes the loss alone: leave out {', '.join(kwargs)}")
        self._model().backward(loss / self.gradient_accumulation_steps)

    @contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """A context in which gradients add up on every replica by itself."""
        with model.no_sync():
            yield

    def clip_grad_norm_(self, parameters: Iterable[Any], max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Clip the gradients by the norm of all of the model's gradients, which is returned. Every rank calls this.

        Raises MissingCapabilityError for a part of the model's parameters.
        """
        model = self._model()
        given, known = {id(p) for p in parameters}, {id(p) for p in model.parameters()}
        if given != known:
            raise MissingCapabilityError(
                f"accelerator.clip_grad_norm_ was given {len(given & known)} of the model's {len(known)} parameters, "
                f"and {len(given - known)} others: the norm of a split model is that of all; give it "
                f"model.parameters()"
            )
        return model.clip_grad_norm_(max_norm, norm_type)

    # Between ranks ---------------------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """The tensors of the ranks that take different batches, joined along axis 0; of what a step returned, those of
        all microbatches. Every rank calls this."""
        tensor = pytree.tree_map(_joined, tensor)
        return pytree.tree_map(lambda leaf: torch.cat([_at_least_1d(one) for one in _of_all(leaf)]), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that were repeated at the end of a data set.

        Raises MissingCapabilityError for other things than tensors.
        """
        input_data = pytree.tree_map(_joined, input_data)
        leaves = pytree.tree_leaves(input_data)
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise MissingCapabilityError(
                "gather_for_metrics takes tensors and their containers: objects would be pickled; sw.allgather takes "
                "numbers, texts and their containers"
            )
        return super().gather_for_metrics(input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or the mean over the ranks that take different batches; every rank calls this. Of what a step
        returned, the mean over microbatches is taken first.

        Raises ShardwrightError for another reduction, and for other than the mean of what a step returned.
        """
        if reduction not in ("sum", "mean", "none"):
            raise ShardwrightError(f"reduction={reduction!r}: expected 'sum', 'mean' or 'none'")
        if reduction != "mean" and any(isinstance(leaf, StepOutput) for leaf in pytree.tree_leaves(tensor)):
            raise ShardwrightError(
                f"reduction={reduction!r} of what a step returned: it has a value for each microbatch; take its "
                f"reduce_mean() or concat() first"
            )
        if reduction == "none":
            return tensor

        def reduced(leaf: Any) -> torch.Tensor:
            leaf = leaf.reduce_mean() if isinstance(leaf, StepOutput) else leaf
            total = torch.stack(_of_all(leaf)).sum(0) * scale
            return total / batches() if reduction == "mean" else total

        return pytree.tree_map(reduced, tensor)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Tensors as large along ``dim`` as the largest among the ranks that take different batches; every rank calls
        this."""

        def padded(leaf: torch.Tensor) -> torch.Tensor:
            own = leaf.shape[dim] if dim < leaf.dim() else 0
            most = max(groups.allgather(own, group_of_batches()))
            if most == own:
                return leaf
            shape = list(leaf.shape)
            shape[dim] = most - own
            filling = leaf.new_full(shape, pad_index)
            return torch.cat([filling, leaf] if pad_first else [leaf, filling], dim)

        return pytree.tree_map(padded, tensor)

    def wait_for_everyone(self) -> None:
        """Wait until every rank has come here."""
        groups.barrier()

    # Saving ----------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole state dict, by original names; every rank calls this."""
        return model.state_dict()

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Write the state of training to a folder, as Accelerate in one process has it: that resumes it, and so does
        any split. Every rank calls this, with the same folder on a file system that all share.

        Raises MissingCapabilityError without a folder, or with an option for another library's model.
        """
        if output_dir is None or kwargs:
            raise MissingCapabilityError(
                f"accelerator.save_state({', '.join(kwargs) or 'output_dir=None'}): give the folder alone; folders are "
                f"not numbered"
            )
        folder = Path(output_dir).expanduser()
        model = self._model()
        weights = [self.get_state_dict(model)]
        states = [_Held(numbered(split_optimizer(one).state_dict())) for one in self._optimizers]
        folder.mkdir(parents=True, exist_ok=True)
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, str(folder))
        if is_first_of_batch():
            checkpointing.save_accelerator_state(
                str(folder), weights, states, self._schedulers, self._dataloaders, place_of_batch(), self.step,
                safe_serialization=safe_serialization,
            )  # fmt: skip
        if groups.rank() == 0:
            for number, one in enumerate(self._custom_objects):
                checkpointing.save_custom_state(one, str(folder), number)
            (folder / _STEPS).write_text(json.dumps(model.runtime.split_model.steps_run), encoding="ascii")
        groups.barrier()
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Load what `save_state` wrote, under another split too, or ``accelerate.Accelerator`` in one process. Every
        rank calls this. Ranks beyond those that wrote take the random states of the first.

        Raises:
            MissingCapabilityError: there is no folder, or an option.
            CheckpointError: the folder lacks a file, or is of another model; schedulers that step once for each batch
                go on over another number of batches.
        """
        if input_dir is None or load_kwargs or kwargs:
            raise MissingCapabilityError(
                f"accelerator.load_state({', '.join([*(load_kwargs or ()), *kwargs]) or 'input_dir=None'}): give the "
                f"folder alone; folders are not numbered"
            )
        folder = Path(input_dir).expanduser()
        model = self._model()
        _require_schedulers_go_on(self, len([*folder.glob("random_states_*.pkl")]))
        own = folder / f"random_states_{place_of_batch()}.pkl"
        random_states = _loaded(own if own.is_file() else folder / "random_states_0.pkl")
        optimizers = [_loaded(folder / _named("optimizer", number)) for number in range(len(self._optimizers))]
        schedulers = [_loaded(folder / _named("scheduler", number)) for number in range(len(self._schedulers))]
        custom = [_loaded(folder / f"custom_checkpoint_{number}.pkl") for number in range(len(self._custom_objects))]
        for hook in self._load_model_state_pre_hook.values():
            hook(self._models, str(folder))
        load_weights(model, folder)
        for optimizer, state in zip(self._optimizers, optimizers, strict=True):
            split_optimizer(optimizer).load_state_dict(state)
        for one, state in zip([*self._schedulers, *self._custom_objects], [*schedulers, *custom], strict=True):
            one.load_state_dict(state)
        self.step = random_states["step"]
        random.setstate(random_states["random_state"])
        np.random.set_state(random_states["numpy_random_seed"])
        torch.set_rng_state(random_states["torch_manual_seed"])
        if "torch_cuda_manual_seed" in random_states and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(random_states["torch_cuda_manual_seed"])
        if (folder / _STEPS).is_file():  # dropout goes on where it was
            model.runtime.split_model.steps_run = int((folder / _STEPS).read_text(encoding="ascii"))

    def _model(self) -> DistributedModel:
        if self._split_model is None:
            raise ShardwrightError("no model was prepared: call accelerator.prepare(model, optimizer, …) first")
        return self._split_model


_STEPS = "shardwright_steps.json"
"""The file with the number of steps that have run."""


class _Held:
    """A state that is there already, as what has one."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def _require_schedulers_go_on(accelerator: Accelerator, before: int) -> None:
    """Schedulers that step once for each of ``before`` batches have counted these."""
    counts = accelerator.step_scheduler_with_optimizer and not accelerator.split_batches
    if accelerator._schedulers and counts and before not in (0, batches()):
        raise CheckpointError(
            f"the state was saved where {before} ranks took different batches, and here {batches()} do: schedulers "
            f"step once for each of them. Give Accelerator(step_scheduler_with_optimizer=False) and step them with "
            f"each update, or go on with {before}"
        )


def _named(kind: str, number: int) -> str:
    """Accelerate's name of the file of a state."""
    return f"{kind}.bin" if number == 0 else f"{kind}_{number}.bin"


def _loaded(path: Path) -> Any:
    """What a file holds, of tensors, numbers, texts and their containers."""
    if not path.is_file():
        raise CheckpointError(f"{path.parent} is no state of this run: it lacks {path.name}")
    return load(path, map_location="cpu", weights_only=True)


class SplitScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A scheduler that steps so many times with each update."""

    def __init__(self, scheduler: Any, optimizers: Any, *, step_with_optimizer: bool, steps: int) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer=step_with_optimizer, split_batches=True)
        self._steps = steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step with an update."""
        often = self._steps if self.step_with_optimizer and self.gradient_state.sync_gradients else 1
        for _ in range(often):
            super().step(*args, **kwargs)


_PLUGINS = (
    "fsdp_plugin", "deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin", "torch_tp_plugin",
    "parallelism_config",
)  # fmt: skip


def _require_precision(given: Any) -> None:
    if given not in (None, "no"):
        raise MissingCapabilityError(
            f"mixed_precision={given!r}: the precision of a split model is a key of its configuration, "
            f"{{'bf16': True}}; leave mixed_precision at 'no'"
        )


def _require_possible(options: Mapping[str, Any]) -> None:
    _require_precision(options.get("mixed_precision"))  # before Accelerate remembers it for the process
    for name in _PLUGINS:
        if options.get(name) is not None:
            raise MissingCapabilityError(
                f"Accelerator({name}=…): how the model is split is a matter of its configuration; leave {name} out"
            )


def _joined(leaf: Any) -> Any:
    """What a step returned, of all microbatches; anything else as it is."""
    return leaf.concat() if isinstance(leaf, StepOutput) else leaf


def _of_all(leaf: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of the ranks that take different batches, in their order."""
    if batches() == 1:
        return [leaf]
    return [one.to(leaf.device) for one in groups.allgather(leaf.detach(), group_of_batches())]


def _at_least_1d(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(1) if tensor.dim() == 0 else tensor
