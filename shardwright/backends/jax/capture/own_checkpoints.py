"""Activation checkpointing of a model's own: calls of `jax.checkpoint`, by whatever name.

Capture notes which ops lie in them, and which of these run again. What a plan recomputes is run again once: inside and
around that, the model's own checkpoints are plain calls. Elsewhere they run as they are. Of nested ones, the outermost
counts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.ad_checkpoint import Recompute
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core.primitives import closed_call_p

from shardwright.backends.jax.capture.inner_programs import CHECKPOINTS, INLINED, inner_program
from shardwright.core.cost.run_again import run_again_by_the_model
from shardwright.core.cost.value_flow import ValueFlow
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph
from shardwright.core.model.own_checkpoints import is_checkpointed
from shardwright.core.tables.memory import recomputable_units

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OwnCheckpoint:
    """One run of a checkpoint of the model's own. Iterations of a loop have their own, with the same path."""

    path: Path
    """The path of its equation, as in `capture.steps`."""
    policy: Any

    def saves(self, equation: JaxprEqn) -> bool:
        """Whether the policy keeps what an equation inside makes, or something of which that is made in it."""
        inner = inner_program(equation.params) if equation.primitive.name in INLINED else None
        if inner is not None:
            return any(self.saves(each) for each in inner.jaxpr.eqns)
        if self.policy is None:
            return False
        found = self.policy(equation.primitive, *(atom.aval for atom in equation.invars), **equation.params)
        return bool(found) and found is not Recompute


def noted(graph: Graph, checkpoints: Sequence[OwnCheckpoint | None], saved: Sequence[bool]) -> Graph:
    """The graph, whose ops know the checkpoints that they lie in. ``checkpoints`` and ``saved``: of every op, the one
    around it, and whether that keeps its result."""
    inside: dict[OwnCheckpoint, list[int]] = {}
    for number, checkpoint in enumerate(checkpoints):
        if checkpoint is not None:
            inside.setdefault(checkpoint, []).append(number)
    if not inside:
        return graph
    kept, ops = ValueFlow(graph).kept, list(graph.ops)
    for numbers in inside.values():
        there = {number for number in numbers if saved[number]}
        named = (graph.producer.get(graph.ops[number].inputs[0]) for number in there if ops[number].name == "name")
        again = run_again_by_the_model(graph, kept, numbers, there | {made for made in named if made is not None})
        for number in numbers:
            ops[number] = replace(ops[number], in_checkpoint=not there, is_run_again=number in again)
    return replace(graph, ops=tuple(ops))


def of_whole_units(graph: Graph, checkpoints: Sequence[OwnCheckpoint | None]) -> frozenset[Path]:
    """The paths of the checkpoints around units that a plan recomputes as the model asks."""
    if not any(op.in_checkpoint for op in graph.ops):
        return frozenset()
    units = fold(graph).units
    may = recomputable_units([unit.fold_class for unit in units])
    found, others = set[Path](), set[Path]()
    for unit in units:
        paths = {c.path for c in checkpoints[unit.first_op : unit.end_op] if c is not None}
        (found if may[unit.index] and is_checkpointed(graph, unit) else others).update(paths)
    return frozenset(found - others)


def with_plain(closed: ClosedJaxpr, paths: Collection[Path] | None = None) -> ClosedJaxpr:
    """A program in which the checkpoints at ``paths`` are plain calls; None: all."""
    return ClosedJaxpr(_with_plain(closed.jaxpr, paths, ()), closed.consts)


def _with_plain(jaxpr: Jaxpr, paths: Collection[Path] | None, path: Path) -> Jaxpr:
    equations = list(jaxpr.eqns)
    for index, equation in enumerate(equations):
        here = (*path, index)
        if paths is not None and not any(each[: len(here)] == here for each in paths):
            continue
        if equation.primitive.name in CHECKPOINTS and (paths is None or here in paths):
            called = ClosedJaxpr(equation.params["jaxpr"], ())
            equations[index] = equation.replace(primitive=closed_call_p, params={"call_jaxpr": called})
            continue
        for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
            inner = equation.params.get(key)
            if inner is not None:
                is_closed = isinstance(inner, ClosedJaxpr)
                inside = _with_plain(inner.jaxpr if is_closed else inner, paths, here)
                params = {**equation.params, key: ClosedJaxpr(inside, inner.consts) if is_closed else inside}
                equations[index] = equation.replace(params=params)
                break
    plain: Jaxpr = jaxpr.replace(eqns=equations)
    return plain


def plain_call(params: Mapping[str, Any]) -> Callable[..., list[Any]]:
    """The function that a checkpoint with these parameters runs."""
    found = inner_program(params)
    assert found is not None
    run: Callable[..., list[Any]] = jaxpr_as_fun(found)
    return run
