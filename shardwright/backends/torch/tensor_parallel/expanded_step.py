"""A recorded step whose one call of the model becomes calls of its lowered units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.machine.tensor_shards import local_shape
from shardwright.backends.torch.program.program import (
    ConstantRef,
    Leaf,
    ParameterRef,
    Program,
    Step,
    Tree,
    Value,
    ValueRef,
)
from shardwright.backends.torch.tensor_parallel.lowered_model import Replay
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError
from shardwright.backends.torch.tensor_parallel.unit_lowering import Lowered
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.layout.placements import Placement

MODEL_CALL = ("", 0)


@dataclass(frozen=True, slots=True)
class ModelCall:
    """The call of the model in a recorded step, and its arguments for capture."""

    step: Step
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: tuple[tuple[torch.Tensor, Leaf], ...]
    """The tensors among the arguments, and their leaves in the program."""
    asked: tuple[int, ...]
    """The positions of the tensors that the model returns and that are used."""

    def leaf_of(self, tensor: torch.Tensor) -> Leaf:
        return next(leaf for given, leaf in self.leaves if given is tensor)


def find_call(program: Program, inputs: Sequence[torch.Tensor]) -> ModelCall:
    """The one call of the model. Raises NotReplayableError where the step does anything else with it."""
    calls = [step for step in program.steps if step.path is not None]
    if len(calls) != 1:
        raise NotReplayableError(f"the step calls the model {len(calls)} times, or parts of it by themselves")
    (step,) = calls
    outside = sorted(name for other in program.steps if other is not step for name in other.parameters)
    outside += [leaf.name for leaf in program.result.leaves if isinstance(leaf, ParameterRef)]
    if outside:
        raise NotReplayableError(f"the step calls the model several times, or uses {outside[0]} outside of its call")
    if program.guards:
        raise NotReplayableError("what the model does depends on the values of the batch")
    if program.draws_on_host or program.unsteady:
        raise NotReplayableError("the model draws random numbers by Python or NumPy, or where its values say")
    if any(v is not None for _, outputs in step.object_outputs for v in outputs) or step.renewals:
        raise NotReplayableError("the model writes to objects or tensors that it is given")
    found: list[tuple[torch.Tensor, Leaf]] = []

    def resolve(leaf: Leaf) -> Any:
        if isinstance(leaf, ValueRef):
            value = program.values[leaf.value]
            if value.carries_gradient:
                raise NotReplayableError("the step wants the gradient of what it gives to the model")
            tensor = torch.zeros(value.shape, dtype=value.dtype) if value.input is None else inputs[value.input].clone()
            found.append((tensor, leaf))
            return tensor
        if isinstance(leaf, ConstantRef):
            found.append((leaf.tensor, leaf))
            return leaf.tensor
        if hasattr(leaf, "value"):
            return leaf.value
        raise NotReplayableError("the model is given a parameter, or an object that it may write to")

    args, kwargs = step.arguments.build(resolve)
    read = program.given_away().union(*(other.reads for other in program.steps if other is not step))
    asked = tuple(i for i, v in enumerate(step.outputs) if v is not None and v in read)
    if not asked:
        raise NotReplayableError("the step uses nothing that the model returns")
    return ModelCall(step, tuple(args), dict(kwargs), tuple(found), asked)


def expand(program: Program, call: ModelCall, replay: Replay, inputs: Mapping[int, Leaf], ranks: int) -> Program:
    """The program with units in place of the call. ``inputs`` gives the leaves of the graph's inputs in the program.

    A unit's step has the unit's name as its path. Values that flow between units have the shapes that a rank holds.
    """
    graph = replay.traced.graph
    values = list(program.values)
    leaf_of: dict[int, Leaf] = dict(inputs)
    returned: dict[int, list[int]] = {}
    for tensor, value in zip(replay.traced.outputs, call.step.outputs, strict=True):
        if tensor is not None and value is not None:
            returned.setdefault(tensor, []).append(value)
    counter = WorkCounter(graph)
    first = call.step.index
    memory = 1 + max((v.memory for v in values), default=0)
    steps: list[Step] = []
    for i, unit in enumerate(replay.units):
        index = first + i
        outputs = []
        for tensor in unit.leaves:
            place = replay.leaving[tensor]
            known = returned.get(tensor, [])
            if len(known) > 1:
                raise NotReplayableError("the model returns one tensor twice")
            if known:
                number = known[0]
                values[number] = replace(values[number], step=index)
            else:
                number = len(values)
                values.append(_value(replay, counter, tensor, place, index, memory + number, ranks))
            leaf_of[tensor] = ValueRef(number)
            outputs.append(number)
        given = tuple(leaf_of[t] for t in unit.entering)
        steps.append(_step(call.step, unit, index, given, outputs, replay))
    missing = set(returned) - {t for unit in replay.units for t in unit.leaves}
    if missing:
        raise NotReplayableError("the model returns what it was given")
    shift = len(replay.units) - 1
    made = {v for step in steps for v in step.outputs}
    moved = [v if i in made else _shifted(v, first, shift) for i, v in enumerate(values)]
    after = [replace(step, index=step.index + shift) for step in program.steps[first + 1 :]]
    return replace(program, values=tuple(moved), steps=(*program.steps[:first], *steps, *after))


def _shifted(value: Value, first: int, shift: int) -> Value:
    """A value, with the number of its step moved on where a step after the call makes it."""
    return value if value.step is None or value.step < first else replace(value, step=value.step + shift)


def _value(
    replay: Replay, counter: WorkCounter, tensor: int, place: Placement, step: int, memory: int, ranks: int
) -> Value:
    described = replay.traced.graph.tensors[tensor]
    dtype: torch.dtype = getattr(torch, described.dtype)
    flows = described.carries_gradients and counter.needs_gradient(tensor)
    return Value(local_shape(described.shape(replay.batch), place, ranks), dtype, flows, step, None, memory)


def _step(
    model: Step, unit: Lowered, index: int, given: Sequence[Leaf], outputs: Sequence[int], replay: Replay
) -> Step:
    graph = replay.traced.graph
    spec = pytree.tree_structure((tuple(0 for _ in given), {}))
    names = {role: frozenset(graph.tensors[t].name for t in unit.held if graph.tensors[t].role == role) for role in
             ("parameter", "buffer")}  # fmt: skip
    return replace(
        model,
        index=index,
        path=unit.name,
        occurrence=0,
        arguments=Tree(tuple(given), spec),
        reads=frozenset(leaf.value for leaf in given if isinstance(leaf, ValueRef)),
        outputs=tuple(outputs),
        object_outputs=(),
        written=frozenset(),
        memories=frozenset(),
        parameters=names["parameter"],
        buffers=names["buffer"],
        autocast=None,
        random=unit.draws,
        counts=(),
    )
