"""Tensor parallelism inside the runtime: a step's call of the model becomes its units on shards."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.capture.batch_dims import Growth, Sample
from shardwright.backends.torch.capture.model_call import arguments_of
from shardwright.backends.torch.program.program import Context, Leaf, Program
from shardwright.backends.torch.program.randomness import Streams
from shardwright.backends.torch.program.stage_map import policies_of
from shardwright.backends.torch.state.parameter_shards import Shards
from shardwright.backends.torch.tensor_parallel.by_module_calls import Lowerer, PartCall, autocast_of, placements
from shardwright.backends.torch.tensor_parallel.expanded_step import expand, find_call
from shardwright.backends.torch.tensor_parallel.hooks import refuse_hooks
from shardwright.backends.torch.tensor_parallel.lowered_model import Held, Replay, lower_all
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, trace
from shardwright.backends.torch.tensor_parallel.unit_layouts import UnitLayout, of_realised
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Placement
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.realised_layouts import digest, realise, require_own_version
from shardwright.core.values.recompute_modes import Mode

log = logging.getLogger("shardwright")


class UnitCall(nn.Module):
    """A lowered unit, called where a module of the model would be.

    ``holders`` are the modules whose buffers it uses: recompute finds the buffers in them that the first run writes to.
    ``parameters`` are the graph's tensors among ``held`` that are parameters.
    """

    def __init__(
        self, function: Callable[..., Any], held: tuple[int, ...], find: Held, holders: Iterable[nn.Module],
        parameters: tuple[int, ...],
    ) -> None:  # fmt: skip
        super().__init__()
        self.function, self.held, self.find, self._own = function, held, find, parameters
        self.holders = nn.ModuleList(holders)

    def forward(self, *entering: torch.Tensor) -> Any:
        return self.function(*entering, *[self.find(t) for t in self.held])

    def held_parameters(self) -> list[torch.Tensor]:
        """The parameters that the unit uses."""
        return [self.find(t) for t in self._own]


class Draws:
    """The seeding of the generators for units, by the streams of the step that runs now: several steps may run the
    same recorded units."""

    def __init__(self) -> None:
        self.streams = weakref.WeakSet[Streams]()

    def __call__(self, context: Context) -> None:
        for streams in self.streams:
            if streams.enabled:
                streams.start(context)


class TensorParallel:
    """The tensor axis of one rank's model.

    Attributes:
        by_calls_because: the reason why the model is run unit call by unit call (`by_calls`); empty where it was
            captured whole.
        whole_units: module path → the reason why a unit runs whole on every rank of the axis.
        stage_of_call: the stage of every unit, by (name, 0).
        policies: the units that do not keep what their backward reads, and what becomes of it.
        replays: the lowered models, one for each recorded step.
        layouts_digest: a hash of the layouts of every op in the last one, the same on all ranks.
    """

    def __init__(self, model: nn.Module, shards: Shards, plan: Plan) -> None:
        self.model, self.shards, self.plan = model, shards, plan
        self.by_calls_because = ""
        self.whole_units: dict[str, str] = {}
        self.stage_of_call: dict[tuple[str, int], int] = {}
        self.policies: dict[tuple[str, int], Mode] = {}
        self.replays: list[Replay] = []
        self.layouts_digest = ""
        self._calls: dict[str, nn.Module] = {}
        self._draws = Draws()
        self._recorded = 0
        self._wanted: Mapping[str, Placement] = {}

    def expand(
        self, program: Program, inputs: Sequence[torch.Tensor], device: torch.device, growth: Growth | None = None
    ) -> Program:
        """The recorded step with the model's units in place of its call; ``growth`` is that of the call's arguments,
        where it is known. Raises NotReplayableError where the model cannot run op by op, ShardwrightError where a hook
        would be lost."""
        refuse_hooks(self.model)
        call = find_call(program, inputs)
        sample = Sample(arguments_of(self.model, call.args, call.kwargs), growth=growth)
        with autocast_of(call.step):
            traced = trace(self.model, sample, asked=call.asked)
        leaves = [call.leaf_of(leaf.tensor) for leaf in sample.leaves]
        given: dict[int, Leaf] = dict(zip(traced.graph.inputs, leaves, strict=True))
        prefix = f"step {self._recorded} "
        layouts = self.lay_out(traced.graph)
        fp8 = self.plan.fp8_parameters("torch")
        replay = lower_all(traced, layouts, self.shards.axis, sample.batch, device, self._draws, prefix, fp8)
        expanded = expand(program, call, replay, given, self.shards.axis.size)
        find = replay.held(self.model)
        starts = self.plan.decision.stage_starts
        for i, unit in enumerate(replay.units):
            self.stage_of_call[unit.name, 0] = sum(start <= i for start in starts) - 1
            self._calls[unit.name] = UnitCall(
                unit.function, unit.held, find, replay.holders(self.model, unit), replay.parameters_of(unit)
            )  # fmt: skip
        modes = zip(replay.units, self.plan.unit_modes, strict=True)
        self.policies.update({(unit.name, 0): mode for unit, mode in modes if mode != "none"})
        self.replays.append(replay)
        self.want(replay.parameters)
        return replace(expanded, summed=replay.summed)

    def lay_out(self, graph: Graph) -> tuple[UnitLayout, ...]:
        """The plan's layouts of a model that runs op by op. Raises NotReplayableError where they are none for it."""
        try:
            realised = realise(graph, self.plan)
        except PlanError as error:
            if not self._recorded:
                raise
            raise NotReplayableError(f"another kind of step was planned for: {error}") from error
        layouts = of_realised(graph, realised)
        self._require_as_they_lie(graph, layouts)
        self.layouts_digest = digest(realised)
        return layouts

    def want(self, places: Mapping[str, Placement]) -> None:
        """Note how the last recorded step wants its parameters placed, by first name."""
        self._wanted = places
        self._recorded += 1

    def _require_as_they_lie(self, graph: Graph, layouts: Sequence[UnitLayout]) -> None:
        """Raise NotReplayableError for layouts of parameters other than those in which another step has cut them."""
        if not self.shards.is_cut:
            return
        name_of = {p.tensor: p.name for p in graph.parameters}
        for tensor, place in ((t, p) for layout in layouts for t, p in layout.parameters.items()):
            lies = self.shards.place(name_of[tensor])
            if place != lies:
                raise NotReplayableError(f"{name_of[tensor]} lies {lies} since another step, which called it otherwise")

    def how(self, by_calls: bool) -> str:
        """The way in which the last recorded step runs here, in words: the same on all ranks of the axis. ``by_calls``:
        not op by op."""
        if not by_calls:
            return f"op by op, with {len(self._wanted)} tensors placed (layouts {self.layouts_digest})"
        return f"module call by module call (whole: {', '.join(sorted(self.whole_units)) or 'none'})"

    def cut(self) -> None:
        """Cut the parameters as the last recorded step wants them. Every rank of the axis calls this."""
        self.shards.cut(self._wanted)

    def take(self, streams: Streams) -> dict[str, nn.Module]:
        """The modules that run at the paths of units, which draw their random numbers from ``streams`` while these are
        enabled."""
        self._draws.streams.add(streams)
        return dict(self._calls)

    def by_calls(self, program: Program, stages: Mapping[tuple[str, int], int], device: torch.device) -> Program:
        """The recorded step, whose calls of the model's units are known, with those calls on shards that can be.

        Args:
            stages: the stage of every unit call.
        """
        what = f"{type(self.model).__name__} runs module call by module call ({self.by_calls_because}), which"
        require_own_version(self.plan, what, "plan anew")
        prefix = f"step {self._recorded} "
        first_name = self.shards.ownership.first_name
        planned = placements(self.plan, first_name)
        if self.shards.is_cut:
            planned = {name: self.shards.place(name) for name in planned}
        lowerer = Lowerer(self.model, self.plan, self.shards.axis, device, first_name, self._draws, prefix)
        found = lowerer.lower(program, planned)
        self._recorded += 1
        self.whole_units.update(found.whole)
        policies = policies_of(self.plan)
        self.stage_of_call.update(stages)
        for before, step in zip(program.steps, found.program.steps, strict=True):
            if step.path is None or step.path not in found.calls or before.path is None:
                continue
            call = before.path, before.occurrence
            self.stage_of_call[step.path, 0] = stages[call]
            if call in policies:
                self.policies[step.path, 0] = policies[call]
            self._calls[step.path] = PartCall(found.calls[step.path])
        self._wanted = found.parameters
        self._say_whole()
        return replace(found.program, summed=found.summed)

    def _say_whole(self) -> None:
        if self.shards.axis.coordinate or not self.whole_units:
            return
        shown = "; ".join(f"{path or 'the model'}: {why}" for path, why in list(self.whole_units.items())[:3])
        more = len(self.whole_units) - 3
        log.warning(
            "%d units run whole on every rank of the tensor axis, which saves nothing there: %s%s",
            len(self.whole_units), shown, f"; and {more} more (model.runtime.tensor.whole_units)" if more > 0 else "",
        )  # fmt: skip
