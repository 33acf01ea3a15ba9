"""The first op of a step that makes a NaN, or an infinity, of values that are none.

The program of one microbatch, forward and backward, is run once more with a look at the values that each of its
equations reads and makes. It runs whole, on one device, and before the step itself, so that the state is still the one
that led to the fault.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import compress
from operator import or_
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.extend.source_info_util import summarize

import shardwright
from shardwright.backends.jax.capture.inner_programs import INLINED, bound, inner_program, interpreted, scanned
from shardwright.backends.jax.capture.trace import call_number
from shardwright.backends.jax.capture.tree import Parts, abstract
from shardwright.backends.jax.loss.microbatches import Microbatches
from shardwright.backends.jax.pipeline.microbatch import CutMicrobatch, cut_microbatch
from shardwright.backends.jax.pipeline.stage_functions import TOTAL
from shardwright.backends.jax.program.equations import evaluate, value_of
from shardwright.backends.jax.state.ownership import holdings_of
from shardwright.backends.jax.state.trainable import replaced
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule.actions import Action, Kind

MARK = "shardwright:equation:"
LIBRARIES = ("flax", "optax", "jax")
OPENED = INLINED | {"custom_lin"}
NAN, INFINITY = 1, 2
Seen = tuple[Any, jax.Array]
"""An array, and its flags `NAN` and `INFINITY`."""
FRAMES = 30
"""The number of the user's frames that are looked through for one that is no library's."""


@dataclass(frozen=True, slots=True)
class Site:
    """One op of the program."""

    name: str
    equation: int
    """The number of the equation in the forward's program; -1 for none."""
    call: int
    """The number of the module call around the op, where it is inside of an equation's own program; else -1."""
    is_backward: bool
    source: Any


