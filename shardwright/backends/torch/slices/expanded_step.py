"""A recorded step whose one call of the model becomes calls of its units slice by slice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardwright.backends.torch.compat import pytree
from shardwright.backends.torch.machine.tensor_shards import local_shape
from shardwright.backends.torch.program.program import Leaf, Program, Step, Tree, Value, ValueRef
from shardwright.backends.torch.slices import slice_ops
from shardwright.backends.torch.slices.traces import Part, Piece, Traces
from shardwright.backends.torch.tensor_parallel.expanded_step import ModelCall
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.layout.placements import Placement, Replicate


@dataclass(frozen=True, slots=True)
class SlicedCall:
    """What a model's call becomes.

    Attributes:
        parts: of all units, in the order in which they run.
        ranks: of the tensor axis.
        last_stage: the stage that has the last slice of the last unit.
    """

    traces: Traces
    parts: Sequence[Part]
    ranks: int
    last_stage: int


def expand(program: Program, call: ModelCall, sliced: SlicedCall, inputs: Mapping[int, Leaf]) -> Program:
    """The program with the parts in place of the call. ``inputs`` gives the leaves of the graph's inputs in the
    program. Raises NotReplayableError where the model returns what it was given, or one tensor twice."""
    return _Expansion(program, call, sliced, inputs).expanded()


class _Expansion:
    """The new program under construction."""

    def __init__(self, program: Program, call: ModelCall, sliced: SlicedCall, inputs: Mapping[int, Leaf]) -> None:
        self.program, self.call, self.sliced = program, call, sliced
        self.values = list(program.values)
        self.leaf_of: dict[Piece, Leaf] = {Piece(tensor): leaf for tensor, leaf in inputs.items()}
        self.places: dict[Piece, Placement] = {}
        self.steps: list[Step] = []
        self.first = call.step.index
        self.counter = WorkCounter(sliced.traces.whole.graph)
        self._memory = 1 + max((v.memory for v in self.values), default=0)
        self.returned: dict[int, int] = {}
        for tensor, value in zip(sliced.traces.whole.outputs, call.step.outputs, strict=True):
            if tensor is not None and value is not None and self.returned.setdefault(tensor, value) != value:
                raise NotReplayableError("the model returns one tensor twice")

    def expanded(self) -> Program:
        for part in self.sliced.parts:
            for piece in part.entering:
                self._require(piece)
            index = self.first + len(self.steps)
            given = tuple(self.leaf_of[piece] for piece in part.entering)
            outputs = [self._output(piece, place, part, index) for piece, place in part.leaves]
            self.steps.append(self._call(part, index, given, outputs))
        for tensor in self.returned:
            self._require(Piece(tensor))
        missing = [t for t, value in self.returned.items() if self.leaf_of[Piece(t)] != ValueRef(value)]
        if missing:
            raise NotReplayableError("the model returns what it was given")
        program, first, shift = self.program, self.first, len(self.steps) - 1
        made = {v for step in self.steps for v in step.outputs}
        moved = [
            v if i in made or v.step is None or v.step < first else replace(v, step=v.step + shift)
            for i, v in enumerate(self.values)
        ]
        after = [replace(step, index=step.index + shift) for step in program.steps[first + 1 :]]
        return replace(program, values=tuple(moved), steps=(*program.steps[:first], *self.steps, *after))

    def _require(self, piece: Piece) -> None:
        """Put a tensor together that is there in slices and wanted whole."""
        if piece in self.leaf_of:
            return
        traces = self.sliced.traces
        slices = [replace(piece, slice=s) for s in range(len(traces.lengths))]
        parts = [self.leaf_of.get(one) for one in slices]
        if piece.slice is not None or piece.carried is not None or None in parts:
            raise NotReplayableError("a slice reads what no part of the model makes")
        if piece.tensor in traces.ops.apart:
            raise NotReplayableError("an op needs what means something in one slice alone, such as an order of tokens")
        if piece.tensor in traces.ops.keys:
            raise NotReplayableError("an op needs the scores of an attention of all tokens")
        index = self.first + len(self.steps)
        rows = traces.ops.flat.get(piece.tensor, 0)
        function = partial(slice_ops.joined, traces.ops.dims[piece.tensor], traces.lengths, rows)
        shape = traces.whole.graph.tensors[piece.tensor].shape(traces.batch)
        output = self._new(piece, self.places[slices[0]], shape, index)
        given = tuple(leaf for leaf in parts if leaf is not None)
        self.steps.append(
            self._step(index, given, [output], path=None, function=function, stage=self.sliced.last_stage)
        )

    def _output(self, piece: Piece, place: Placement, part: Part, index: int) -> int:
        traces = self.sliced.traces
        graph = traces.whole.graph
        if part.kind == "slice":
            graph = traces.of_slice(part.slice).graph
        shape = list(graph.tensors[piece.tensor].shape(traces.batch))
        if piece.carried is not None:
            _, entries = traces.ops.tails.get(piece.carried, (piece.tensor, traces.start(part.slice + 1)))
            shape[traces.ops.dims[piece.tensor]] = entries
        return self._new(piece, place, tuple(shape), index)

    def _new(self, piece: Piece, place: Placement, shape: tuple[int, ...], index: int) -> int:
        """A value for a piece; for what the step has of the model, the value that it has already."""
        self.places[piece] = place
        number = self.returned.get(piece.tensor) if piece == Piece(piece.tensor) else None
        if number is not None:
            if place != Replicate():
                raise NotReplayableError("the model returns a tensor that the tensor axis divides")
            self.values[number] = replace(self.values[number], step=index)
        else:
            described = self.sliced.traces.whole.graph.tensors[piece.tensor]
            dtype: torch.dtype = getattr(torch, described.dtype)
            flows = described.carries_gradients and self.counter.needs_gradient(piece.tensor)
            number = len(self.values)
            local = local_shape(shape, place, self.sliced.ranks)
            self.values.append(Value(local, dtype, flows, index, None, self._memory + number))
        self.leaf_of[piece] = ValueRef(number)
        return number

    def _call(self, part: Part, index: int, given: tuple[Leaf, ...], outputs: Sequence[int]) -> Step:
        tensors = self.sliced.traces.whole.graph.tensors
        names = {
            role: frozenset(tensors[t].name for t in part.held if tensors[t].role == role)
            for role in ("parameter", "buffer")
        }
        step = self._step(index, given, outputs, path=part.name, function=None, stage=None)
        return replace(step, parameters=names["parameter"], buffers=names["buffer"], random=part.draws)

    def _step(
        self, index: int, given: tuple[Leaf, ...], outputs: Sequence[int], *, path: str | None,
        function: "partial[torch.Tensor] | None", stage: int | None,
    ) -> Step:  # fmt: skip
        spec = pytree.tree_structure((tuple(0 for _ in given), {}))
        return replace(
            self.call.step,
            index=index,
            path=path,
            occurrence=0,
            function=function,
            arguments=Tree(given, spec),
            reads=frozenset(leaf.value for leaf in given if isinstance(leaf, ValueRef)),
            outputs=tuple(outputs),
            object_outputs=(),
            written=frozenset(),
            memories=frozenset(),
            parameters=frozenset(),
            buffers=frozenset(),
            autocast=None,
            random=(),
            counts=(),
            stage=stage,
        )
