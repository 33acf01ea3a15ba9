"""An optimizer's update over all parameters, divided by the shards that hold them.

The update is traced whole, so that it is any optax transformation's. Nearly every equation of it concerns one parameter
and runs where that is. What is left are scalars of all shards together, as a norm of all gradients is: each shard gives
its part of them (`partials`) when its gradients are there, one program makes the whole of the parts (`joined`), and all
updates wait for that. Anything else that reads several shards is refused.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shardwright.backends.jax.capture.tree import followed
from shardwright.backends.jax.loss.gradients import updated
from shardwright.backends.jax.pipeline.multi_mesh import SCALAR_BYTES
from shardwright.backends.jax.pipeline.optimizer_cut import require_same_state
from shardwright.backends.jax.pipeline.stage_functions import TOTAL, WEIGHT, Key, StageFunction
from shardwright.backends.jax.program.equations import Equation, FlatProgram, aval_of, evaluate, needed, value_of
from shardwright.backends.jax.program.flattening import flatten
from shardwright.core.errors import MissingCapabilityError, PlanError

EVERYWHERE, JOINED = -1, -2
"""The home of values that every shard has or makes for itself, and of scalars of several shards."""


@dataclass(frozen=True, slots=True)
class UpdateFunctions:
    """The functions of an update. Their keys are ("gradient", leaf), ("weight", leaf), ("state", leaf of the
    optimizer's state), ("sum", `TOTAL` or `WEIGHT`), and ("between", number) for scalars of several shards and parts of
    them."""

    shards: Mapping[int, StageFunction]
    """The update of every shard that holds parameters."""
    partials: Mapping[int, StageFunction]
    """What makes a shard's part of scalars of all, of its gradients and parameters."""
    joined: StageFunction | None
    """What makes these scalars of their parts."""
    common: StageFunction | None
    """What makes the states that are no parameter's, such as counts, once all shards are updated."""


def clipped(optimizer: optax.GradientTransformation, norm: float) -> optax.GradientTransformationExtraArgs:
    """An optimizer that is given gradients clipped by their norm over all, with a state like its own."""
    inner, clip = optax.with_extra_args_support(optimizer), optax.clip_by_global_norm(norm)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        given, _ = clip.update(gradients, clip.init(params), params)
        return inner.update(given, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


@dataclass(eq=False)
class OptimizerParts:
    """An optimizer in parts.

    Args:
        name: the job's name, for errors.
        params: the shapes of the parameters.
        homes: the shard that updates each of their leaves.
        with_gradients: the leaves that have gradients.
        divisor: what sums over microbatches are divided by, from the sum of their weights.
        clip_norm: the norm over all gradients to which the plan clips them.
        waits: whether updates wait for the gradients of all shards.

    Raises MissingCapabilityError for an optimizer that looks at several shards otherwise than by scalars of their
    gradients, or at all where updates do not wait.
    """

    name: str
    optimizer: optax.GradientTransformation
    params: Any
    homes: Sequence[int]
    with_gradients: Sequence[int]
    divisor: Callable[[jax.Array], jax.Array]
    clip_norm: float | None
    waits: bool
    joins: list[Equation] = field(default_factory=list)
    """The equations that make scalars of several shards."""

    def functions(self) -> UpdateFunctions:
        """The functions of the update."""
        flat = self._traced(self.optimizer)
        self._place(flat)
        if self.joins and not self.waits:
            raise self._refused(flat, self.joins[0])
        if not self.joins and self.clip_norm is not None:
            flat = self._traced(clipped(self.optimizer, self.clip_norm))
            self._place(flat)
        elif self.joins and self.clip_norm is not None:
            self._require_clipping()
        return self._functions(flat)

    # The whole update ------------------------------------------------------------------------------------------------

    def _traced(self, optimizer: optax.GradientTransformation) -> FlatProgram:
        leaves, structure = jax.tree.flatten(self.params)
        state = jax.eval_shape(optimizer.init, self.params)

        def update(sums: Any, weight: Any, total: Any, state: Any, params: Any) -> Any:
            below = self.divisor(weight)
            given = dict(zip(self.with_gradients, sums, strict=True))
            found = [
                (given[n] / below).astype(p.dtype) if n in given else jnp.zeros(p.shape, p.dtype)
                for n, p in enumerate(jax.tree.leaves(params))
            ]
            gradients = jax.tree.unflatten(structure, found)
            updates, after = updated(optimizer, gradients, state, params, total / below)
            require_same_state(state, after)
            return jax.tree.leaves(after), jax.tree.leaves(optax.apply_updates(params, updates))

        number = jax.ShapeDtypeStruct((), jnp.float32)
        sums = [jax.ShapeDtypeStruct(leaves[n].shape, jnp.promote_types(leaves[n].dtype, jnp.float32))
                for n in self.with_gradients]  # fmt: skip
        flat = flatten(jax.make_jaxpr(update)(sums, number, number, state, self.params), select=True)
        states = [None if at is None else at.number for at in followed(state, self.params)]
        self.state_homes = [EVERYWHERE if at is None else self.homes[at] for at in states]
        keys: list[Key] = [("gradient", n, 0) for n in self.with_gradients]
        keys += [("sum", WEIGHT, 0), ("sum", TOTAL, 0)]
        keys += [("state", n, 0) for n in range(len(states))] + [("weight", n, 0) for n in range(len(leaves))]
        self.keys = dict(zip(flat.arguments, keys, strict=True))
        self.results = keys[len(self.with_gradients) + 2 :]
        return flat

    def _home_of(self, key: Key) -> int:
        kind, number, _ = key
        if kind == "sum":
            return EVERYWHERE
        return self.state_homes[number] if kind == "state" else self.homes[number]

    def _place(self, flat: FlatProgram) -> None:
        """Find the home of every value, the scalars that are made of several shards, and their parts."""
        self.home = {value: self._home_of(key) for value, key in self.keys.items()}
        self.home |= dict.fromkeys(flat.constants, EVERYWHERE)
        needing = self._needing(flat)
        late: set[int] = set()  # what follows from scalars of several shards
        self.joins, parts = [], dict[int, None]()
        for equation in flat.equations:
            if equation.effects:
                raise self._refused(flat, equation)
            values = list(equation.values)
            homed = [v for v in values if self.home[v] >= 0]
            own = {self.home[v] for v in homed}
            follows = any(self.home[v] == JOINED for v in values)
            is_small = all(flat.is_small(v, SCALAR_BYTES) for v in (*values, *equation.outputs))
            at = next(iter(own), JOINED if follows else EVERYWHERE)
            goes_on = follows and is_small and any(needing[v] - own for v in equation.outputs)
            if len(own) > 1 or (own and goes_on):
                if not is_small or not late.isdisjoint(homed):
                    raise self._refused(flat, equation)
                parts.update(dict.fromkeys(homed))
                at = JOINED
            if at == JOINED:
                self.joins.append(equation)
            self.home.update(dict.fromkeys(equation.outputs, at))
            if at == JOINED or follows or not late.isdisjoint(values):
                late.update(equation.outputs)
        self.parts = list(parts)

    def _needing(self, flat: FlatProgram) -> dict[int, set[int]]:
        """The homes of the results that each value is needed for."""
        found: dict[int, set[int]] = {value: set() for value in range(len(flat.avals))}
        for key, atom in zip(self.results, flat.outputs, strict=True):
            if isinstance(atom, int):
                found[atom].add(self._home_of(key))
        for equation in reversed(flat.equations):
            wanted = set[int]().union(*(found[value] for value in equation.outputs))
            for value in equation.values:
                found[value] |= wanted
        return found

    def _require_clipping(self) -> None:
        """Raise MissingCapabilityError unless what the optimizer makes of all shards is clipped to the plan's norm."""
        literals = [
            float(atom.val) for equation in self.joins for atom in equation.inputs
            if not isinstance(atom, int) and jnp.size(atom.val) == 1
        ]  # fmt: skip
        if not any(abs(value - (self.clip_norm or 0.0)) <= 1e-6 * abs(value) for value in literals):
            raise MissingCapabilityError(
                f"job {self.name!r} is planned with clip_norm={self.clip_norm:g}, and its optimizer looks at the "
                f"gradients of all shards otherwise ({transformation(self.joins[0])}): plan it with the norm that the "
                f"optimizer clips to, or leave clipping to the plan"
            )

    def _refused(self, flat: FlatProgram, equation: Equation) -> MissingCapabilityError:
        name = transformation(equation)
        if equation.effects:
            why = "has side effects: leave them out"
        elif not self.waits and all(flat.is_small(v, SCALAR_BYTES) for v in (*equation.values, *equation.outputs)):
            why = (
                "looks at the gradients of several shards, and the job is planned with updates of each shard at once: "
                "plan it with clip_norm=, and updates wait until all gradients are there"
            )
        else:
            why = (
                "looks at several parameters together, which lie in different shards: take one that updates each "
                "parameter by itself, besides clipping by the norm over all"
            )
        return MissingCapabilityError(f"job {self.name!r}: the optimizer's {name} {why}")

    # Its parts -------------------------------------------------------------------------------------------------------

    def _functions(self, flat: FlatProgram) -> UpdateFunctions:
        results = dict(zip(self.results, flat.outputs, strict=True))
        of_shard: dict[int, list[Key]] = {shard: [] for shard in sorted(set(self.homes))}
        common: list[Key] = []
        for key, atom in results.items():
            home, made = self._home_of(key), self.home[atom] if isinstance(atom, int) else EVERYWHERE
            if made >= 0 and home == EVERYWHERE and len(of_shard) == 1:
                home = made  # there is one shard alone
            if made >= 0 and made != home:
                maker = next(e for e in flat.equations if atom in e.outputs)
                raise self._refused(flat, maker)
            (common if home == EVERYWHERE else of_shard[home]).append(key)
        joined = {value for equation in self.joins for value in equation.outputs}

        def make(makes: Sequence[Key], atoms: Sequence[Any], given: Iterable[int]) -> StageFunction:
            return self._function(flat, makes, atoms, set(given))

        partials, parts = {}, dict[int, list[int]]()
        for value in self.parts:
            parts.setdefault(self.home[value], []).append(value)
        for shard, values in parts.items():
            keys: list[Key] = [("between", value, 0) for value in values]
            partials[shard] = make(keys, values, ())
            if any(key[0] == "state" for key in partials[shard].reads):
                raise self._refused(flat, self.joins[0])
        shards = {shard: make(keys, [results[k] for k in keys], joined) for shard, keys in of_shard.items()}
        last = make(common, [results[key] for key in common], joined) if common else None
        wanted = dict.fromkeys(
            key for own in (*shards.values(), *([last] if last else [])) for key in own.reads if key[0] == "between"
        )
        join = make(tuple(wanted), [key[1] for key in wanted], self.parts) if wanted else None
        return UpdateFunctions(shards, partials, join, last)

    def _function(
        self, flat: FlatProgram, makes: Sequence[Key], atoms: Sequence[Any], given: set[int]
    ) -> StageFunction:
        """The function of some results, from arguments and from values that are ``given``."""
        kept = [e for e in flat.equations if given.isdisjoint(e.outputs)]
        equations = needed(kept, [atom for atom in atoms if isinstance(atom, int)])
        made = {value for equation in equations for value in equation.outputs}
        used = dict.fromkeys(v for e in equations for v in e.values)
        used |= dict.fromkeys(atom for atom in atoms if isinstance(atom, int))
        reads: dict[int, Key] = {}
        for value in (v for v in used if v not in made and v not in flat.constants):
            reads[value] = self.keys.get(value, ("between", value, 0))
        own = set(makes)
        ordered = sorted(reads.items(), key=lambda item: (item[1] not in own, item[1][0] != "gradient"))

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            known = dict(zip((value for value, _ in ordered), operands, strict=True)) | flat.constants
            evaluate(equations, known)
            return tuple(value_of(flat, atom, known) for atom in atoms)

        keys = tuple(key for _, key in ordered)
        updates = any(key[0] == "weight" for key in makes)
        donates = tuple(n for n, key in enumerate(keys) if updates and (key in own or key[0] == "gradient"))
        avals = tuple(aval_of(flat, value) for value, _ in ordered)
        return StageFunction(run, keys, tuple(makes), avals, donates, by_memory=True)


def transformation(equation: Equation) -> str:
    """The name of the optax transformation that an equation is of, as far as can be told."""
    frames = equation.source.traceback.frames if getattr(equation.source, "traceback", None) else []
    names = [frame.function_name for frame in frames]
    found = next((name for name in names if ".<locals>." in name and "update" in name.rpartition(".")[2]), None)
    return found.partition(".<locals>")[0] if found else equation.primitive.name


def require_updates(name: str, homes: Iterable[int], passes: Iterable[int]) -> None:
    """Raise PlanError where a parameter is updated by a shard for which the plan has no update pass."""
    if lacking := sorted(set(homes) - set(passes)):
        raise PlanError(
            f"job {name!r}: the plan has no update of shards {lacking}, which hold parameters: plan it again"
        )
