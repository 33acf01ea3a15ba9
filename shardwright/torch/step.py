"""``@sw.step``: a function that runs once for every microbatch, wherever its parts live."""

import copy
import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, overload

import torch
from torch.utils import _pytree as pytree

from shardwright.backends.torch.program import tensors_in
from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions
from shardwright.torch.mode import run_step
from shardwright.torch.model import DistributedModel
from shardwright.torch.output import StepOutput

StepFunction = Callable[..., Any]


@overload
def step(function: StepFunction) -> StepFunction: ...
@overload
def step(
    *, non_split_inputs: Iterable[str] = (), input_split_axes: Mapping[str, int] | None = None
) -> Callable[[StepFunction], StepFunction]: ...
def step(
    function: StepFunction | None = None,
    *,
    non_split_inputs: Iterable[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
) -> Any:
    """Make a training or evaluation step of a function of (model, batch …).

    The tensors among its arguments are split into microbatches along axis 0. The body runs once for each signature, on
    stand-ins with the shapes of one microbatch; reading a tensor's value in it is an error. Each tensor that it returns
    becomes a `StepOutput`, the same on every rank.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: for arguments whose batch is not on axis 0, the axis.

    Raises:
        ShardwrightError: when called: the batch does not divide into the microbatches; pipeline peers were given
            different batches.
        CaptureError: when first called: the body cannot be recorded.
    """
    if function is None:
        return lambda given: _Step(given, frozenset(non_split_inputs), dict(input_split_axes or {}))
    return _Step(function, frozenset(non_split_inputs), dict(input_split_axes or {}))


class _Step:
    def __init__(self, function: StepFunction, whole: frozenset[str], axes: dict[str, int]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.whole, self.axes = whole, axes
        self._signature = inspect.signature(function)
        named = set(self._signature.parameters)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._signature.parameters.values())
        for name in (*whole, *axes):
            if name not in named and not takes_any:
                raise ShardwrightError(f"the step function has no argument {name!r}: it has {', '.join(sorted(named))}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = sessions.current()
        model = session.model
        if model is None:
            raise ShardwrightError("wrap the model first: sw.DistributedModel(model)")
        bound = self._signature.bind(*args, **kwargs)
        arguments = {name: _plain(value) for name, value in bound.arguments.items()}
        leaves, spec = pytree.tree_flatten(arguments, is_leaf=lambda item: item is model)
        names = [str(path[0].key) for path, _ in pytree.tree_flatten_with_path(arguments)[0]]  # type: ignore[attr-defined]
        count = session.microbatches
        device = session.bound.device
        positions, inputs = [], []
        literals: list[Any] = []
        for position, (leaf, name) in enumerate(zip(leaves, names, strict=True)):
            if isinstance(leaf, torch.Tensor):
                positions.append(position)
                inputs.append(self._slices(leaf.to(device, non_blocking=True), name, count, position))
                literals.append(None)
            else:
                literals.append(leaf)
        microbatches = [[pieces[m] for pieces in inputs] for m in range(count)]

        def body(stand_ins: list[torch.Tensor]) -> Any:
            given = list(literals)
            for position, tensor in zip(positions, stand_ins, strict=True):
                given[position] = tensor
            call = copy.copy(bound)
            call.arguments = {
                name: _restored(bound.arguments[name], value)
                for name, value in pytree.tree_unflatten(given, spec).items()
            }
            return self.function(*call.args, **call.kwargs)

        runtime = model.runtime
        if id(self) not in runtime.checked_steps:
            runtime.check_peers([leaves[p] for p in positions])
            runtime.checked_steps.add(id(self))
        key = self._key(model, spec, literals, microbatches[0])
        tree, returned = run_step(session, model, key, body, microbatches)
        return tree.build(_Leaves(returned).next)

    def _slices(self, tensor: torch.Tensor, name: str, count: int, position: int) -> list[torch.Tensor]:
        if name in self.whole or tensor.dim() == 0:
            return [tensor] * count
        axis = self.axes.get(name, 0)
        if not -tensor.dim() <= axis < tensor.dim():
            raise ShardwrightError(f"input_split_axes has axis {axis} for {name!r}, of shape {tuple(tensor.shape)}")
        size = tensor.shape[axis]
        if size % count:
            raise ShardwrightError(
                f"argument {name!r} has {size} samples, which {count} microbatches do not divide: give a batch of "
                f"{max(1, round(size / count)) * count}, or choose microbatches that divide {size}; what is no batch "
                f"goes into non_split_inputs"
            )
        return list(tensor.chunk(count, dim=axis))

    def _key(self, model: DistributedModel, spec: Any, literals: list[Any], inputs: list[torch.Tensor]) -> Hashable:
        def hashable(item: Any) -> Hashable:
            if item is model:
                return "the model"
            try:
                hash(item)
            except TypeError:
                return id(item)
            return (type(item), item)

        modes = tuple(module.training for module in model.module.modules())
        kind = model.session.bound.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        shapes = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in inputs)
        return (id(self), str(spec), tuple(map(hashable, literals)), shapes, modes, torch.is_grad_enabled(), autocast)


class _Leaves:
    """Hands out the leaves of a result in order, tensors as StepOutput."""

    def __init__(self, returned: Mapping[int, Any]) -> None:
        self._returned = returned
        self._position = -1

    def next(self, leaf: Any) -> Any:
        self._position += 1
        found = self._returned.get(self._position)
        if found is None:
            return getattr(leaf, "value", None)
        return StepOutput(found.outputs, found.everywhere, found.weights)


def _plain(value: Any) -> Any:
    """Mappings such as tokenizers return, as dicts, so that their tensors are found."""
    if isinstance(value, UserDict):
        return dict(value.data)
    is_leaf = not isinstance(value, (torch.Tensor, torch.nn.Module)) and pytree.tree_structure(value).is_leaf()
    if is_leaf and tensors_in(value):
        raise ShardwrightError(
            f"a {type(value).__name__} among the arguments of the step holds tensors: pass tensors, or lists, tuples "
            f"and dicts of them"
        )
    return value


def _restored(original: Any, value: Any) -> Any:
    if isinstance(original, UserDict):
        made = copy.copy(original)
        made.data = value
        return made
    return value
