"""Tensor parallelism inside the runtime: a step's call of the model becomes its units on pieces."""

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.program import Context, Leaf, Program
from shardwright.backends.torch.randomness import Streams
from shardwright.backends.torch.sample import Sample
from shardwright.backends.torch.tensor_parallel.layouts import planned
from shardwright.backends.torch.tensor_parallel.program import ModelCall, expand, find_call
from shardwright.backends.torch.tensor_parallel.replay import Held, Replay, lower_all
from shardwright.backends.torch.tensor_parallel.shards import Shards
from shardwright.backends.torch.tensor_parallel.trace import NotReplayableError, trace
from shardwright.core.errors import ShardwrightError
from shardwright.core.plan import Plan

log = logging.getLogger("shardwright")


class UnitCall(nn.Module):
    """A lowered unit, called where a module of the model would be."""

    def __init__(self, function: Callable[..., Any], held: tuple[int, ...], find: Held) -> None:
        super().__init__()
        self.function, self.held, self.find = function, held, find

    def forward(self, *entering: torch.Tensor) -> Any:
        return self.function(*entering, *[self.find(t) for t in self.held])


class _Draws:
    """Seeds the generators for the units of one recorded step, as the streams of that step are."""

    def __init__(self) -> None:
        self.streams: Streams | None = None

    def __call__(self, context: Context) -> None:
        if self.streams is not None and self.streams.enabled:
            self.streams.start(context)


class TensorParallel:
    """The tensor axis of one rank's model.

    Attributes:
        whole_because: why the model runs whole on every rank of the axis; empty where it does not.
        stage_of_call: the stage of every unit, by (name, 0).
        recompute: the units whose forward runs again in the backward pass.
        replays: what was lowered, one for each recorded step.
    """

    def __init__(self, model: nn.Module, shards: Shards, plan: Plan) -> None:
        self.model, self.shards, self.plan = model, shards, plan
        self.whole_because = ""
        self.stage_of_call: dict[tuple[str, int], int] = {}
        self.recompute: frozenset[tuple[str, int]] = frozenset()
        self.replays: list[Replay] = []
        self._calls: dict[str, nn.Module] = {}
        self._draws: list[_Draws] = []

    def expand(self, program: Program, inputs: Sequence[torch.Tensor], device: torch.device) -> Program:
        """The recorded step with the model's units in place of its call. Raises NotReplayableError where the model
        cannot run op by op, ShardwrightError where a hook would be lost."""
        _require_no_hooks(self.model)
        call = find_call(program, inputs)
        arguments = _arguments(self.model, call)
        sample = Sample(arguments)
        with _autocast(call):
            traced = trace(self.model, arguments, asked=call.asked)
        leaves = [call.leaf_of(leaf.tensor) for leaf in sample.leaves]
        given: dict[int, Leaf] = dict(zip(traced.graph.inputs, leaves, strict=True))
        draws = _Draws()
        prefix = f"step {len(self.replays)} "
        layouts = planned(traced.graph, self.plan)
        replay = lower_all(traced, layouts, self.shards.axis, sample.batch, device, draws, prefix)
        expanded = expand(program, call, replay, given, self.shards.axis.size)
        find = replay.held(self.model)
        starts = self.plan.decision.stage_starts
        for i, unit in enumerate(replay.units):
            self.stage_of_call[unit.name, 0] = sum(start <= i for start in starts) - 1
            self._calls[unit.name] = UnitCall(unit.function, unit.held, find)
        self.recompute |= {(replay.units[i].name, 0) for i in self.plan.recomputed_units}
        self.replays.append(replay)
        self._draws.append(draws)
        return expanded

    def cut(self) -> None:
        """Cut the parameters as the last recorded step wants them. Every rank of the axis calls this."""
        replay = self.replays[-1]
        self.shards.cut(replay.parameters)
        self.shards.summed |= replay.summed

    def take(self, streams: Streams) -> dict[str, nn.Module]:
        """What runs at the paths of units; those recorded since the last call draw their random numbers from
        ``streams``."""
        for draws in self._draws:
            draws.streams = streams
        self._draws.clear()
        return dict(self._calls)

    def run_whole(self, reason: NotReplayableError) -> None:
        """Note that the model runs whole on every rank. Raises ShardwrightError where its parameters are in pieces."""
        if self.replays:
            raise ShardwrightError(
                f"this step cannot run on pieces ({reason}), and the parameters are in pieces since an earlier one: "
                f"run it without a tensor axis"
            ) from reason
        self.whole_because = str(reason)
        if self.shards.axis.coordinate == 0:
            log.warning("the model runs whole on every rank of the tensor axis, which saves nothing: %s", reason)


def _arguments(model: nn.Module, call: ModelCall) -> Any:
    """The arguments as capture takes them."""
    if not call.args:
        return call.kwargs
    if not call.kwargs:
        return call.args
    return dict(inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments)


def _autocast(call: ModelCall) -> Any:
    dtype = call.step.autocast
    return torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def _require_no_hooks(model: nn.Module) -> None:
    """Raise ShardwrightError for hooks on modules: units run op by op, and no module is called."""
    for path, module in model.named_modules():
        kinds = (
            module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks,
        )  # fmt: skip
        hooks = [hook for held in kinds for hook in held.values()]
        own = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith("shardwright.")]
        if own:
            name = getattr(own[0], "__qualname__", type(own[0]).__name__)
            raise ShardwrightError(
                f"{path or 'the model'} has a hook ({name}) that would never be called: on the tensor axis a model's "
                f"ops run on pieces, without its modules. Take it off (handle.remove()), or use a tensor-parallel "
                f"degree of 1"
            )
