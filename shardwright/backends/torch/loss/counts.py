"""The number that a loss is divided by, computed from a microbatch before the step runs."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from shardwright.backends.torch.capture.ops import Ref
from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.loss.trace import LossTrace, Made
from shardwright.backends.torch.loss.traced_op import Counted


class NotOfBatchError(Exception):
    """A count does not follow from the batch alone; the message says why."""


def _around(trace: LossTrace, call: int) -> set[int]:
    """A module call and the calls that contain it."""
    found = {call}
    while call:
        call = trace.calls[call].parent
        found.add(call)
    return found


class Counting:
    """A computation of some values of a trace from the inputs of the step.

    Args:
        trace: of a microbatch of the shapes that are counted; or of two samples, where a microbatch has one.
        wanted: the values, each a count of samples C / B^power, with that power.
        counted: values that are counts of `nll_loss`.
        alone: the batch dim of every input, for a microbatch of one sample: its size 1 cannot be told from a dim that
            broadcasts, so the sample is counted twice.

    Raises:
        NotOfBatchError: one of them needs more than the batch.
    """

    def __init__(
        self,
        trace: LossTrace,
        wanted: Mapping[int, int],
        counted: Mapping[int, Counted],
        alone: Sequence[int | None] | None,
    ) -> None:
        self.wanted, self.counted, self.alone = dict(wanted), counted, alone
        self._input = {number: position for position, number in enumerate(trace.inputs)}
        self._made: dict[int, tuple[_Call, int]] = {}
        self._outside: dict[int, torch.Tensor] = {}
        pending, seen = list(wanted), set[int]()
        makers = {n: (index, op) for index, op in enumerate(trace.ops) for n in op.outputs}
        while pending:
            number = pending.pop()
            if number in seen or number in self._input:
                continue
            seen.add(number)
            if number in counted:
                count = counted[number]
                pending += [n for n in (count.target, count.weight) if n is not None]
                continue
            if number not in makers:
                if trace.values[number].role != "constant" or number not in trace.outside:
                    what = trace.values[number].name or "a tensor of the model"
                    raise NotOfBatchError(f"it depends on {what}, which not every rank holds")
                self._outside[number] = trace.outside[number]
                continue
            index, op = makers[number]
            made = trace.calls_of.get(index)
            where = trace.calls[op.call].path
            place = f"{op.name}{f' in {where!r}' if where else ''}"
            if op.name == "aten.detach":
                pending += op.inputs
                alias = Made(torch.ops.aten.alias.default, {"self": Ref(0, (), "")}, op.inputs, (number,))
                self._made[number] = (_Call(alias), 0)
                continue
            if trace.reading_before_losses & _around(trace, op.call):
                raise NotOfBatchError(f"{place} is done in a module that reads values of tensors and runs by them")
            if made is None or number not in made.outputs:
                raise NotOfBatchError(f"it is written in place, by {place}")
            if torch.Tag.nondeterministic_seeded in made.function.tags:
                raise NotOfBatchError(f"it depends on the random numbers of {place}")
            self._made[number] = (_Call(made), made.outputs.index(number))
            pending += made.inputs

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[float]:
        """The values for one microbatch."""
        if self.alone is not None:
            inputs = [t if d is None else torch.cat([t, t], d) for t, d in zip(inputs, self.alone, strict=True)]
        known: dict[int, torch.Tensor] = {n: inputs[position] for n, position in self._input.items()}
        with torch.no_grad():
            found = [self._value(number, known, inputs[0].device) for number in self.wanted]
            if not found:
                return []
            values = torch.stack([v.reshape(()).double() for v in found]).tolist()
        if self.alone is None:
            return [float(v) for v in values]
        return [float(v) * 2.0 ** (power - 1) for v, power in zip(values, self.wanted.values(), strict=True)]

    def _value(self, number: int, known: dict[int, torch.Tensor], device: torch.device) -> torch.Tensor:
        if number in known:
            return known[number]
        if number in self.counted:
            count = self.counted[number]
            target = self._value(count.target, known, device)
            kept = target != count.ignored
            weights = kept.double()
            if count.weight is not None:
                given = self._value(count.weight, known, device)
                weights = given.double()[target.masked_fill(~kept, 0)] * weights
            made = weights.sum()
        elif number in self._outside:
            made = self._outside[number].to(device)
        else:
            call, position = self._made[number]
            outputs = call.run({slot: self._value(n, known, device) for slot, n in call.inputs.items()}, device)
            made = outputs[position]
        known[number] = made
        return made


class _Call:
    """One call of an op, made ready to be made again at every step."""

    def __init__(self, made: Made) -> None:
        self.function = made.function
        writes = {a.name for a in made.function._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        self._plain: dict[str, Any] = {}
        """Arguments without tensors and devices in them, by name."""
        self._single: list[tuple[str, int, bool]] = []
        """Arguments that are a tensor: the name, its slot, and whether the op writes into it."""
        self._other: list[tuple[str, Any, bool]] = []
        """Other arguments with tensors or devices in them."""
        self.inputs: dict[int, int] = {}
        """The values that the op reads, by slot."""
        for name, value in made.arguments.items():
            leaves = pytree.tree_leaves(value, is_leaf=_is_ref)
            self.inputs |= {leaf.slot: made.inputs[leaf.slot] for leaf in leaves if _is_ref(leaf)}
            if _is_ref(value):
                self._single.append((name, value.slot, name in writes))
            elif any(isinstance(leaf, Ref | torch.device) for leaf in leaves):
                self._other.append((name, value, name in writes))
            else:
                self._plain[name] = value

    def run(self, given: Mapping[int, torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """The tensors that the op gives for these inputs, which are left as they are."""

        def resolved(item: Any, is_written: bool) -> Any:
            if isinstance(item, torch.device):
                return device if item.type == "meta" else item
            if not isinstance(item, Ref):
                return item
            return given[item.slot].clone() if is_written else given[item.slot]

        arguments = dict(self._plain)
        for name, slot, is_written in self._single:
            arguments[name] = given[slot].clone() if is_written else given[slot]
        for name, value, is_written in self._other:
            arguments[name] = pytree.tree_map(partial(resolved, is_written=is_written), value, is_leaf=_is_ref)
        result = self.function(**arguments)
        if isinstance(result, torch.Tensor):
            return [result]
        return [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def _is_ref(item: Any) -> bool:
    return isinstance(item, Ref)
