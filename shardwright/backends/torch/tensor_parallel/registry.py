"""SageMaker's way to extend tensor parallelism: another form of a module, used where the tensor axis is.

Nothing has to be registered: any module is split by rule. Where a class has a form that splits better (separate gates
in place of interleaved ones, say), it is registered, with hooks that translate arguments and results.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwright.core.errors import ShardwrightError

Hook = Callable[..., Any]
_ARGUMENTS = "_shardwright_init_arguments"


@dataclass(frozen=True, slots=True)
class Registered:
    """The module that takes the place of a class, and the hooks that translate between the two."""

    module: type[nn.Module]
    init_hook: Hook | None
    forward_hook: Hook | None
    return_hook: Hook | None


_registered: dict[type[nn.Module], Registered] = {}


def tp_register(
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Decorate a module class: see `tp_register_with_module`."""

    def register(module_cls: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(module_cls, dist_module, init_hook, forward_hook, return_hook)
        return module_cls

    return register


def tp_register_with_module(
    module_cls: type[nn.Module],
    dist_module: type[nn.Module],
    init_hook: Hook | None = None,
    forward_hook: Hook | None = None,
    return_hook: Hook | None = None,
) -> None:
    """Use ``dist_module`` for every ``module_cls`` of a model that is wrapped for a tensor axis.

    It is written on whole tensors, as any module, and has its parameters and buffers under the same names, so that
    state dicts stay as they are. Register before the model is built: the arguments of each module are noted then.

    Args:
        init_hook: from the arguments of ``module_cls`` to (args, kwargs) of ``dist_module``; default: the same.
        forward_hook: from the arguments of a call to (args, kwargs); default: the same.
        return_hook: from the result of ``dist_module`` to that of ``module_cls``; default: the same.

    Raises ShardwrightError when the class is registered already, or for an argument that is no class of modules.
    """
    for given in (module_cls, dist_module):
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            raise ShardwrightError(f"tp_register takes classes of modules: given {given!r}")
    if module_cls in _registered:
        raise ShardwrightError(f"{module_cls.__name__} is registered already, for {_registered[module_cls].module}")
    _registered[module_cls] = Registered(dist_module, init_hook, forward_hook, return_hook)
    original = module_cls.__init__

    @functools.wraps(original)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if type(self) is module_cls:
            self.__dict__[_ARGUMENTS] = (args, kwargs)

    module_cls.__init__ = init  # type: ignore[method-assign]


def replace_registered(model: nn.Module) -> list[str]:
    """Put the registered forms in the place of a model's modules; return the paths of those replaced. Parameters keep
    their identity. Raises ShardwrightError for modules built before they were registered, and for names or shapes that
    differ."""
    found = [(path, module) for path, module in model.named_modules() if path and type(module) in _registered]
    for path, module in found:
        parent_path, _, last = path.rpartition(".")
        setattr(model.get_submodule(parent_path), last, _replacement(path, module))
    return [path for path, _ in found]


def _replacement(path: str, module: nn.Module) -> nn.Module:
    registered = _registered[type(module)]
    if _ARGUMENTS not in vars(module):
        raise ShardwrightError(
            f"{path} was built before {type(module).__name__} was registered: register first, then build the model"
        )
    args, kwargs = vars(module)[_ARGUMENTS]
    if registered.init_hook is not None:
        args, kwargs = registered.init_hook(*args, **kwargs)
    made = registered.module(*args, **kwargs)
    for kind in ("parameters", "buffers"):
        own, wanted = dict(getattr(module, f"named_{kind}")()), dict(getattr(made, f"named_{kind}")())
        if {k: t.shape for k, t in own.items()} != {k: t.shape for k, t in wanted.items()}:
            raise ShardwrightError(
                f"{registered.module.__name__} has {kind} {_shapes(wanted)}, and {type(module).__name__} at {path} has "
                f"{_shapes(own)}: give both the same names and shapes, so that state dicts stay as they are"
            )
        for name, tensor in own.items():
            holder_path, _, last = name.rpartition(".")
            setattr(made.get_submodule(holder_path), last, tensor)
    made.train(module.training)
    if registered.forward_hook is not None or registered.return_hook is not None:
        made.forward = functools.partial(_translated, made.forward, registered)
    return made


def _translated(forward: Callable[..., Any], registered: Registered, *args: Any, **kwargs: Any) -> Any:
    if registered.forward_hook is not None:
        args, kwargs = registered.forward_hook(*args, **kwargs)
    result = forward(*args, **kwargs)
    return result if registered.return_hook is None else registered.return_hook(result)


def _shapes(tensors: dict[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items()) or "none"
