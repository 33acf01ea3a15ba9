"""What becomes of the activations of units that are named by the paths of their modules, or by the model itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from shardwright.core.errors import PlanError, nearest
from shardwright.core.model.fold import Unit, fold
from shardwright.core.model.graph import Call, Graph
from shardwright.core.model.own_checkpoints import is_checkpointed
from shardwright.core.search.options import Options
from shardwright.core.tables.memory import recomputable_units
from shardwright.core.values.recompute_modes import PREFIX, WHOLE, is_computed_again, names_products

POLICIES = ("none", "offload", *(mode for mode in WHOLE if is_computed_again(mode)))
"""What may become of the units of a pattern, beside "products:…"."""
MAXTEXT: dict[str, str | None] = {
    "minimal": "selective",
    "save_dot_except_mlp": None,
    "save_dot_with_context_except_mlp": None,
    "save_qkv_proj": None,
    "save_out_proj": None,
    "qkv_proj_offloaded": None,
    "minimal_offloaded": None,
    "minimal_with_context": None,
    "custom": None,
}
"""MaxText's names of what is kept (its ``remat_policy``), beside "full", which is ours too: our name for the same, or
None where there is none, as these go by names that its layers give to values."""


def by_module(graph: Graph, asked: Mapping[str, str]) -> dict[str, Any]:
    """The options of `plan()` for policies by module: for each pattern of module paths (``transformer.h.[0-5]``, or a
    module with all below it) "none", "offload" or a mode in which it is computed again, of which there may be two. The
    first pattern that matches a unit counts; units that none matches keep their activations.

    Raises:
        PlanError: a pattern that matches no unit, or only parts of units (the nearest paths are named), a policy that
            is not of units, or more modes than a plan has.
    """
    if not asked:
        raise PlanError("recompute={}: expected a policy for each pattern of module paths")
    for pattern, policy in asked.items():
        if policy not in POLICIES and not names_products(policy):
            raise PlanError(
                f"recompute={{{pattern!r}: {policy!r}}}: by module there is {', '.join(map(repr, POLICIES))} or "
                f"'{PREFIX}MODULE,…'"
            )
    folded = fold(graph)
    units, found, decided = folded.units, dict[int, str](), dict[str, list[int]]()
    for unit in units:
        for pattern, policy in asked.items():
            if any(_matches(call.path, pattern) for call in unit.calls):
                found[unit.index] = policy
                decided.setdefault(pattern, []).append(unit.index)
                break
    may = recomputable_units([unit.fold_class for unit in units])
    for pattern, policy in asked.items():
        if not any(_matches(call.path, pattern) for unit in units for call in unit.calls):
            raise PlanError(_no_match(graph, units, pattern))
        if pattern not in decided:
            raise PlanError(
                f"recompute={{{pattern!r}: {policy!r}}} decides nothing: patterns before it match all its units, and "
                f"the first that matches counts; put it before them"
            )
        if policy not in ("none", "offload") and not any(may[unit] for unit in decided[pattern]):
            raise PlanError(
                f"recompute={{{pattern!r}: {policy!r}}}: units that have no others like them, as embeddings and heads, "
                f"are kept, or offloaded, where most units of a model are alike"
            )
    kept = tuple(unit.index for unit in units if found.get(unit.index, "none") == "none")
    away = tuple(unit for unit, policy in found.items() if policy == "offload")
    if len(kept) == len(units):
        return {"recompute": "none"}
    again = list(dict.fromkeys(policy for policy in found.values() if policy not in ("none", "offload")))
    modes = ["full", *(mode for mode in again if mode != "full")] if away else again
    if len(modes) > 2:
        raise PlanError(
            f"recompute={dict(asked)!r}: a plan computes units again in two modes at most, 'full' one of them where "
            f"others are offloaded; given {', '.join(map(repr, modes))}"
        )
    options: dict[str, Any] = {"recompute": modes[0], "kept_units": kept or None, "offloaded_units": away or None}
    for other in modes[1:]:
        own = tuple(unit for unit, policy in found.items() if policy == other and may[unit])
        options |= {"other_recompute": other, "other_units": own}
    return options


def of_maxtext(name: str) -> str:
    """The mode of a name that may be MaxText's. Raises PlanError for a policy of MaxText's that has no counterpart."""
    if name not in MAXTEXT:
        return name
    ours = MAXTEXT[name]
    if ours is None:
        raise PlanError(
            f"recompute={name!r} is a policy of MaxText's that goes by names of values in its own layers, which other "
            f"models do not have: take 'selective' (its 'minimal'), 'elementwise', 'full', or a policy for each "
            f"pattern of module paths"
        )
    return ours


def as_the_model_asks(graph: Graph, options: Options, warn: Callable[[str], None]) -> Options:
    """The options with the units that the model itself computes again, by checkpoints or marks, where nobody says what
    is recomputed: these are recomputed, the others kept.

    Raises:
        PlanError: the options say that such units are kept.
    """
    is_told_by_op = any(op.in_checkpoint for op in graph.ops)
    if not is_told_by_op and not any(call.is_recomputed for call in graph.calls):
        return options
    units = fold(graph).units
    may = recomputable_units([unit.fold_class for unit in units])
    asked = [unit for unit in units if is_checkpointed(graph, unit) or _is_recomputed(graph, unit)]
    whole = [unit for unit in asked if may[unit.index]]
    # What is told by op is counted as it runs, in units that the plan keeps too.
    if (lost := [unit for unit in asked if not may[unit.index]]) and not is_told_by_op:
        warn(
            f"{lost[0].calls[0].path} and {len(lost) - 1} other units, which have no others like them, are "
            f"checkpointed by the model or marked: a plan keeps them, and counts them so"
        )
    marked = {unit.index for unit in asked}
    parts = {
        call.path
        for unit in units
        if unit.index not in marked
        for call in _calls_of(graph, unit)
        if call.is_recomputed and not graph.calls[call.parent].is_recomputed
    }
    if parts:
        some = sorted(parts)
        warn(
            f"{some[0]} and {len(some) - 1} other modules are parts of units, and the model asks to compute them "
            f"again: a plan keeps units or recomputes them whole, so that these are counted as kept; what the model "
            f"checkpoints itself runs so, what is marked does not"
        )
    if not whole:
        return options
    first = whole[0].calls[0].path if whole[0].calls else f"unit {whole[0].index}"
    said = f"{first} and {len(whole) - 1} other units are checkpointed by the model itself, or marked"
    if options.recompute == "none" or {unit.index for unit in whole} & set(options.kept_units or ()):
        raise PlanError(
            f"recompute={options.recompute!r} keeps units that are to be recomputed: {said}. Leave recompute out, or "
            f"switch the model's checkpoints off"
        )
    if options.recompute != "auto":
        return options
    kept = tuple(unit.index for unit in units if unit not in whole)
    if options.offload:
        raise PlanError(f"offload=True searches for the units that are recomputed, and {said}: leave out one of them")
    return replace(options, recompute="full", kept_units=kept or None)


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path, pattern) or path.startswith(f"{pattern}.") or fnmatchcase(path, f"{pattern}.*")


def _calls_of(graph: Graph, unit: Unit) -> Iterator[Call]:
    """All calls in which ops of a unit lie."""
    seen = set()
    for op in graph.ops[unit.first_op : unit.end_op]:
        call = op.call
        while call not in seen:
            seen.add(call)
            call = graph.calls[call].parent
    return (graph.calls[call] for call in sorted(seen))


def _is_recomputed(graph: Graph, unit: Unit) -> bool:
    """Whether the model asks for a unit to be computed again: for all calls in it, or for all that it computes."""
    if not unit.calls:
        return False
    asked = {call.path for call in _calls_of(graph, unit) if call.is_recomputed}
    if all(call.path in asked for call in unit.calls):
        return True
    return all(
        any(call.is_recomputed for call in _around(graph, op.call)) for op in graph.ops[unit.first_op : unit.end_op]
    )


def _around(graph: Graph, number: int) -> Iterator[Call]:
    """A call and those around it."""
    while number:
        yield graph.calls[number]
        number = graph.calls[number].parent


def _no_match(graph: Graph, units: Sequence[Unit], pattern: str) -> str:
    paths = [call.path for unit in units for call in unit.calls]
    inside = next((call.path for call in graph.calls if _matches(call.path, pattern)), None)
    if inside is not None:
        around = next((path for path in paths if inside.startswith(f"{path}.")), None)
        if around is not None:
            return (
                f"recompute={{{pattern!r}: …}}: {inside} is a part of the unit {around}, and units are kept, "
                f"recomputed or offloaded whole: name {around!r}"
            )
    if not paths:
        return (
            f"recompute={{{pattern!r}: …}}: {graph.model_name} calls no modules that could be named: give "
            f"recompute='full' with kept_units or offloaded_units"
        )
    return f"recompute={{{pattern!r}: …}} matches no module of {graph.model_name}: {nearest(pattern, paths)}"
