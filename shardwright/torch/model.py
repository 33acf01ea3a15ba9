"""The model as the user sees it: whole in name, split in memory."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from shardwright.backends.torch.capture.held_tensors import tensors_in
from shardwright.backends.torch.capture.own_checkpoints import marked_paths
from shardwright.backends.torch.capture.precision import step_dtype
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.pipeline.compiling import Compiler
from shardwright.backends.torch.pipeline.sentinels import Sentinel
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.state.deferred_init import require_built
from shardwright.backends.torch.state.model_agreement import model_claims, source_claim, values_digest
from shardwright.backends.torch.state.weight_files import opened
from shardwright.backends.torch.state.weight_transfer import take_values
from shardwright.backends.torch.state.weights import Weights, require_named
from shardwright.backends.torch.tensor_parallel.registry import replace_registered
from shardwright.core.errors import ShardwrightError, nearest
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Schedule, StageCosts
from shardwright.torch import session as sessions
from shardwright.torch.loss_terms import one_loss
from shardwright.torch.model_gradients import ModelGradients
from shardwright.torch.model_run import ModelRun
from shardwright.torch.module_state import ModuleState
from shardwright.torch.plain_clipping import serve_plain_clipping
from shardwright.torch.run_agreement import plan_claim
from shardwright.torch.sagemaker_model import SageMakerArguments
from shardwright.torch.scaler import share_overflows
from shardwright.torch.split_state import SplitState
from shardwright.torch.step_mode import ConfiguredMode


class DistributedModel(ModelGradients):
    """A model split over the ranks of this run.

    The tree of modules stays whole, under the names of the unsplit model; tensors that this rank does not hold are on
    the meta device. With a plan the model is split here, else at the first step. Names never get a prefix.

    A process may have several, such as a teacher and a student: each with parameters, a plan, steps, optimizers,
    gradients, random numbers and checkpoints of its own, all over the same mesh. A step runs one of them.

    Args:
        module: the model; split in place. It may be on the meta device.
        weights: data for a model on the meta device: a Hugging Face folder (safetensors in one file, or in several and
            an index), a checkpoint of `sw.save_checkpoint` (its folder, or that with the newest), a folder of
            `torch.distributed.checkpoint`, a ``.safetensors`` file, a file of ``torch.save(state_dict)``, a state dict,
            or a function called with every module that owns parameters, as by ``nn.Module.apply``. Each rank makes only
            the tensors that it holds, and reads of files no more than its part of them.
        plan: a plan of this model, or the path of its file, with the degrees of this run; it decides what `init` takes
            no keys for beside a plan. Default: the plan that `init` was given, which is that of one model, the first
            that is wrapped without one of its own; where `init` was given none, the model is planned at its first step
            with the configuration's keys.
        backward_passes_per_step: the number of training steps after which gradients are summed over the replicas;
            those of the others add up on every replica by itself, as under `no_sync`.
        average_grads_across_microbatches: False says that the losses which `backward` is given are sums over their
            samples, as its ``reduction="sum"`` does, where it is given neither a reduction nor a weight. Gradients are
            those of the sum over all replicas then; SageMaker's are divided by their number, which a warning says.
        sagemaker: the other arguments of SageMaker's (``trace_device`` and so on): see `SageMakerArguments`.

    Raises:
        ShardwrightError: ``backward_passes_per_step`` is not a whole number of 1 or more; the module shares parameters
            with a model that was wrapped before; or it has no plan, and that of `init` is another model's.
        PlanError: the plan is for another model, and the parameters that differ are named; or for other degrees.
        CheckpointError: the folder of weights is damaged, or is none of those.
    """

    def __init__(
        self,
        module: nn.Module,
        weights: Weights | None = None,
        *,
        plan: Plan | str | Path | None = None,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        **sagemaker: Any,
    ) -> None:
        super().__init__()
        if unknown := set(sagemaker) - set(SageMakerArguments.__dataclass_fields__):
            known = (*SageMakerArguments.__dataclass_fields__, "weights", "plan", "backward_passes_per_step")
            name = min(unknown)
            raise TypeError(f"DistributedModel takes no argument {name!r}: {nearest(name, known)}")
        asked = SageMakerArguments(average_grads_across_microbatches=average_grads_across_microbatches, **sagemaker)
        passes = backward_passes_per_step
        if type(passes) is not int or passes < 1:
            raise ShardwrightError(f"backward_passes_per_step={passes!r}: expected a whole number of 1 or more")
        require_built()
        session = sessions.current()
        asked.require_same_buffers(module, session.bound.size("dp"))
        run = _begun(session, module, plan)
        if session.bound.size("tp") > 1:
            replace_registered(module)
        self.session, self.model_run = session, run
        config, bound, watchdog = session.config, session.bound, session.watchdog
        compiler = "inductor" if config.compile is True else config.compile
        self.runtime = Runtime(
            module, bound, watchdog, seed=run.own_seed, weights=weights, agreement=session.agreement,
            loss_scope=run.loss_scope,
            sentinel=Sentinel(config.nonfinite, config.debug == "numerics", watchdog, bound.device),
            compiler=Compiler(compiler) if compiler else None,
            mode=ConfiguredMode(config, bound, run.plan is not None), compute=run.compute,
        )  # fmt: skip
        run.runtime, run.reduction = self.runtime, asked.reduction and self._sum()
        if run.reduction == "sum" and bound.size("dp") > 1 and bound.rank == 0:
            warnings.warn(
                f"average_grads_across_microbatches=False: gradients are those of the sum over all {bound.size('dp')} "
                f"replicas, where SageMaker's are divided by their number: divide the loss, or the learning rate",
                stacklevel=2,
            )
        self.runtime.gradients.passes_per_step = passes
        self.runtime.gradients.row_policy = config.sparse_gradients
        split_model = self.runtime.split_model
        split_model.most_summed, split_model.clips_at = config.sdp_reduce_bucket_size, config.sdp_gradient_clipping
        split_model.residency.most_whole = config.sdp_max_live_parameters
        share_overflows()
        self._module_state = ModuleState(module, self.state_dict, self.can_ask_for_parts)
        self._state = SplitState(session, run, module, self.as_held)
        if session.bound.mesh.size > 1 and isinstance(getattr(module, "generate", None), MethodType):
            from shardwright.torch.generation import of_module  # which makes steps, of models

            vars(module)["generate"] = of_module(self, module)
        self.module = module  # last: what is set from here on is the module's own
        self.runtime.split_model.listeners.append(self._serve_clipping)
        self.runtime.split_model.after_sharding.append(self._serve_clipping)
        try:
            self._agree(module)
            self._split_now(module)
        except Exception:
            self.runtime.close()
            raise
        session.models.append(run)

    def _sum(self) -> str:
        """The reduction of losses under ``average_grads_across_microbatches=False``."""
        return "sum"

    def _split_now(self, module: nn.Module) -> None:
        """Split the model where it has a plan, or needs none; else its first step does."""
        config, plan = self.session.config, self.model_run.plan
        if plan is not None:
            self._warn_of_precision(plan.decision.precision)
            self.runtime.split(StageMap.of_plan(plan))
        elif self._is_run_whole(module):
            self.runtime.split(
                StageMap.whole(
                    config.schedule(None),
                    loss_scope=config.loss_scope or "replica",
                    shard=config.shard_level,
                    shard_group=config.sharing_replicas,
                    hierarchical=config.hierarchical_gathers is not False,
                )
            )

    def _is_run_whole(self, module: nn.Module) -> bool:
        """Whether one rank holds the whole model and calls it as it is, so that it needs no plan."""
        config, bound = self.session.config, self.session.bound
        by_units = config.recompute != "none" or config.offload_activations or bool(marked_paths(module))
        is_whole = bound.size("pp") == bound.size("tp") == 1 and config.shard_level < 3
        return is_whole and not config.fp8 and not by_units and config.offload_states == "none"

    def _agree(self, module: nn.Module) -> None:
        """Go on when all ranks wrap the same model. Take the values of rank 0 where peers begin with others."""
        session, plan = self.session, self.model_run.plan
        claims: list[Claim] = []
        failure: Exception | None = None
        values = 0
        try:
            if plan is not None:
                names = tuple(name for name, _ in module.named_parameters())
                plan.require_model("torch", names, type(module).__name__)
            split_model = self.runtime.split_model
            split_model.weights = opened(split_model.weights)
            if isinstance(split_model.weights, Mapping):
                require_named(split_model.ownership, split_model.weights)
            if session.bound.mesh.size > 1:
                claims = [*model_claims(module), plan_claim(plan), source_claim(split_model.weights)]
                values = values_digest(module)
        except Exception as error:
            failure = error
        told = session.agreement.meet("sw.DistributedModel", claims, failure=failure, notes=(values,))
        if any(len({told[rank] for rank in ranks}) > 1 for ranks in session.agreement.replicas):
            if session.bound.rank == 0:
                warnings.warn(
                    "the ranks of a replica began with different weights (their seeds differ, or one of them loaded a "
                    "checkpoint): all of them take those of rank 0",
                    stacklevel=4,
                )
            take_values(module, 0, session.bound, session.watchdog)

    def _warn_of_precision(self, planned: str) -> None:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.get(planned, torch.bfloat16)
        own = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), dtype)
        if dtype is torch.float32 and own is not dtype and self.session.bound.rank == 0:
            warnings.warn(
                f"the plan counts on {planned}, and the model is in {own}: it runs as it is, so time and memory differ "
                f"from what was predicted; convert the model",
                stacklevel=4,
            )

    # Inside a step -----------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward: inside ``@sw.step``, or outside where one rank holds the whole model. Over several
        replicas no gradients flow back from outside, as nothing would sum them."""
        self._require_own_step("called")
        if not self.runtime.in_step_body and max(self.session.bound.size("pp"), self.session.bound.size("tp")) > 1:
            raise ShardwrightError(
                "a model that is split over pipeline stages or the tensor axis runs inside a function decorated with "
                "@sw.step; for evaluation call such a function, without model.backward, under torch.no_grad()"
            )
        if not self.runtime.in_step_body:
            self.runtime.split_model.make_values()
        parts = self.runtime.split_model.parts
        if parts.compute is not None:
            args, kwargs = pytree.tree_map(partial(_computed_in, parts.compute), (args, kwargs))
        if parts.flat is not None and not self.runtime.in_step_body:
            if torch.is_grad_enabled():
                raise ShardwrightError(
                    "a model with sharded state, or that computes in 16 bits beside float32 parameters, trains inside "
                    "a function decorated with @sw.step: elsewhere call it under torch.no_grad()"
                )
            with parts.flat.gathered():
                return self.module(*args, **kwargs)
        output = self.module(*args, **kwargs)
        replicas = self.session.bound.size("dp")
        if replicas > 1 and not self.runtime.in_step_body and torch.is_grad_enabled():
            _refuse_backward(output, replicas)
        return output

    def _require_own_step(self, done: str) -> None:
        """Raise ShardwrightError where the body of another model's step runs."""
        running = self.session.running()
        if running is not None and running is not self.model_run:
            raise ShardwrightError(f"{self.model_run.label} is {done} in a step of {running.label}: {of_one_model()}")

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        *,
        weight: float | torch.Tensor | None = None,
        reduction: Literal["mean", "sum"] | None = None,
    ) -> None:
        """Give the loss of a microbatch, whose gradient is wanted, inside ``@sw.step``.

        Gradients are those of the unsplit model on the batch of all microbatches and replicas. The relation of the loss
        to its batch is told from the code that computes it: a mean over samples, a weighted mean whose count follows
        from the batch (a mask, ``ignore_index``), a sum, and penalties beside them. Where it cannot be told, the user
        is asked.

        Args:
            tensors: the loss, a scalar; or tensors as `torch.autograd.backward` takes them.
            grad_tensors: the factor of each of them, as `torch.autograd.backward` takes them.
            weight: of this microbatch, the number that its loss is divided by; gradients are those of the weighted mean
                over all microbatches of all replicas.
            reduction: the relation of the loss to the batch: its "mean" over samples, or the "sum".

        Raises:
            LossError: when the step is first run: there are several microbatches, and the relation of the loss to the
                batch cannot be told.
        """
        self._require_own_step("asked for the gradient of a loss")
        if not self.runtime.in_step_body:
            raise ShardwrightError("model.backward(loss) belongs inside a function decorated with @sw.step")
        if reduction not in (None, "mean", "sum"):
            raise ShardwrightError(f"reduction={reduction!r}: expected 'mean', 'sum', or None to have it told")
        if weight is not None and reduction is not None:
            raise ShardwrightError(
                "model.backward takes a weight or a reduction: a weight says that it is a weighted mean"
            )
        chosen = self.model_run.reduction if weight is None and reduction is None else reduction
        self.runtime.backward(one_loss(tensors, grad_tensors), weight, chosen)

    def use_schedule(self, schedule: str | Schedule, costs: StageCosts | None = None) -> None:
        """Run the steps from now on under another schedule of the same stages; every rank calls this.

        Args:
            schedule: a schedule of as many ranks, stages and microbatches, that places the stages as before; or the
                name of one, "auto" among them.
            costs: of the stages, for "auto": those that `sw.measured_costs` found, say. Default: the planned ones.

        Raises:
            ShardwrightError: the model is not split yet, or the schedule does not fit.
        """
        stage_map, plan = self.runtime.stage_map, self.model_run.plan
        if isinstance(schedule, str):
            if stage_map is None:
                raise ShardwrightError("the model is not split yet: run a step first")
            planned = None if plan is None else plan.pass_costs()
            before = stage_map.schedule
            schedule = Schedule.build(
                schedule, ranks=before.ranks, microbatches=before.microbatches, virtual_stages=before.virtual_stages,
                slices=before.slices, costs=planned if costs is None else costs,
            )  # fmt: skip
        self.runtime.use_schedule(schedule)

    # Parameters --------------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters, by original names. Those that other ranks hold are on the meta device and never get a
        gradient."""
        yield from self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All buffers, by original names. Those that other ranks hold are on the meta device."""
        yield from self.module.named_buffers(prefix, recurse, remove_duplicate)

    # Saving ------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, rank0_only: bool = False, **kwargs: Any) -> Any:
        """The whole state dict, by original names, on every rank or on rank 0 only. Every rank calls this."""
        if args or kwargs.get("prefix") or kwargs.get("destination") is not None:
            raise ShardwrightError("state_dict of a distributed model takes rank0_only alone: it gives original names")
        return self._state.whole(rank0_only=rank0_only)

    def as_held(self) -> AbstractContextManager[None]:
        """A context in which ``model.module.state_dict()`` has the tensors of this rank alone, those of others on the
        meta device; outside of it that is the whole state dict, and every rank calls it."""
        return self._module_state.as_held()

    def local_state_dict(self) -> dict[str, Any]:
        """The part of the state dict that this rank holds."""
        return self._state.held()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load this rank's share of a whole state dict, or what `local_state_dict` gave on this rank under the same
        plan. Raises PlanError for names and shapes that do not fit."""
        if assign:
            raise ShardwrightError("assign=True would replace the parameters that optimizers know: leave it False")
        return self._state.load(state_dict, strict=strict)

    def __getattr__(self, name: str) -> Any:
        try:
            found = super().__getattr__(name)
        except AttributeError:
            found = getattr(super().__getattr__("module"), name)
        if isinstance(found, nn.Module | torch.Tensor | MethodType):  # a part, of which this rank may hold a part
            self._require_own_step(f"used ({name})")
        if name == "generate" and isinstance(found, MethodType):
            from shardwright.torch.generation import of_split  # which makes steps, of models

            return of_split(self, found)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the model, where attributes are read from too, unless it is one of this class."""
        module = vars(self).get("_modules", {}).get("module")
        if module is not None and name in ("session", "runtime", "model_run"):
            raise ShardwrightError(
                f"model.{name} is what runs the split model: to set an attribute of that name on your own module, use "
                f"model.module.{name}"
            )
        if module is None or name in vars(self) or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __deepcopy__(self, memo: Any) -> nn.Module:
        """A copy of the weights, with which this model runs where a step is given it; see `WeightsCopy`. So
        `torch.optim.swa_utils.AveragedModel` averages a split model. Every rank copies."""
        from shardwright.torch.weights_copy import copied  # which runs models

        return copied(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling: a split model is no object to pickle. Raises ShardwrightError."""
        raise ShardwrightError(
            "a DistributedModel is pickled (by torch.save, say), and one rank of it holds a part of the model: save "
            "model.state_dict(), which is whole and which every rank calls"
        )

    def _is_in_parts(self) -> bool:
        """Whether this rank holds a part of the model."""
        flat, bound = self.runtime.split_model.parts.flat, self.session.bound
        return max(bound.size("pp"), bound.size("tp")) > 1 or (flat is not None and flat.is_shared)

    def can_ask_for_parts(self) -> bool:
        """Whether this rank holds a part of the model, in a run that is under way."""
        is_now = sessions.is_initialized() and any(run is self.model_run for run in sessions.current().models)
        return is_now and self._is_in_parts()

    def _serve_clipping(self, *_: Any) -> None:
        if self._is_in_parts():
            serve_plain_clipping(self)


def of_one_model() -> str:
    """The rule for steps of several models, with the ways round."""
    return (
        "a step is given all models that it calls as arguments, and gives one of them the loss, from which gradients "
        "flow through all: def step(generator, discriminator, noise): generator.backward(f(discriminator(generator("
        "noise)))). For several losses make a step of each, or put the models into one module, "
        "sw.DistributedModel(nn.ModuleDict({...})), with an optimizer for the parameters of each"
    )


def _refuse_backward(output: Any, replicas: int) -> None:
    """Let a backward pass raise ShardwrightError that comes to what the model gave outside of a step."""

    def refuse(gradient: torch.Tensor) -> None:
        raise ShardwrightError(
            f"a backward pass through a model that was called outside of a step: nothing sums its gradients over the "
            f"{replicas} replicas, which would part from each other. Call the model and model.backward(loss) inside a "
            f"function decorated with @sw.step"
        )

    for tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(refuse)


def _begun(session: sessions.Session, module: nn.Module, plan: Plan | str | Path | None) -> ModelRun:
    """The place of a model in the session. Raises on all ranks where it fails on one; see `Session.begin_model`."""
    try:
        wrapped = next((path for path, one in module.named_modules() if isinstance(one, DistributedModel)), None)
        if wrapped is not None:
            where = f"{type(module).__name__} holds a DistributedModel, {wrapped}" if wrapped else "the module is one"
            raise ShardwrightError(f"sw.DistributedModel takes a plain module, and {where}: wrap the whole once")
        return session.begin_model(module, plan)
    except Exception as error:
        session.agreement.meet("sw.DistributedModel", failure=error)  # which raises it, and tells the others
        raise


def _computed_in(dtype: torch.dtype, leaf: Any) -> Any:
    """An input of the model in the dtype in which steps take it."""
    return leaf.to(step_dtype(leaf.dtype, dtype)) if isinstance(leaf, torch.Tensor) else leaf
