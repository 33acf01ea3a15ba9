"""Lightning over a split model: a strategy.

    from shardwright.compat.lightning import SplitStrategy

    strategy = SplitStrategy({"pipeline_parallel_degree": 2, "microbatches": 4})
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, …)

The ranks are started by torchrun, mpirun or Slurm. Modules, data and callbacks stay as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.backends.torch.compat import pytree
from shardwright.compat.plain_checkpoints import numbered
from shardwright.compat.whole_batches import batches, group_of_batches, place_of_batch, samples, whole
from shardwright.core.errors import MissingCapabilityError, MissingFrameworkError, ShardwrightError
from shardwright.torch import groups
from shardwright.torch.model import DistributedModel
from shardwright.torch.optimizer import DistributedOptimizer
from shardwright.torch.output import StepOutput
from shardwright.torch.session import current, init, is_initialized
from shardwright.torch.step import step

try:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import ParallelStrategy
except ImportError as failed:
    raise MissingFrameworkError(
        f"shardwright.compat.lightning needs Lightning: pip install lightning ({failed})"
    ) from failed


class SplitPrecision(Precision):  # type: ignore[misc]
    """Updates of a split model: gradients are there when Lightning asks for the backward pass, and their norm is that
    of the whole model."""

    def __init__(self, strategy: "SplitStrategy") -> None:
        super().__init__()
        self._strategy = strategy

    def backward(self, tensor: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing is left to do: the step has run the backward pass."""
        self._strategy.end_backward()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the step, then update."""
        found = self._wrap_closure(model, optimizer, closure)
        optimizer.step(**kwargs)
        return found

    def clip_grad_by_norm(self, optimizer: Any, clip_val: int | float) -> None:
        """Clip the gradients by the norm of the whole model's."""
        self._strategy.split_model().clip_grad_norm_(float(clip_val))


