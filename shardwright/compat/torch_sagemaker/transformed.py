"""``torch.sagemaker.transform``: a model, ready for the keys of the run."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import shardwright.torch as _torch
from shardwright.backends.torch.state.weight_transfer import take_values
from shardwright.compat.torch_sagemaker.initialisation import default_init
from shardwright.compat.torch_sagemaker.state import state
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from shardwright.torch.session import current

_TRAINS_IN_STEP = (
    "what torch.sagemaker.transform returned is sharded already, and trains in a step: leave FSDP out, put the forward "
    "and the backward pass into a function decorated with @step of shardwright.torch, with model.backward(loss) in the "
    "place of loss.backward(), and wrap the optimizer in shardwright.torch.DistributedOptimizer"
)


class TransformedModel(_torch.DistributedModel):
    """A model that `transform` has taken over."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As `DistributedModel.forward`. Raises ShardwrightError outside of a step, but for evaluation."""
        if torch.is_grad_enabled() and not self.runtime.in_step_body:
            raise ShardwrightError(_TRAINS_IN_STEP)
        return super().forward(*args, **kwargs)


def transform(
    model: nn.Module,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
    load_state_dict_from_rank0: bool = False,
    cp_comm_type: str = "p2p",
) -> nn.Module:
    """Make a model ready for the keys of the run: itself where they leave it to the script's own FSDP, else a
    `DistributedModel`. Its weights are those that it has, or, on the meta device, the ones of its own initialisation.

    Args:
        device: where the model is moved that stays itself; a `DistributedModel` is on the device of the run.
        dtype: of the floating parameters and buffers.
        load_state_dict_from_rank0: whether the model of rank 0 alone has values, and those of the others are on the
            meta device.
        cp_comm_type: of context parallelism, which is not carried out.

    Raises:
        ShardwrightError: another device than the run's, a dtype that parameters cannot have, or rank 0 without values.
        MissingCapabilityError: ``config``, which configures SageMaker's own transformer.
    """
    is_native = state.is_native
    if config:
        raise MissingCapabilityError(
            f"transform(config={dict(config)!r}): it configures SageMaker's own transformer, and the original model is "
            f"divided here: set what it means in the model's own configuration, and leave config out"
        )
    if cp_comm_type not in ("p2p", "all_gather"):
        raise ShardwrightError(f"cp_comm_type={cp_comm_type!r}: expected 'p2p' or 'all_gather'")
    if dtype is not None:
        if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ShardwrightError(f"dtype={dtype!r}: expected a floating dtype of torch, as torch.bfloat16, or None")
        model.to(dtype)
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if is_native:
        return model if device is None or on_meta else model.to(device)
    own = current().bound
    if device is not None and torch.device(device).type not in (own.device.type, "meta"):
        raise ShardwrightError(f"transform(device={str(device)!r}): the run is on {own.device}; leave device out")
    weights: Callable[[nn.Module], None] | None = default_init(model) if on_meta else None
    if load_state_dict_from_rank0:
        weights = None
        _values_of_rank_0(model)
    return TransformedModel(model, weights)


def _values_of_rank_0(model: nn.Module) -> None:
    """Give the model the values of rank 0. Raises ShardwrightError on all ranks where that has none."""
    session = current()
    lacks = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    failure = None
    if session.bound.rank == 0 and lacks:
        failure = ShardwrightError(
            "load_state_dict_from_rank0=True: the model of rank 0 is on the meta device, and has no values: build it "
            "there with its weights"
        )
    session.agreement.meet("torch.sagemaker.transform, for the values of rank 0", failure=failure)
    if lacks:
        _give_memory(model, session.bound.device)
    if session.bound.mesh.size > 1:
        take_values(model, 0, session.bound, session.watchdog)


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Give what is on the meta device memory without values. What is tied stays tied, as by `Module.to_empty` it does
    not."""
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, own in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if own.is_meta:
                if id(own) not in made:
                    empty = torch.empty_like(own, device=device)
                    is_parameter = isinstance(own, nn.Parameter)
                    made[id(own)] = nn.Parameter(empty, own.requires_grad) if is_parameter else empty
                setattr(module, name, made[id(own)])
