"""Arguments of a step that say themselves what a microbatch has of them, by SageMaker's ``smp_slice``."""

import copy
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.backends.torch.capture.held_tensors import is_plain, keep_modules, slots_of, tensors_in
from shardwright.core.errors import ShardwrightError


def can_be_sliced(item: Any) -> bool:
    """Whether an argument has ``smp_slice``."""
    return callable(getattr(item, "smp_slice", None)) and not isinstance(item, (torch.Tensor, torch.nn.Module, type))


def with_tensors(item: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """A copy of an object with other tensors in the places of its own, in the order of `tensors_in`."""
    memo: dict[int, Any] = {id(own): other for own, other in zip(tensors_in(item), tensors, strict=True)}
    keep_modules(item, memo)
    return copy.deepcopy(item, memo)


@dataclass(frozen=True, slots=True)
class Sliced:
    """The parts of one object.

    Attributes:
        parts: for each microbatch, what it has of the object.
        tensors: for each microbatch, the tensors in it.
        axes: of each tensor, the dim that is its batch; None where every microbatch has the same one.
        samples: the samples of each microbatch, where some tensor is divided.
        form: what the parts have beside tensors.
    """

    parts: tuple[Any, ...]
    tensors: tuple[tuple[torch.Tensor, ...], ...]
    axes: tuple[int | None, ...]
    samples: tuple[int, ...] | None
    form: Hashable

    @classmethod
    def of(cls, item: Any, name: str, microbatches: int, axis: int) -> "Sliced":
        """Ask an object for the parts of all microbatches. Raises ShardwrightError where these differ in more than
        their tensors, or divide them in different ways."""
        parts = tuple(item.smp_slice(microbatches, number, axis) for number in range(microbatches))
        forms = [_form(part) for part in parts]
        tensors = tuple(tuple(tensors_in(part)) for part in parts)
        kinds = [[(t.dim(), t.dtype) for t in held] for held in tensors]
        for number, (form, kind) in enumerate(zip(forms, kinds, strict=True)):
            if form != forms[0] or kind != kinds[0]:
                raise ShardwrightError(
                    f"{name}.smp_slice gives microbatch {number} other values beside its tensors, or tensors of other "
                    f"kinds, than microbatch 0: microbatches may differ in the contents and sizes of tensors alone"
                )
        axes: list[int | None] = []
        samples: tuple[int, ...] | None = None
        for held in zip(*tensors, strict=True):
            if held[0].dim() <= axis or (microbatches > 1 and all(one is held[0] for one in held)):
                axes.append(None)
                continue
            axes.append(axis)
            sizes = tuple(one.shape[axis] for one in held)
            if samples not in (None, sizes) or 0 in sizes:
                raise ShardwrightError(
                    f"{name}.smp_slice divides one tensor into {list(sizes)} along axis {axis}"
                    + (", and leaves a microbatch without samples" if 0 in sizes else f", and another into {samples}")
                )
            samples = sizes
        return cls(parts, tensors, tuple(axes), samples, forms[0])


def _form(item: Any) -> Hashable:
    """What an object is beside the contents of its tensors, to be compared."""
    if isinstance(item, torch.Tensor):
        return "a tensor"
    if isinstance(item, dict):
        return (type(item), tuple((_plain(key), _form(value)) for key, value in item.items()))
    if isinstance(item, (list, tuple)):
        return (type(item), tuple(map(_form, item)))
    if is_plain(item):
        return _plain(item)
    held = {**getattr(item, "__dict__", {}), **{n: getattr(item, n) for n in slots_of(item) if hasattr(item, n)}}
    if not held:
        return id(item)
    return (type(item), tuple((name, _form(value)) for name, value in held.items()))


def _plain(item: Any) -> Hashable:
    try:
        hash(item)
    except TypeError:
        return id(item)
    return (type(item), item)
