"""SageMaker's calls that are computed again in the backward pass. They are torch's own, which plans see and count."""

from typing import Any

from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from shardwright.backends.torch.capture.own_checkpoints import require_marks, warn_of_groups
from shardwright.core.errors import ShardwrightError


def checkpoint(module: nn.Module, *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Call a module whose activations are computed again in the backward pass, inside of a model's forward.

    Args:
        module: is called with ``args`` and ``kwargs``.
        preserve_rng_state: random numbers are always drawn alike again.

    Raises:
        ShardwrightError: the first argument is no module, or random numbers need not be drawn alike.
    """
    require_marks("checkpoint", module, preserve_rng_state, False, "each")
    return torch_checkpoint.checkpoint(module, *args, use_reentrant=False, **kwargs)


def checkpoint_sequential(
    sequential_module: nn.Sequential,
    input: Any,
    preserve_rng_state: bool = True,
    strategy: str = "each",
    pack_args_as_tuple: bool = False,
) -> Any:
    """Call the modules of an ``nn.Sequential`` one after the other, each of which is computed again in the backward
    pass.

    Args:
        input: of the first module; a tuple is its arguments.
        preserve_rng_state: random numbers are always drawn alike again.
        strategy: "each"; "contiguous" and "group_N" as well, which keep the input of every module and not of every
            group, with a warning.
        pack_args_as_tuple: whether a tuple is handed to a module as one argument, and not as several.

    Raises:
        ShardwrightError: no ``nn.Sequential``, an unknown strategy, or random numbers need not be drawn alike.
    """
    require_marks("checkpoint_sequential", sequential_module, preserve_rng_state, pack_args_as_tuple, strategy)
    if not isinstance(sequential_module, nn.Sequential):
        raise ShardwrightError(
            f"checkpoint_sequential calls an nn.Sequential, not a {type(sequential_module).__name__}: checkpoint calls "
            f"one module"
        )
    warn_of_groups(sequential_module, strategy)
    value = input
    for module in sequential_module:
        given = value if isinstance(value, tuple) and not pack_args_as_tuple else (value,)
        value = torch_checkpoint.checkpoint(module, *given, use_reentrant=False)
    return value
