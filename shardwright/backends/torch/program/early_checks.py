"""Checks for errors that can be known before the first step runs."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from shardwright.backends.torch.compat import accumulation_hooks
from shardwright.backends.torch.program.program import BufferRef, ParameterRef, Program
from shardwright.backends.torch.program.stages import Division
from shardwright.core.errors import CaptureError, PlanError

_HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
COMPUTING_LIBRARIES = ("torch", "transformers", "peft", "shardwright")
"""Packages whose hooks compute something, which is recorded, and do not only watch."""


def require_hooks_fire(modules: Mapping[str, nn.Module], unit_paths: Iterable[str]) -> None:
    """Raise CaptureError for a user's hook on a module whose call is divided: its parts run, on different ranks
    perhaps, and the module itself is never called."""
    units = set(unit_paths)
    if "" in units:
        return
    divided = {""} | {path[:end] for path in units for end in _ends(path)}
    for path in sorted(divided - units):
        for what, _ in watching_hooks(modules[path]) if path in modules else ():
            raise CaptureError(
                f"there is a {what} on {path or 'the model itself'!r}, whose call is divided over the stages, so "
                f"that it cannot fire: put it on modules that one stage holds whole, such as "
                f"{_below(path, units)!r}, or return what it watches from the step"
            )


def watching_hooks(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The hooks on a module that only watch, each after its kind in words."""
    for attribute, what in _HOOKS.items():
        for hook in getattr(module, attribute).values():
            if str(getattr(hook, "__module__", "")).split(".")[0] not in COMPUTING_LIBRARIES:
                yield what, hook


def require_whole_gradients(
    model: nn.Module, microbatches: int, ranks: int, tensor_ranks: int, shared: Collection[str] = ()
) -> None:
    """Raise CaptureError for a user's hook on a parameter that would not be called with the parameter's gradient.

    A hook that waits for the gradient (``register_post_accumulate_grad_hook``) is called after the first microbatch
    already, and before replicas are summed. On the tensor axis a hook that changes it (``register_hook``) is called
    with a shard of the gradient, or with one term of a sum; so it is with each term of a parameter that several stages
    use, ``shared`` by name.
    """
    for name, parameter in model.named_parameters():
        hooks = [hook for hook in accumulation_hooks(parameter) if not getattr(hook, "is_of_the_runtime", False)]
        if hooks and max(microbatches, ranks) > 1:
            raise CaptureError(
                f"there is a hook on {name} by register_post_accumulate_grad_hook: it would run before the gradient is "
                f"whole, which is after all {microbatches} microbatches and all ranks. Take it off, and do after the "
                f"step what it does"
            )
        if parameter._backward_hooks and tensor_ranks > 1:
            raise CaptureError(
                f"there is a hook on {name} by register_hook: on a tensor axis of {tensor_ranks} ranks it would be "
                f"given pieces or terms of the gradient. Take it off, and change parameter.grad after the step"
            )
        if parameter._backward_hooks and name in shared:
            raise CaptureError(
                f"there is a hook on {name} by register_hook: several pipeline stages use this parameter, and it would "
                f"be given the part of the gradient that each of them makes. Take it off, and change parameter.grad "
                f"after the step"
            )


def used_by_several(divisions: Iterable[Division]) -> set[str]:
    """The parameters that several stages use."""
    return {
        name
        for division in divisions
        for name, count in Counter(name for part in division.parts for name in part.parameters).items()
        if count > 1
    }


def _ends(path: str) -> list[int]:
    """The ends of the paths of the modules that hold a module."""
    holder = path.rpartition(".")[0]
    return [i for i, letter in enumerate(holder) if letter == "."] + [len(holder)]


def _below(path: str, units: set[str]) -> str:
    start = f"{path}." if path else ""
    return min(unit for unit in units if unit.startswith(start))


def require_results(program: Program, ranks: int) -> None:
    """Raise CaptureError for a result that no rank computes: a parameter or buffer, which is only where its stage
    is."""
    if ranks == 1:
        return
    for leaf in program.result.leaves:
        if isinstance(leaf, (ParameterRef, BufferRef)):
            raise CaptureError(
                f"the step returns {leaf.name}, a parameter or buffer of a model that is split over {ranks} pipeline "
                f"ranks, and not every rank holds it: use model.state_dict(), or return something computed from it"
            )


class ModuleTree:
    """The modules of a model as they were when it was wrapped."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._links = []
        for path, module in modules.items():
            holder, _, last = path.rpartition(".")
            if path:
                self._links.append((modules[holder]._modules, last, module, path))

    def require_same(self) -> None:
        """Raise PlanError for a module that was replaced."""
        for held, last, module, path in self._links:
            if held.get(last) is not module:
                now = type(held[last]).__name__ if held.get(last) is not None else "nothing"
                raise PlanError(
                    f"{path} was replaced by {now} after the model was wrapped: stages, and the optimizer, know the "
                    f"old one; change the model first, then call sw.DistributedModel(model)"
                )


def require_alike(programs: Sequence[Program]) -> None:
    """Raise CaptureError unless the microbatches of a step have the same losses and results, whatever their shapes."""
    first = programs[0]
    if len({str(loss.weight) for loss in first.losses}) > 1:
        raise CaptureError(
            "model.backward is called several times in one step with different weights: give all of them the same "
            "weight, or none"
        )
    for other in programs[1:]:
        same = [loss.weight is None for loss in first.losses] == [loss.weight is None for loss in other.losses]
        if not same or first.result.spec != other.result.spec:
            raise CaptureError(
                "the step calls model.backward or returns something else for microbatches of another shape: what it "
                "does may depend on the shapes, how often it calls model.backward and what it returns may not"
            )
