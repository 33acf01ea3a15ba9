"""What a distributed model has for SageMaker's sake, beside what runs it."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwright.backends.torch.runtime import Runtime
from shardwright.core.errors import MissingCapabilityError, PlanWarning, ShardwrightError
from shardwright.torch import session as sessions
from shardwright.torch.model_run import ModelRun


@dataclass(frozen=True, slots=True)
class SageMakerArguments:
    """The arguments of SageMaker's ``DistributedModel`` that are about its own machinery, with its defaults. Those that
    would change results are carried out or refused; of the others a value that is not the default is named by a
    warning.

    Raises:
        ShardwrightError: a value that theirs refuses too.
    """

    trace_device: str | None = "gpu"
    trace_execution_times: bool = False
    trace_memory_usage: bool = False
    overlapping_allreduce: bool = True
    average_grads_across_microbatches: bool = True
    bucket_cap_mb: float = 25
    broadcast_buffers: bool = True
    gradient_as_bucket_view: bool = False

    def __post_init__(self) -> None:
        if self.trace_device not in ("gpu", "cpu", None):
            raise ShardwrightError(f"trace_device={self.trace_device!r}: expected 'gpu', 'cpu' or None")
        if self.trace_execution_times and self.trace_device == "cpu":
            raise ShardwrightError("trace_execution_times=True and trace_device='cpu': leave one of them out")
        for name, (default, instead) in _WITHOUT_EFFECT.items():
            given = getattr(self, name)
            if given != default:
                warnings.warn(f"{name}={given!r} has no effect: {instead}", PlanWarning, stacklevel=5)

    def require_same_buffers(self, module: nn.Module, replicas: int) -> None:
        """Raise MissingCapabilityError for ``broadcast_buffers=False`` of a model with buffers, over several replicas:
        these would have buffers of their own."""
        name = next((name for name, _ in module.named_buffers()), None)
        if not self.broadcast_buffers and name is not None and replicas > 1:
            raise MissingCapabilityError(
                f"broadcast_buffers=False: the {replicas} replicas of a model have the same buffers here, and the "
                f"model has {name!r}; leave it True"
            )

    @property
    def reduction(self) -> Literal["sum"] | None:
        """The relation of losses to their batch that the arguments say; None: nothing."""
        return None if self.average_grads_across_microbatches else "sum"


_WITHOUT_EFFECT: dict[str, tuple[Any, str]] = {
    "trace_execution_times": (
        False, "a model is captured without being run, and times are predicted; `shardwright profile` measures them",
    ),
    "trace_memory_usage": (False, "memory is counted from the captured model"),
    "overlapping_allreduce": (True, "gradients are exchanged beside the backward pass, with the same results"),
    "bucket_cap_mb": (25, "the plan decides how large buckets are (bucket_bytes)"),
}  # fmt: skip


class SageMakerModel(nn.Module):
    """The names of SageMaker's ``DistributedModel`` that ask of a model where its parts are."""

    runtime: Runtime
    session: "sessions.Session"
    model_run: ModelRun
    module: nn.Module

    @property
    def partitioned(self) -> bool:
        """Whether the model is split: with a plan at once, else from the first step on."""
        return self.runtime.steps is not None

    def get_module(self) -> nn.Module:
        """The module that was wrapped."""
        return self.module

    def local_named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds, by original names behind ``prefix``; without ``recurse`` those of the
        model's outermost module alone."""
        self.runtime.split_model.make_values()
        yield from _named(self.runtime.ownership.local_parameters(), prefix, recurse)

    def local_parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters that this rank holds; see `local_named_parameters`."""
        for _, parameter in self.local_named_parameters(recurse=recurse):
            yield parameter

    def local_named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that this rank holds; see `local_named_parameters`."""
        yield from _named(self.runtime.ownership.local_buffers(), prefix, recurse)

    def local_buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        """The buffers that this rank holds; see `local_named_parameters`."""
        for _, buffer in self.local_named_buffers(recurse=recurse):
            yield buffer

    def local_named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = ""
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules with parameters or buffers of their own that this rank holds, by original names behind
        ``prefix``. Those in ``memo`` are left out, and those that are given are added to it, as in
        `torch.nn.Module.named_modules`."""
        held = {**self.runtime.ownership.local_parameters(), **self.runtime.ownership.local_buffers()}
        owners = {name.rpartition(".")[0] for name in held}
        known = set() if memo is None else memo
        for name, module in self.module.named_modules():
            if name in owners and module not in known:
                known.add(module)
                yield ".".join(filter(None, (prefix, name))), module

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules with parameters or buffers of their own that this rank holds."""
        for _, module in self.local_named_modules():
            yield module

    def is_distributed_parameter(self, param: nn.Parameter) -> bool:
        """Whether a parameter is divided over the ranks of the tensor axis, from the first step on."""
        tensor = self.runtime.split_model.parts.tensor
        names = set() if tensor is None else set(tensor.places)
        return any(own is param and name in names for name, own in self.module.named_parameters())

    def distributed_modules(self) -> Iterator[nn.Module]:
        """The modules of which a parameter of their own is divided over the ranks of the tensor axis."""
        tensor = self.runtime.split_model.parts.tensor
        owners = set() if tensor is None else {name.rpartition(".")[0] for name in tensor.places}
        for name, module in self.module.named_modules():
            if name in owners:
                yield module

    def is_scaled_batch_parameter(self, param: nn.Parameter) -> bool:
        """Whether a parameter is used on the batches of all ranks of the tensor axis, and not on this rank's alone. On
        a tensor axis that are all parameters of the model: its ranks compute with the same samples."""
        has_axis = self.session.bound.size("tp") > 1
        return has_axis and any(own is param for own in self.module.parameters())

    def scaled_batch_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds whose gradients are summed over the ranks that hold the same part
        (RDP_GROUP): on a tensor axis all of them."""
        if self.session.bound.size("tp") > 1:
            yield from self.local_named_parameters()

    def default_reducer_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that this rank holds whose gradients are summed over all ranks with batches of their own
        (DP_GROUP): without a tensor axis all of them."""
        if self.session.bound.size("tp") == 1:
            yield from self.local_named_parameters()

    def register_post_partition_hook(self, hook: Callable[[Any, Any], Any]) -> RemovableHandle:
        """Let ``hook(model, optimizer)`` be called once, when the model has been split and before its first step runs;
        the optimizer is the newest of this model that was wrapped, or None. Of a model that is split already it is
        called at once.

        Returns a handle, whose ``remove()`` takes the hook back.
        """
        if not callable(hook):
            raise ShardwrightError(f"hook={hook!r}: expected a function of (model, optimizer)")
        hooks = self.model_run.post_partition_hooks
        handle = RemovableHandle(hooks)
        hooks[handle.id] = lambda optimizer: hook(self, optimizer)
        if self.partitioned and (failure := self.model_run.run_post_partition_hooks()) is not None:
            raise failure
        return handle

    def cpu(self) -> "SageMakerModel":
        """The model, where it runs on CPUs. Raises MissingCapabilityError where other devices have its parts."""
        bound = self.session.bound
        if bound.mesh.size == 1:
            return super().cpu()
        if bound.device.type != "cpu":
            raise MissingCapabilityError(
                f"model.cpu(): its parts run on {bound.device} and its peers; take model.state_dict(), which is whole "
                f"and on the CPU, into the unsplit model"
            )
        return self

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **options: Any,
    ) -> Iterator[None]:
        """A context for as many steps on every rank, as under ``throw_on_early_termination=True`` of
        `DistributedDataParallel.join`: a rank that leaves it while others begin another step raises DisagreementError,
        and so do they. Every rank enters it. ``enable=False`` makes it none at all.

        Raises MissingCapabilityError for other options than those of `DistributedDataParallel.join`.
        """
        if options:
            raise MissingCapabilityError(f"model.join({', '.join(options)}): known are those of DDP's join")
        yield
        if enable:
            self.session.agreement.meet(
                self.model_run.of_model(
                    "the end of model.join(): ranks run as many steps as each other; sw.sampler gives every replica as "
                    "many samples, and the last step may have a batch of another size"
                )
            )


_Tensor = TypeVar("_Tensor", bound=torch.Tensor)


def _named(held: Mapping[str, _Tensor], prefix: str, recurse: bool) -> Iterator[tuple[str, _Tensor]]:
    for name, tensor in held.items():
        if recurse or "." not in name:
            yield ".".join(filter(None, (prefix, name))), tensor
