"""Contexts to build a model in, before it is wrapped."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from shardwright.backends.torch.capture.tensor_parallel_marks import tensor_parallelism as marked_for_tensor_axis
from shardwright.backends.torch.state.deferred_init import DeferredInit
from shardwright.core.errors import ShardwrightError
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


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tensor_parallel_config: Any
) -> Iterator[None]:
    """SageMaker's context to build a model in: its modules marked for the tensor axis, its parameters of a dtype and,
    under the key ``delayed_parameter_initialization`` of `init`, without memory (`delay_param_initialization`).

    Args:
        tensor_parallelism: whether new modules are marked as by `set_tensor_parallelism`.
        dtype: the default dtype inside of the context; None: as it is.
        tensor_parallel_config: refused, as `set_tensor_parallelism` takes none either.

    Raises:
        ShardwrightError: a dtype that parameters cannot have, or settings of SageMaker's own modules.
    """
    delayed = sessions.current().config.delayed_parameter_initialization
    if tensor_parallel_config:
        raise ShardwrightError(
            f"model_creation was given {min(tensor_parallel_config)}: it is for SageMaker's own modules; original "
            f"modules are divided as they are, so leave it out"
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ShardwrightError(f"dtype={dtype!r}: expected a floating dtype of torch, as torch.float16, or None")
    before = torch.get_default_dtype()
    with marked_for_tensor_axis() if tensor_parallelism else nullcontext(), delay_param_initialization(delayed):
        torch.set_default_dtype(before if dtype is None else dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
