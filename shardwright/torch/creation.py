"""Contexts to build a model in, before it is wrapped."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardwright.backends.torch.capture.tensor_parallel_marks import tensor_parallelism as marked_for_tensor_axis
from shardwright.backends.torch.state.deferred_init import DeferredInit
from shardwright.core.errors import MissingCapabilityError, PlanWarning, ShardwrightError, nearest
from shardwright.torch import session as sessions


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Build a model without memory for its parameters: they have values for a moment, while they are initialised.

    Wrapped by ``DistributedModel(model)`` each rank makes the values of the parameters that it holds, or of its pieces
    of them: those that the same code makes outside of this context after the same ``torch.manual_seed``, which is to be
    called on every rank. Random numbers that are drawn later are the same too. With ``weights=`` the values come from
    there. Buffers (masks, rotary frequencies) are made as usual.

    In between, what asks for the values of parameters is refused; inside of the context it is not. Parameters whose
    memory is NumPy's keep it.

    Args:
        enabled: False builds the model plainly.
    """
    with DeferredInit().noting() if enabled else nullcontext():
        yield


_SAME_NUMBERS = (
    "distribute_embedding", "flash_attention", "fused_bias_gelu", "fused_dropout", "fused_softmax",
    "query_key_layer_scaling", "zero_init",
)  # fmt: skip
"""Settings of kernels, of initial values, and of a factor that is taken back before the softmax."""
_OTHER_NUMBERS = ("attention_in_fp32", "fp32_residual_addition", "use_alibi")


def require_no_other_numbers(settings: Mapping[str, Any], call: str) -> None:
    """Raise for settings of SageMaker's own modules, given to a function of this name, that would change numbers, and
    for unknown ones."""
    for name, value in settings.items():
        if name not in (*_SAME_NUMBERS, *_OTHER_NUMBERS):
            raise ShardwrightError(
                f"{call} knows no setting {name!r}: {nearest(name, (*_SAME_NUMBERS, *_OTHER_NUMBERS))}"
            )
        if value and name in _OTHER_NUMBERS:
            raise MissingCapabilityError(
                f"{call}({name}={value!r}) changes what SageMaker's own modules compute; the original modules "
                f"are divided here, and compute as they are: leave it out, or set it in the model's own configuration"
            )
    left = sorted(name for name, value in settings.items() if value)
    if left:
        warnings.warn(
            f"{call}: {', '.join(left)} of SageMaker's own modules have no effect; the original modules are "
            f"divided as they are, with the same numbers",
            PlanWarning,
            stacklevel=4,
        )


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """SageMaker's context to build a model in: its modules marked for the tensor axis, its parameters of a dtype and,
    under the key ``delayed_parameter_initialization`` of `init`, without memory (`delay_param_initialization`).

    Args:
        tensor_parallelism: whether new modules are marked as by `set_tensor_parallelism`.
        dtype: the default dtype inside of the context; None: as it is.
        tensor_parallel_config: settings of SageMaker's own modules, under ``tensor_parallelism``. Original modules are
            divided as they are: settings that change no number (fused kernels) have no effect, which a warning says.

    Raises:
        ShardwrightError: a dtype that parameters cannot have, or an unknown setting.
        MissingCapabilityError: a setting that would change numbers.
    """
    delayed = sessions.current().config.delayed_parameter_initialization
    require_no_other_numbers(tensor_parallel_config if tensor_parallelism else {}, "model_creation")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ShardwrightError(f"dtype={dtype!r}: expected a floating dtype of torch, as torch.float16, or None")
    before = torch.get_default_dtype()
    with marked_for_tensor_axis() if tensor_parallelism else nullcontext(), delay_param_initialization(delayed):
        torch.set_default_dtype(before if dtype is None else dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