class SplitOptimizer(DistributedOptimizer):
    """An optimizer whose gradients Lightning may reset between the forward and the backward pass."""

    def __init__(self, optimizer: torch.optim.Optimizer, strategy: "SplitStrategy") -> None:
        super().__init__(optimizer)
        self._strategy = strategy

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, unless they are those of the step that has just run."""
        if not self._strategy.skips_reset():
            super().zero_grad(set_to_none)


class SplitStrategy(ParallelStrategy):  # type: ignore[misc]
    """Trains a ``LightningModule`` that is split over the ranks of this run.

    ``training_step`` is the body of a step of `shardwright.torch`: its loss is divided into microbatches, and what it
    logs is that of the batch of all replicas. Validation, test and prediction run each batch as one microbatch. Data
    loaders get a sampler that gives each replica its share. Checkpoints are whole, those of a run on one device, and
    are resumed under any split.

    Args:
        config: the configuration of `shardwright.torch.init`, which is called unless it was before.
        options: those of ``ParallelStrategy``.

    Raises:
        ShardwrightError: a configuration is given and the run has begun already; another number of devices than ranks.
        MissingCapabilityError: manual optimization, a precision, or a hook that is not carried out.
    """

    strategy_name = "shardwright"
    model: Any
    optimizers: Any
    precision_plugin: Any

    def __init__(self, config: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._config = config
        self._logged: dict[str, Any] = {}
        self._numbers: dict[str, Any] = {}
        """What was logged and is no tensor."""
        self._same: list[str] = []
        """The names under which the loss itself was logged."""
        self._log_options: dict[str, dict[str, Any]] = {}
        self._is_ahead = self._is_due = self._resets = False
        """Whether a step has run whose backward pass Lightning has not asked for; whether gradients were reset before
        it; whether Lightning has reset them since."""
        self._is_in_method = False
        methods = ("training_step", "validation_step", "test_step", "predict_step")
        self._forwards = {method: self._forward_as(method) for method in methods}
        self._train, self._evaluate = self._steps()

    # Ranks -----------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Join the other ranks of the run."""
        if not is_initialized():
            init(self._config)
        elif self._config is not None and self._model_of_session() is None:
            raise ShardwrightError("SplitStrategy was given a configuration, and sw.init has taken one: leave one out")
        ranks, devices = groups.size(), len(self.parallel_devices or [None]) * self._nodes()
        if ranks != devices:
            raise ShardwrightError(
                f"Trainer has {devices} devices, and {ranks} ranks are running: start them by torchrun, and give "
                f"devices and num_nodes accordingly"
            )
        self.accelerator.setup_device(self.root_device)

    def _nodes(self) -> int:
        trainer = getattr(self.lightning_module, "trainer", None)
        return int(getattr(trainer, "num_nodes", 1) or 1)

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        return current().bound.device if is_initialized() else torch.device("cpu")

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return groups.rank() if is_initialized() else int(super().global_rank)

    @property
    def is_distributed(self) -> bool:
        """Whether Lightning gives loaders a ``DistributedSampler``: where there are several replicas, whose training
        data it shuffles, as under its other strategies."""
        return is_initialized() and batches() > 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The share of this rank in a data set."""
        return {"num_replicas": batches(), "rank": place_of_batch()}

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has come here."""
        if is_initialized():
            groups.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of one rank, of tensors, numbers, texts and their containers, on all."""
        if not is_initialized() or groups.size() == 1:
            return obj
        return groups.allgather(obj if groups.rank() == src else None)[src]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or the sum over the ranks that take different batches."""
        name = str(reduce_op).rpartition(".")[2].lower()
        if not isinstance(tensor, torch.Tensor) or batches() == 1:
            return tensor
        if name not in ("mean", "avg", "sum"):
            raise MissingCapabilityError(f"reduce_op={reduce_op!r}: expected 'mean' or 'sum'")
        every = torch.stack([one.to(tensor.device) for one in groups.allgather(tensor.detach(), group_of_batches())])
        return every.sum(0) if name == "sum" else every.to(torch.get_default_dtype()).mean(0)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, decide so."""
        every = groups.allgather(bool(decision))
        return bool(min(every) if all else max(every))

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """The tensors of the ranks that take different batches, along a new axis 0."""
        if sync_grads:
            raise MissingCapabilityError("all_gather(sync_grads=True): gathered values have no gradient")
        return torch.stack([one.to(tensor.device) for one in groups.allgather(tensor.detach(), group_of_batches())])

    # The model and its optimizers ------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Split the model, and make its optimizers."""
        module = self.lightning_module
        _require_possible(module, self.precision_plugin)
        self.precision_plugin = SplitPrecision(self)
        known = self._model_of_session()
        if not isinstance(self.model, DistributedModel):
            self.model = known if known is not None and known.module is module else DistributedModel(module)
            _wrapped[:] = [self.model]
        super().setup(trainer)

    def _model_of_session(self) -> DistributedModel | None:
        return _wrapped[0] if _wrapped and _wrapped[0].session is current() else None

    def split_model(self) -> DistributedModel:
        """The model, once it was set up."""
        if not isinstance(self.model, DistributedModel):
            raise ShardwrightError("the model is not split yet: SplitStrategy.setup does that, which Trainer calls")
        return self.model

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers of the split model."""
        super().setup_optimizers(trainer)
        self.optimizers = [
            one if isinstance(one, SplitOptimizer) else SplitOptimizer(one, self) for one in self.optimizers
        ]

    def model_to_device(self) -> None:
        """Nothing: each rank has its part on its device once the model is split."""

    def teardown(self) -> None:
        """Leave the model as it is: a rank has a part of it."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # Steps -----------------------------------------------------------------------------------------------------------

    def _steps(self) -> tuple[Any, Any]:
        @step
        def train(model: Any, given: tuple[Any, ...], named: dict[str, Any], accumulated: float) -> Any:
            found, logged = model(*given, **named)
            loss = found.get("loss") if isinstance(found, Mapping) else found
            if not isinstance(loss, torch.Tensor):
                raise MissingCapabilityError("training_step gave no loss: skipping a batch is not carried out")
            scaled = loss / accumulated
            model.backward(scaled)
            more = {key: value for key, value in found.items() if key != "loss"} if isinstance(found, Mapping) else None
            return scaled, logged | self._numbers, ",".join(self._same), more

        @step
        def evaluate(model: Any, given: tuple[Any, ...], named: dict[str, Any], _method: str) -> Any:
            given, named = pytree.tree_map(samples, (given, named))
            found, logged = model(*given, **named)
            return found, logged | self._numbers

        return train, evaluate

    def _note(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Take what the body of a step logs."""
        if args:
            raise MissingCapabilityError("self.log takes its options by name inside a step: self.log(name, value, …=…)")
        self._logged[name], self._log_options[name] = value, options

    def _say(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.lightning_module.log(name, value, **self._log_options[name])

    def _run(self, function: Callable[..., Any], method: str, *arguments: Any) -> Any:
        """Run a step whose model is called as ``method``, with what it logs noted."""
        attributes: dict[str, Any] = self.lightning_module.__dict__
        attributes |= {"log": self._note, "forward": self._forwards[method]}
        try:
            return function(self.split_model(), *arguments)
        finally:
            del attributes["log"], attributes["forward"]

    def _forward_as(self, method: str) -> Callable[..., Any]:
        """A ``forward`` of the module that calls a method of it, in which ``forward`` is the module's own. It gives
        what the method does, and the tensors that this has logged."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            module = self.lightning_module
            if self._is_in_method:
                return type(module).forward(module, *args, **kwargs)
            self._is_in_method, self._logged = True, {}
            try:
                found = getattr(module, method)(*args, **kwargs)
            finally:
                self._is_in_method = False
            loss = found.get("loss") if isinstance(found, Mapping) else found
            tensors = {name: value for name, value in self._logged.items() if isinstance(value, torch.Tensor)}
            self._numbers = {name: value for name, value in self._logged.items() if name not in tensors}
            self._same = [name for name, value in tensors.items() if value is loss]
            return found, {name: value.detach() for name, value in tensors.items()}

        return forward

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, and give the loss of the batch of all replicas. Gradients are reset before it where Lightning
        does so after it: it asks for the backward pass then, which has run."""
        trainer = self.lightning_module.trainer
        accumulated, self._resets = trainer.accumulate_grad_batches, False
        self._is_due = trainer.fit_loop.batch_idx % accumulated == 0
        if self._is_due:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        self._is_ahead = True
        _, logged, same, more = self._run(self._train, "training_step", args, kwargs, float(accumulated))
        losses = self.split_model().model_run.batch_losses
        assert losses is not None
        loss = losses[0].total().detach() * accumulated
        said = {name: _of_all_replicas(value) for name, value in logged.items()}
        self._say(said | {name: loss for name in same.split(",") if name})
        return loss if more is None else {"loss": loss} | pytree.tree_map(_joined, more)

    def end_backward(self) -> None:
        """Note that Lightning has come to the backward pass. Raises ShardwrightError where it did not reset gradients
        as `training_step` has done for it."""
        self._is_ahead = False
        if self._resets != self._is_due:
            done, asked = ("reset", "kept") if self._is_due else ("kept", "reset")
            raise ShardwrightError(
                f"the gradients of earlier batches were {done} before this one, and Lightning wants them {asked}: "
                f"leave resetting them to Lightning"
            )

    def skips_reset(self) -> bool:
        """Whether a reset of the gradients is one that was done already."""
        self._resets |= self._is_ahead
        return self._is_ahead

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """A context in which gradients add up on every replica by itself."""
        with self.split_model().no_sync():
            yield

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of validation."""
        return self._evaluated("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of the test."""
        return self._evaluated("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch of prediction."""
        return self._evaluated("predict_step", args, kwargs)

    def _evaluated(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = pytree.tree_map(whole, (args, kwargs))
        with torch.no_grad():
            found, logged = self._run(self._evaluate, method, given, named, method)
        self._say({name: v.reduce_mean() if isinstance(v, StepOutput) else v for name, v in logged.items()})
        return pytree.tree_map(_joined, found)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole state dict, on every rank."""
        found: dict[str, Any] = self.split_model().state_dict()
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this rank's share of a whole state dict."""
        model = self.model if isinstance(self.model, DistributedModel) else self.lightning_module
        model.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The states of all parameters, as an optimizer of the unsplit model has them."""
        found = getattr(optimizer, "_optimizer", optimizer)
        return numbered(found.state_dict())

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this rank's share of the states of all parameters."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


_wrapped: list[DistributedModel] = []
"""The model of this process that a strategy has wrapped, which later strategies take again."""
_HOOKS: Sequence[str] = ("backward", "optimizer_step", "optimizer_zero_grad")


def _require_possible(module: Any, precision: Any) -> None:
    if type(precision) not in (Precision, SplitPrecision):
        raise MissingCapabilityError(
            f"{type(precision).__name__}: the precision of a split model is a key of its configuration, "
            f"{{'bf16': True}}; leave Trainer's precision out"
        )
    if not module.automatic_optimization:
        raise MissingCapabilityError(
            "automatic_optimization=False: write the loop with shardwright.torch, or leave it True"
        )
    for name in _HOOKS:
        if getattr(type(module), name) is not getattr(LightningModule, name):
            raise MissingCapabilityError(
                f"{type(module).__name__}.{name} is not called for a split model: leave it out"
            )


def _of_all_replicas(value: Any) -> Any:
    if not isinstance(value, StepOutput):
        return value
    return value.all_reduce_mean() if value.outputs[0].is_floating_point() else value.reduce_mean()


def _joined(value: Any) -> Any:
    return value.concat().detach() if isinstance(value, StepOutput) else value
