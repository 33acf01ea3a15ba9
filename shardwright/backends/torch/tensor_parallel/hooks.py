"""Hooks on modules, which no replay calls."""

from torch import nn

from shardwright.backends.torch.program.early_checks import watching_hooks
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError
from shardwright.core.errors import ShardwrightError


def hooked(module: nn.Module, path: str = "") -> str | None:
    """The first module with a hook that watches, and the hook; None where there is none. The ops of libraries' hooks
    are captured with those of the model."""
    for inner, found in module.named_modules(prefix=path):
        for _, hook in watching_hooks(found):
            return f"{inner or 'the model'} has a hook ({getattr(hook, '__qualname__', type(hook).__name__)})"
    return None


def require_no_hooks(module: nn.Module, path: str) -> None:
    """Raise NotReplayableError for a hook inside a unit."""
    said = hooked(module, path)
    if said is not None:
        raise NotReplayableError(f"{said}, which is called on whole tensors")


def refuse_hooks(model: nn.Module) -> None:
    """Raise ShardwrightError for hooks on modules: units run op by op, and no module is called."""
    said = hooked(model)
    if said is not None:
        raise ShardwrightError(
            f"{said} that would never be called: on the tensor axis a model's ops run on pieces, without its modules. "
            f"Take it off (handle.remove()), or use a tensor-parallel degree of 1"
        )