@dataclass(slots=True)
class OpChecks:
    """The checked program of the microbatches of one step."""

    micro: CutMicrobatch
    microbatches: Microbatches
    run: Callable[..., Any]
    sites: list[Site]
    """The ops that ``run`` looks at, in the order in which it runs."""
    names: tuple[str, ...]
    """The names of the parameters."""
    device: jax.Device
    _stages: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, plan: Plan, microbatches: Microbatches, parts: Parts, leaves: Sequence[Any], device: jax.Device
    ) -> "OpChecks":
        """The checked program of a plan's microbatches. parts: the whole model taken apart, as arrays or shapes;
        leaves: those of a global batch; device: the one that the program runs on."""
        parts = jax.tree.map(abstract, parts)
        names = parts.names
        holdings = holdings_of(plan, names, [leaf.shape for leaf in jax.tree.leaves(parts.params)])
        alone = replace(microbatches, copies=())
        micro = cut_microbatch(plan, alone, parts, leaves, holdings)
        sites: list[Site] = []
        run = _Program(micro, microbatches.loss.trained.mask(parts.params), sites)
        found = cls(micro, microbatches, jax.jit(run), sites, names, device)
        for stage, part in enumerate(micro.cut.parts):
            found._stages.update((value, stage) for e in part.equations for value in e.outputs)
        return found

    def first(self, params: Any, random: Any, step: jax.Array, other: Any, leaves: Sequence[Any]) -> str:
        """A text on the first microbatch whose loss or gradients are not finite, and on the ops that made it so; empty
        where all are finite."""
        split = [self.microbatches.split(leaf, dim) for leaf, dim in zip(leaves, self.microbatches.dims, strict=True)]
        given = [jax.tree.leaves(params), jax.tree.leaves(random), step, jax.tree.leaves(other)]
        placed = jax.tree.map(self._placed, given)
        for m in range(self.microbatches.microbatches):
            part = [self._placed(leaf) for leaf in self.microbatches.take(split, m)]
            found = self.run(*placed, jnp.int32(m), part)
            total, gradients, culprits, arguments, placed[3] = found
            if bool(total) and bool(gradients):
                continue
            what = "gradient" if bool(total) else "loss"
            return f"the {what} of microbatch {m} is not finite: {self._said(m, np.asarray(culprits), arguments)}"
        return ""

    def _placed(self, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return leaf  # several processes run the same on all devices
        return jax.device_put(leaf, self.device)

    def _said(self, m: int, culprits: np.ndarray, arguments: Any) -> str:
        bad = [name for name, sound in zip(self.names, arguments[0], strict=True) if not bool(sound)]
        said = [f"parameter {bad[0]} was not finite before the step"] if bad else []
        if not bool(arguments[1]):
            said.append("the batch has a NaN or an infinity")
        for what, number in zip(("infinity", "NaN"), (int(culprits[1]), int(culprits[0])), strict=True):
            if number >= 0:
                said.append(f"the first {what} was made by {self._described(self.sites[number], m)}")
        return "; ".join(said) or "no op made it of finite values"

    def _described(self, site: Site, m: int) -> str:
        flat = self.micro.cut.flat
        equation = flat.equations[site.equation] if site.equation >= 0 else None
        call = site.call if site.call >= 0 else equation.call if equation is not None else 0
        stage = self._stages.get(equation.outputs[0]) if equation is not None and equation.outputs else None
        path = self.micro.paths[call] if 0 <= call < len(self.micro.paths) else ""
        kind, way = (Kind.BACKWARD, "backward") if site.is_backward else (Kind.FORWARD, "forward")
        place, names = "", self.micro.names
        if stage is not None:
            place = f"; {names.text(stage)}, action {names.action(Action(stage, kind, m))}"
        line = _line(site.source) or _line(equation.source if equation is not None else None)
        where = f"in {path}" if path else "between modules"
        return f"{site.name} {where} ({way}{place}, microbatch {m}{f'; {line}' if line else ''})"


class _Program:
    """The checked program of one microbatch. It takes parameters, random state, the step, other state, the number of a
    microbatch and its part of the batch. It returns whether the loss is finite, whether the gradients are, the numbers
    of the sites that first made a NaN and an infinity (-1: none), whether parameters and batch are finite, and the
    other state after it."""

    def __init__(self, micro: CutMicrobatch, trained: Sequence[bool], sites: list[Site]) -> None:
        self.micro, self.trained, self.sites = micro, trained, sites

    def __call__(
        self,
        params: Sequence[jax.Array],
        random: Sequence[jax.Array],
        step: jax.Array,
        other: Sequence[jax.Array],
        m: jax.Array,
        part: Sequence[jax.Array],
    ) -> tuple[Any, ...]:
        micro = self.micro
        flat, operands = micro.cut.flat, micro.operands
        given = dict(zip(micro.random, random, strict=True)) | {micro.step: step, operands.m: m}
        given |= dict(zip(micro.state, other, strict=True)) | dict(zip(micro.batch, part, strict=True))

        def total(trained: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            whole = replaced(self.trained, params, trained)
            known = dict(flat.constants) | given
            for weight in micro.cut.weights:
                leaf, rows = whole[weight.holding.leaf], weight.holding.rows
                known[weight.value] = leaf if rows is None else leaf[rows[0] : rows[1]]
            for number, equation in enumerate(flat.equations):
                with jax.named_scope(f"{MARK}{number}"):
                    evaluate([replace(equation, region=None, unit=None, is_layers=False)], known)
            values = [value_of(flat, atom, known) for atom in flat.outputs]
            return values[TOTAL], [values[operands.state[v]] if v in operands.state else given[v] for v in micro.state]

        trained = list(compress(params, self.trained))
        closed, shapes = jax.make_jaxpr(jax.value_and_grad(total, has_aux=True), return_shape=True)(trained)
        self.sites.clear()
        looker = _Looker()
        flags, seen = looker.run(closed, _seen(trained), -1, -1, False)
        self.sites += looker.sites
        (value, after), gradients = jax.tree.unflatten(jax.tree.structure(shapes), [array for array, _ in seen])
        numbers = [jnp.where((flags & kind).any(), jnp.argmax(flags & kind), -1) for kind in (NAN, INFINITY)]
        finite = [_is_finite(leaf) for leaf in params], jnp.stack([_is_finite(leaf) for leaf in part]).all()
        sound = jnp.stack([_is_finite(g) for g in gradients]).all()
        return _is_finite(value), sound, jnp.stack(numbers), finite, after


class _Looker:
    """A run of a program equation by equation, which notes whether each makes a NaN or an infinity of values without: a
    flag for each site, `NAN`, `INFINITY` or both."""

    def __init__(self) -> None:
        self.sites: list[Site] = []

    def run(
        self, closed: ClosedJaxpr, given: Sequence[Seen], equation: int, call: int, is_backward: bool
    ) -> tuple[jax.Array, list[Seen]]:
        """The flags, and the results of the program. ``equation`` and ``call`` are those of its equations that do not
        say so themselves."""
        flags: list[jax.Array] = [jnp.zeros(0, jnp.int32)]

        def apply(_: int, eqn: JaxprEqn, inputs: list[Seen]) -> list[Seen]:
            stack = eqn.source_info.name_stack
            own, inner = call_number(stack, equation, MARK), call_number(stack, call)
            back = is_backward or any(getattr(entry, "name", "") == "transpose" for entry in stack.stack)
            body = inner_program(eqn.params) if eqn.primitive.name in OPENED else None
            if body is not None and len(body.jaxpr.invars) == len(inputs):
                found, made = self.run(body, inputs, own, inner, back)
            elif eqn.primitive.name == "scan":
                found, made = self._scan(eqn.params, [array for array, _ in inputs], own, inner, back)
            else:
                with eqn.ctx.manager:
                    made = _seen(bound(eqn.primitive, eqn.params, [array for array, _ in inputs]))
                before, after = (reduce(or_, (kind for _, kind in of), jnp.int32(0)) for of in (inputs, made))
                nan = jnp.where(before & NAN, 0, after & NAN)
                infinity = jnp.where(before, 0, after & INFINITY)
                found = (nan | infinity).reshape(1)
                self.sites.append(Site(eqn.primitive.name, own, inner, back, eqn.source_info))
            flags.append(found)
            return made

        results = interpreted(closed.jaxpr, _seen(closed.consts), given, apply, lambda atom: _seen([atom.val])[0])
        return jnp.concatenate(flags), results

    def _scan(
        self, params: Mapping[str, Any], inputs: Sequence[jax.Array], equation: int, call: int, is_backward: bool
    ) -> tuple[jax.Array, list[Seen]]:
        """The flags and results of a loop, whose every iteration has sites of its own."""
        start = len(self.sites)

        def body(*arrays: jax.Array) -> list[jax.Array]:
            del self.sites[start:]  # JAX may trace it twice
            flags, made = self.run(params["jaxpr"], _seen(arrays), equation, call, is_backward)
            return [*(array for array, _ in made), flags]

        *results, flags = scanned({**params, "unroll": 1}, inputs, body)
        self.sites += self.sites[start:] * (params["length"] - 1)
        flags = flags[::-1] if params["reverse"] else flags
        return flags.reshape(-1), _seen(results)


def _seen(arrays: Sequence[Any]) -> list[Seen]:
    return [(array, _kind(jnp.asarray(array))) for array in arrays]


def _kind(array: jax.Array) -> jax.Array:
    """The flags `NAN` and `INFINITY` of an array."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return jnp.zeros((), jnp.int32)
    found: jax.Array = jnp.where(jnp.isnan(array).any(), NAN, 0) | jnp.where(jnp.isinf(array).any(), INFINITY, 0)
    return found


def _is_finite(array: jax.Array) -> jax.Array:
    found: jax.Array = _kind(array) == 0
    return found


def _line(source: Any) -> str:
    """The user's line that an op comes from, the innermost outside libraries: ``model.py:12 (Block.__call__)``."""
    if source is None:
        return ""
    own = str(Path(shardwright.__file__).parent)
    lines = [line for line in reversed(summarize(source, FRAMES).splitlines()) if ":" in line]
    for line in lines:
        file = line.partition(":")[0]
        if not file.startswith(own) and not any(f"/site-packages/{library}/" in file for library in LIBRARIES):
            place, _, function = line.partition(" ")
            name, number, *_ = place.split(":")
            return f"{Path(name).name}:{number} {function}".strip()
    return ""
