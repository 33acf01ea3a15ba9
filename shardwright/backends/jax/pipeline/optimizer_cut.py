"""The optimizer, cut over stages: any optax transformation, traced over all parameters, gives what it gives unsplit."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.backends.jax.capture.tree import followed, path_names
from shardwright.backends.jax.loss.gradients import squared, updated
from shardwright.backends.jax.loss.scaling import Scaling
from shardwright.backends.jax.pipeline.compilation import Compiler
from shardwright.backends.jax.pipeline.multi_mesh import Place, PlacedProgram
from shardwright.backends.jax.pipeline.sentinels import Answer, Evidence, Updated, judged
from shardwright.backends.jax.program.equations import FlatProgram
from shardwright.backends.jax.program.flattening import flatten
from shardwright.backends.jax.program.unstack import unstack
from shardwright.backends.jax.state.ownership import Holding, Stack, StageMeshes
from shardwright.backends.jax.state.shardings import spread_over
from shardwright.backends.jax.state.trainable import Trained
from shardwright.core.errors import PlanError
from shardwright.core.model.loss.scaling import LossScale

Places = tuple[Place, ...]
"""The places of one leaf: one, or one for each piece of a stack."""


def is_stack(node: Any) -> bool:
    return isinstance(node, Stack)


def pieces(tree: Any) -> list[Any]:
    """The arrays of a tree, those of a stack one by one."""
    return jax.tree.leaves(tree)


def from_pieces(tree: Any, places: Sequence[Places], arrays: Sequence[Any]) -> Any:
    """A tree like ``tree`` (with whole leaves) of pieces; where a leaf has several places there is a `Stack`."""
    structure = jax.tree.structure(tree)
    leaves, position = [], 0
    for held in places:
        leaves.append(arrays[position] if held[0].rows is None else Stack(arrays[position : position + len(held)]))
        position += len(held)
    return jax.tree.unflatten(structure, leaves)


def cut_up(tree: Any, places: Sequence[Places]) -> list[Any]:
    """The pieces of a tree of whole leaves."""
    leaves = jax.tree.leaves(tree)
    return [
        leaf if place.rows is None else leaf[place.rows[0] : place.rows[1]]
        for leaf, held in zip(leaves, places, strict=True)
        for place in held
    ]


class OptimizerCut:
    """An optimizer over parameters that lie on several stages."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        params: Any,
        holdings: Sequence[Holding],
        shardings: Any,
        shard: int,
        is_kept_sharded: bool,
        meshes: StageMeshes,
        trained: Trained,
    ) -> None:
        """Place the parameters, gradients and states of an optimizer. params: shapes of the whole parameters;
        shardings: like them, on any stage's mesh; shard: the ZeRO stage; is_kept_sharded: whether parameters are
        sharded over replicas between steps; trained: the parameters that the optimizer changes."""
        self.optimizer, self.params, self.meshes, self.trained = optimizer, params, meshes, trained
        by_leaf: dict[int, list[Holding]] = {}
        for holding in holdings:
            by_leaf.setdefault(holding.leaf, []).append(holding)
        leaves, structure = jax.tree.flatten(params)
        least = jax.tree.unflatten(structure, [_least(leaf, by_leaf[n]) for n, leaf in enumerate(leaves)])
        spread = spread_over("dp", least, shardings) if shard else shardings
        self.layouts = jax.tree.leaves(shardings)
        self.parameters = self._places(by_leaf, spread if is_kept_sharded else shardings)
        self.weights = self._places(by_leaf, spread if shard == 3 else shardings)
        """The places of the parameters in a step."""
        self.gradients = self._places(by_leaf, spread if shard >= 2 else shardings)
        self.state = jax.eval_shape(optimizer.init, params)
        self.states = self._state_places(self._places(by_leaf, spread))

    def _places(self, by_leaf: dict[int, list[Holding]], shardings: Any) -> list[Places]:
        return [
            tuple(Place(h.stage, self.meshes.at(h.stage, sharding), h.rows) for h in by_leaf[leaf])
            for leaf, sharding in enumerate(jax.tree.leaves(shardings))
        ]

    def _state_places(self, of_parameters: Sequence[Places]) -> list[Places]:
        """The places of the state's leaves. A leaf whose path ends in a parameter's lies on the parameter's stage,
        split like it when it has its shape. Others (counters) lie on stage 0."""
        parameters = jax.tree.leaves(self.params)
        found: list[Places] = []
        for at, leaf in zip(followed(self.state, self.params), jax.tree.leaves(self.state), strict=True):
            if at is not None and leaf.shape and leaf.shape == parameters[at.number].shape:
                found.append(of_parameters[at.number])
            else:
                stage = 0 if at is None else of_parameters[at.number][0].stage
                found.append((Place(stage, self.meshes.whole[stage]),))
        return found

    # --- init

    def init(self, params: Any) -> Any:
        """The optimizer's state for parameters in place."""
        closed = jax.make_jaxpr(lambda p: jax.tree.leaves(self.optimizer.init(p)))(self.params)
        program = unstack(flatten(closed), [_rows(p) for p in self.parameters], [_rows(p) for p in self.states])
        none = [False] * len(self.parameters)
        with Compiler() as compiler:
            run = self._placed(program, self.parameters, none, self.states, none, {}, compiler)
        return from_pieces(self.state, self.states, run(pieces(params)))

    # --- update

    def compile_update(
        self,
        uses: Sequence[tuple[int, int]],
        weight_stage: int,
        total_stage: int,
        divisor: Callable[[jax.Array], jax.Array],
        nonfinite: Answer,
        rule: LossScale | None,
        compiler: Compiler,
    ) -> PlacedProgram:
        """The update: summed gradients, Σ weight, Σ weight · loss, the step, the factor of the loss, the optimizer's
        state and the parameters → the step, the factor, the state, the parameters, the loss, the gradients' norm and,
        with a factor, those of this step and the next. All but the two sums, the step and the factor are donated.

        nonfinite: unless "ignore", the last result is the number of the last stage whose gradients are not finite,
        plus 1, or 0; with "error" the state and the parameters stay as they were where the loss or a gradient is not
        finite. rule: that of the factor; None: there is none (`sentinels.judged`).

        uses: the (leaf, stage) pairs of the gradients, where a tied parameter has several; of a stack, its pieces.
        divisor: what sums are divided by, from Σ weight.

        Raises PlanError for an optimizer whose state changes its shapes or dtypes.
        """
        leaves = jax.tree.leaves(self.params)
        merged: list[tuple[int, Places]] = []
        for leaf, stage in uses:
            own = self.gradients[leaf]
            if own[0].rows is None:
                merged.append((leaf, (Place(stage, self.meshes.at(stage, own[0].sharding)),)))
            elif (leaf, own) not in merged:
                merged.append((leaf, own))

        def update(sums: Any, weight: Any, total: Any, step: Any, scaling: Any, state: Any, params: Any) -> Any:
            factor = 1.0 if rule is None else scaling.scale
            found = self._gradients([leaf for leaf, _ in merged], sums, divisor(weight) * factor, params)
            before = Updated(step, scaling, (state, params))
            return self._update(found, total / (divisor(weight) * factor), before, nonfinite, rule)

        number = jax.ShapeDtypeStruct((), jnp.float32)
        sums = [
            jax.ShapeDtypeStruct(leaves[leaf].shape, jnp.promote_types(leaves[leaf].dtype, jnp.float32))
            for leaf, _ in merged
        ]
        count = jax.ShapeDtypeStruct((), jnp.int32)
        scaling = None if rule is None else jax.eval_shape(lambda: Scaling.begin(rule))
        closed = jax.make_jaxpr(update)(sums, number, number, count, scaling, self.state, self.params)
        homes = (weight_stage, total_stage, *([0] * (1 + len(jax.tree.leaves(scaling)))))
        scalars = [(Place(stage, self.meshes.whole[stage]),) for stage in homes]
        arguments = [*(p for _, p in merged), *scalars, *self.states, *self.parameters]
        last = [scalars[1]] * (2 + (rule is not None) + (nonfinite != "ignore"))
        outputs = [*scalars[2:], *self.states, *self.parameters, *last]
        state_shapes = jax.tree.leaves(self.state)
        shared = (
            [False] * len(merged)
            + [True] * len(scalars)
            + [not leaf.shape or _is_random(leaf) for leaf in state_shapes]
        )
        shared += [False] * len(self.parameters)
        stacks = any(_rows(p) for p in self.parameters)  # a branch over whole stacks would gather them
        program = unstack(flatten(closed, select=stacks), [_rows(p) for p in arguments], [_rows(p) for p in outputs])
        donate = [True] * len(merged) + [False] * len(scalars) + [True] * (len(arguments) - len(merged) - len(scalars))
        before = sum(len(held) for _, held in merged) + len(scalars)
        followed = sum(len(held) for held in (*self.states, *self.parameters))
        numbers = len(scalars) - 2
        successors = {numbers + index: before + index for index in range(followed)}
        return self._placed(program, arguments, shared, outputs, donate, successors, compiler)

    def _gradients(
        self, summed: Sequence[int], sums: Sequence[jax.Array], below: jax.Array, params: Any
    ) -> list[jax.Array]:
        """The mean gradient of every trained parameter. summed: the number of the parameter of each of the sums."""
        gathered: dict[int, jax.Array] = {}
        for leaf, given in zip(summed, sums, strict=True):
            gathered[leaf] = gathered[leaf] + given if leaf in gathered else given
        return [
            (gathered[n] / below).astype(p.dtype) if n in gathered else jnp.zeros(p.shape, p.dtype)
            for n, (p, flag) in enumerate(zip(jax.tree.leaves(params), self.trained.mask(params), strict=True))
            if flag
        ]

    def _update(
        self, found: list[jax.Array], loss: jax.Array, before: Updated, nonfinite: Answer, rule: LossScale | None
    ) -> tuple[Any, ...]:
        """The results of the update of `compile_update`, from the mean gradients and the loss."""
        state, params = before.rest
        norm, bad_stage = self._norm(found, params)
        updates, state = updated(self.optimizer, self.trained.with_gradients(params, found), state, params, loss)
        require_same_state(self.state, state)
        changed = self.trained.apply(params, updates)
        leaves = jax.tree.leaves
        before = before._replace(rest=(leaves(before.rest[0]), leaves(params)))
        after = Updated(before.step + 1, before.scaling, (leaves(state), leaves(changed)))
        seen = Evidence(before.step, loss, norm, None)
        after, evidence = judged(nonfinite, rule, seen, after, before)
        scales = [] if evidence is None or evidence.scales is None else [evidence.scales]
        return *after, loss, norm, scales, *(() if nonfinite == "ignore" else (bad_stage,))

    def _norm(self, gradients: Sequence[Any], params: Any) -> tuple[jax.Array, jax.Array]:
        """The global norm of the gradients of what is trained, in fp32; and the number of the last stage where they are
        not finite, plus 1, or 0. Of stacks that stages share, none is known."""
        homes = [places[0].stage if places[0].rows is None else -1 for places in self.parameters]
        mask = self.trained.mask(params)
        sums: dict[int, Any] = {}
        for home, gradient in zip((h for h, flag in zip(homes, mask, strict=True) if flag), gradients, strict=True):
            own = squared(gradient)
            sums[home] = sums[home] + own if home in sums else own
        total = reduce(jnp.add, sums.values())
        bad = jnp.int32(0)
        for home, own in sums.items():
            # A number of one stage, read with the sum over all: made where the sum is, and apart from the updates.
            alone = jnp.where(jnp.isfinite(total), 0.0, own)
            bad = jnp.maximum(bad, jnp.where(jnp.isfinite(alone), 0, home + 1))
        return jnp.sqrt(total), bad

    def _placed(
        self,
        program: FlatProgram,
        arguments: Sequence[Places],
        shared: Sequence[bool],
        outputs: Sequence[Places],
        donate: Sequence[bool],
        successors: Mapping[int, int],
        compiler: Compiler,
    ) -> PlacedProgram:
        """The program over pieces. ``shared`` and ``donate`` are of whole arguments."""
        return PlacedProgram(
            program,
            [place for held in arguments for place in held],
            [common for common, held in zip(shared, arguments, strict=True) for _ in held],
            [place for held in outputs for place in held],
            self.meshes.whole,
            [given for given, held in zip(donate, arguments, strict=True) for _ in held],
            successors,
            compiler,
        )


