"""A trace of one run of a step body, op by op: the ops that capture records of a model, with the arguments of each."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch.capture.host_draws import host_state
from shardwright.backends.torch.capture.op_schemas import Func, bind, dtype_name
from shardwright.backends.torch.capture.ops import Ref, Template
from shardwright.backends.torch.capture.recorder import Recorded, Recorder
from shardwright.backends.torch.capture.remembered_results import unwatched
from shardwright.backends.torch.compat import FakeTensor
from shardwright.core.rules import op_rules as labels

SMALL = 4096
"""The number of entries up to which the values of a constant are read."""


@dataclass(frozen=True, slots=True)
class Made:
    """The call of an op that made a value: ``function(**arguments)``, in which a Ref stands for each tensor.

    Attributes:
        inputs: the numbers of the values that the Refs' slots stand for.
        outputs: the values that the call made.
    """

    function: Any
    arguments: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


_CROSS_ENTROPY = ("self", "target", "weight", "reduction", "ignore_index", "label_smoothing")


class LossTrace(Recorder):
    """A recorder of a step body from its inputs to its losses. Unlike capture it sees where gradients are cut off."""

    def __init__(self) -> None:
        super().__init__({})
        self.calls_of: dict[int, Made] = {}
        """The call that an op is a part of, by the index of the op."""
        self.without_gradient: set[int] = set()
        """Ops that ran while gradients were off."""
        self.in_modules: set[int] = set()
        """Ops that modules of the model ran, and not the step around it."""
        self.constants: dict[int, tuple[float, ...] | None] = {}
        """Values that come from outside of the step, with their entries where they are few and known."""
        self.outside: dict[int, torch.Tensor] = {}
        """The tensors of these values, where they have entries."""
        self.trained: set[int] = set()
        self.inputs: list[int] = []
        self.numbers_read: str | None = None
        """The place where the value of a tensor first became a Python number; None where no value did."""
        self.read_numbers: list[tuple[float, int]] = []
        """The numbers that values of tensors became, and the number of each value."""
        self.read_before_losses: list[str | None] = []
        """For each loss that was given to ``backward``, what `numbers_read` was then."""
        self.reading_before_losses: set[int] = set()
        """The module calls that had read values of tensors when the last loss was given."""
        self._host_state = host_state()
        self.drawn_on_host: set[int] = set()
        """The values from outside of the step that came after a draw from Python's or NumPy's generator."""
        self._functions_of: dict[int, tuple[Any, dict[str, Any]]] = {}

    def name_all(
        self, inputs: Sequence[torch.Tensor], parameters: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]
    ) -> None:
        """Number the tensors that the step is given, in the same order in every run."""
        self.inputs = [super(LossTrace, self).name(tensor, "input", "") for tensor in inputs]
        for name, parameter in parameters.items():
            if id(parameter) not in self._value_of:
                number = super().name(parameter, "parameter", name)
                if parameter.requires_grad:
                    self.trained.add(number)
        for name, buffer in buffers.items():
            if id(buffer) not in self._value_of:
                super().name(buffer, "buffer", name)

    def name(self, tensor: torch.Tensor, role: Any, name: str) -> int:
        """Number a tensor from outside of the step."""
        number = super().name(tensor, role, name)
        self._note_outside(number, tensor)
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            self.trained.add(number)
        return number

    @property
    def knows_its_numbers(self) -> bool:
        """Whether the value of every one-entry tensor from outside of the step is known."""
        return not any(
            entries is None and math.prod(self.values[number].shape) == 1 for number, entries in self.constants.items()
        )

    def _note_outside(self, number: int, tensor: torch.Tensor) -> None:
        held = tensor.constant if isinstance(tensor, FakeTensor) else tensor
        self.constants[number] = None
        state = host_state()
        if state != self._host_state:
            self._host_state = state
            self.drawn_on_host.add(number)
        if held is None or held.is_meta or isinstance(held, FakeTensor):
            return
        self.outside[number] = held
        if held.numel() <= SMALL and not held.dtype.is_complex:
            self.constants[number] = tuple(float(entry) for entry in held.detach().reshape(-1).tolist())

    def _record(self, func: Any, known: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if known.name == "aten.detach":
            return self._detached(func, args[0])
        reads_number = known.reads and known.name == "aten._local_scalar_dense" and args[0].dtype != torch.bool
        if reads_number and self._is_of_batch(args[0]):
            self.numbers_read = self.numbers_read or self.path or "the step"
        if known.name == "aten._local_scalar_dense":
            number = super()._record(func, known, args, kwargs)
            self.read_numbers.append((number, self.read(args[0])))
            return number
        if known.name == "aten.lift_fresh":
            result = func(*args, **kwargs)
            number = self.name(result, "constant", "")
            if number not in self.outside:
                self._note_outside(number, args[0])
            return result
        return super()._record(func, known, args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.cross_entropy_loss.default:
            given = dict(zip(_CROSS_ENTROPY, args, strict=False)) | (kwargs or {})
            if given.get("label_smoothing", 0.0) > 0.0 and given["target"].shape != given["self"].shape:
                scores = given.pop("self")
                with self:
                    return smoothed_cross_entropy(scores, **given)
        return unwatched(self._dispatched, func, args, kwargs or {}, modes=1)

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().__torch_dispatch__(func, (), args, kwargs)

    def _is_of_batch(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor depends on the inputs of the step: a counter that a module keeps does not."""
        makers = {number: op for op in self.ops for number in op.outputs}
        pending, seen = [self.read(tensor)], set[int]()
        while pending:
            number = pending.pop()
            if number in self.inputs:
                return True
            if number not in seen and number in makers:
                pending += makers[number].inputs
            seen.add(number)
        return False

    def _detached(self, func: Any, source: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = func(source)
        shape, number = tuple(source.shape), self.read(source)
        made = self._new(shape, dtype_name(source.dtype))
        self.ops.append(
            Recorded("view", "aten.detach", (number,), (made,), labels.elementwise([shape], [shape]), self._stack[-1])
        )
        if result is not source:
            self._kept.append(result)
        self._value_of[id(result)] = made
        return result

    def _template(
        self, key: tuple[Any, ...], known: Func, args: tuple[Any, ...], kwargs: dict[str, Any], refs: list[Ref],
        outputs: Sequence[torch.Tensor], shares: bool,
    ) -> Template:  # fmt: skip
        template = super()._template(key, known, args, kwargs, refs, outputs, shares)
        if id(template) not in self._functions_of:
            self._functions_of[id(template)] = (key[0], bind(known, args, kwargs, refs))
        return template

    def _emit(self, template: Template, name: str, inputs: Sequence[int], call: int) -> list[int]:
        first = len(self.ops)
        made = super()._emit(template, name, inputs, call)
        function, arguments = self._functions_of[id(template)]
        whole = Made(function, arguments, tuple(inputs), tuple(made))
        for index in range(first, len(self.ops)):
            self.calls_of[index] = whole
            if len(self._stack) > 1:
                self.in_modules.add(index)
            if not torch.is_grad_enabled():
                self.without_gradient.add(index)
        return made


def smoothed_cross_entropy(
    scores: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Cross entropy with smoothed labels, as torch defines it, without picking entries out by a mask, which no fake
    tensor can do. ``reduction`` is 0 for none, 1 for the mean by class weights, 2 for the sum."""
    dim = 1 if scores.dim() > 1 else 0
    logs = F.log_softmax(scores, dim)
    counted = target != ignore_index
    each = F.nll_loss(logs, target, weight, reduction="none", ignore_index=ignore_index)
    spread = logs if weight is None else logs * weight.reshape([-1 if d == dim else 1 for d in range(logs.dim())])
    smooth = (-spread.sum(dim)).masked_fill(~counted, 0.0)
    mixed = (1.0 - label_smoothing) * each + label_smoothing / scores.shape[dim] * smooth
    if reduction == 0:
        return mixed
    if reduction == 2:
        return mixed.sum()
    weights = counted.to(logs.dtype)
    if weight is not None:
        weights = weight[target.masked_fill(~counted, 0)] * weights
    return mixed.sum() / weights.sum()
