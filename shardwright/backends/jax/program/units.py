"""The unit of the plan that an equation belongs to, where no module call says so.

The units of a plain function are found as its stages are: by the parameters that each of them reads, and between two of
them at the cut where the fewest bytes cross. The units decide what is kept for the backward pass and what is made
again; results do not depend on them.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace

from shardwright.backends.jax.capture.checkpoint_policies import told_apart
from shardwright.backends.jax.program.cut import Placer
from shardwright.backends.jax.program.equations import Equation, FlatProgram
from shardwright.backends.jax.program.state_places import Carried
from shardwright.core.errors import MissingCapabilityError
from shardwright.core.plan.plan import Plan


def name_units(flat: FlatProgram, plan: Plan, weights: Mapping[int, str], state: Mapping[int, Carried]) -> None:
    """Give the equations of units that are recomputed or offloaded their ``unit``, where these are neither module calls
    nor loops.

    weights: the arguments that are parameters, and their names; state: those that carry what the model changes. Warns
    of units for which no equation is found: they keep their activations.
    """
    looped = sorted(flat.looped_units & set(plan.decision.offloaded_units))
    if looped:
        raise MissingCapabilityError(
            f"the plan offloads units {looped}, which are iterations of a loop over stacked parameters, and what these "
            f"keep cannot be sent to the host one by one: plan with offload=False"
        )
    looped = sorted(flat.looped_units & set(plan.decision.other_units))
    if looped:
        raise MissingCapabilityError(
            f"the plan has other_recompute={plan.decision.other_recompute!r} for units {looped}, which are iterations "
            f"of a loop over stacked parameters, and these are computed again in one mode: plan again without it"
        )
    missing = set(told_apart(plan)) - {equation.unit for equation in flat.equations} - flat.looped_units
    if not missing:
        return
    users: dict[str, list[int]] = {}
    for number, bound in enumerate(plan.binding("jax").units):
        for _, name, _ in bound.parameters:
            users.setdefault(name, []).append(number)
    weight_units = {value: tuple(users.get(name, ())) for value, name in weights.items()}
    tied = _readers_in_turn(flat, weight_units)

    def own(equation: Equation) -> int | None:
        return equation.unit if equation.unit is not None else tied.get(id(equation))

    placer = Placer(flat, len(plan.model.unit_classes), weight_units, state, own)
    placed = _with_neighbours(flat, placer.once()[0])
    for index, (equation, unit) in enumerate(zip(flat.equations, placed, strict=True)):
        if unit in missing and not equation.effects and not equation.is_layers:
            flat.equations[index] = replace(equation, unit=unit)
    unknown = sorted(missing - {equation.unit for equation in flat.equations})
    if unknown:
        warnings.warn(
            f"the plan computes units {unknown} again in the backward pass or offloads them, and of the loss function "
            "no part can be told to be theirs, because they share all parameters with others or have none: they keep "
            "their activations, or are computed again with others, so memory may differ from what was predicted; "
            "make them calls of NNX modules, or a loop (jax.lax.scan) over their stacked parameters, to have them told "
            "apart",
            stacklevel=2,
        )


def _readers_in_turn(flat: FlatProgram, weight_units: Mapping[int, tuple[int, ...]]) -> dict[int, int]:
    """The units of the equations, by identity, that read parameters of several units: where each of those reads one
    once, in the order of the program."""
    found: dict[int, int] = {}
    for weight, units in weight_units.items():
        if len(units) < 2:
            continue
        readers = [equation for equation in flat.equations if weight in equation.inputs]
        if len(readers) == 1 and readers[0].primitive.name == "convert_element_type":
            readers = [equation for equation in flat.equations if readers[0].outputs[0] in equation.inputs]
        if len(readers) == len(units):
            found |= {id(equation): unit for equation, unit in zip(readers, units, strict=True)}
    return found


def _with_neighbours(flat: FlatProgram, placed: list[int | None]) -> list[int | None]:
    """The units of the equations, where cheap ones that any place could make (masks, biases, random keys) get the unit
    that they lie inside of, or that comes next and alone reads them."""
    before: list[int | None] = []
    last: int | None = None
    for own in placed:
        before.append(last)
        last = last if own is None else own
    found = list(placed)
    readers: dict[int, set[int | None]] = {}
    for atom in flat.outputs:
        if isinstance(atom, int):
            readers[atom] = {None}
    following: int | None = None
    for index in range(len(placed) - 1, -1, -1):
        equation = flat.equations[index]
        if placed[index] is not None:
            following = placed[index]
        else:
            read = set[int | None]().union(*(readers.get(value, set()) for value in equation.outputs))
            found[index] = following if before[index] == following or read == {following} else None
        for value in equation.values:
            readers.setdefault(value, set()).add(found[index])
    return found