def require_same_state(before: Any, after: Any) -> None:
    """Raise PlanError for an optimizer whose state changes its form. The update is compiled once, for the state that
    init makes."""
    forms = [
        {name: f"{jnp.shape(leaf)} {jnp.result_type(leaf)}" for name, leaf in path_names(tree)}
        for tree in (before, after)
    ]
    names = [name for name in {**forms[0], **forms[1]} if forms[0].get(name) != forms[1].get(name)]
    if names:
        one, other = (form.get(names[0], "absent") for form in forms)
        more = f", and {len(names) - 1} others change too" if len(names) > 1 else ""
        raise PlanError(
            f"the optimizer's state{names[0]} is {one} at first and {other} after an update{more}: pipeline stages "
            "compile the update once; give all parameters one dtype, or cast what the optimizer keeps to what it is at "
            "first"
        )


def _least(leaf: Any, holdings: Sequence[Holding]) -> jax.ShapeDtypeStruct:
    """The shape of a parameter. A stack has as many rows as divide those of all its pieces."""
    rows = [h.rows[1] - h.rows[0] for h in holdings if h.rows is not None]
    return jax.ShapeDtypeStruct((math.gcd(*rows), *leaf.shape[1:]) if rows else leaf.shape, leaf.dtype)


def _is_random(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _rows(places: Places) -> tuple[tuple[int, int], ...] | None:
    return tuple(p.rows for p in places if p.rows is not None) or None
