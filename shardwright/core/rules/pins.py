"""The layouts that a user fixes beforehand: the modules that are split, and the layouts of parameters.

All forms become the same thing, a `Pin` for each parameter and axis with its source: SageMaker's
``set_tensor_parallelism``, Hugging Face's ``base_model_tp_plan``, Flax's logical axes with their rules (and NNX's
partitioning metadata, which are logical axes or mesh axes by name), and ordered lists of regular expression → layout.
"""

import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.errors import LayoutError, nearest
from shardwright.core.layout.pinned_layout import Pin
from shardwright.core.layout.placements import Layout, Placement, Split
from shardwright.core.model.graph import Graph
from shardwright.core.rules.legal_signatures import divides


class PinWarning(UserWarning):
    """A pin that has no effect; the others remain in force."""


Rule = tuple[str, Layout] | tuple[str, str | None] | Pin
"""A rule: (regular expression, layout), (logical axis, mesh axis or None), or a pin."""
Asked = Mapping[str, str] | Sequence[Rule]
"""The argument of `plan(layouts=…)`: a Hugging Face plan (module pattern → style), or a list of rules."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """Pins in the solver's form, and those that could not be kept."""

    places: tuple[tuple[int, tuple[Placement | None, ...]], ...]
    """The (tensor, placement per axis; None where free) of every pinned parameter."""
    unsplit: tuple[tuple[str, str], ...] = ()
    """The (parameter, reason why it cannot be split as asked, with the nearest size that could)."""


STYLES: dict[str, str] = {
    "colwise": "out", "colwise_rep": "out", "colwise_gather_output": "out", "local_colwise": "out",
    "packed_colwise": "packed out", "local_packed_colwise": "packed out",
    "rowwise": "in", "rowwise_rep": "in", "rowwise_split_input": "in", "local_rowwise": "in",
    "packed_rowwise": "packed in", "local_packed_rowwise": "packed in",
    "embedding_rowwise": "rows", "vocab_parallel_embedding": "rows",
    "replicate": "whole", "replicated_with_grad_allreduce": "whole", "sequence_parallel": "whole", "auto": "free",
    "gather": "free", "local": "free", "moe_tp_experts": "free", "ep_router": "free", "grouped_gemm": "free",
}  # fmt: skip
"""The effect of each of Hugging Face's styles on a weight stored as [out, in] (the last two dims). "free" styles are
about modules' inputs and outputs, which the solver decides."""


def pins_of(graph: Graph, asked: Asked | None, axis: str = "tp") -> tuple[Pin, ...]:
    """All pins of a model: those of the model itself (its marks, its logical axes), and those that a plan is asked for.

    Raises LayoutError for an entry that is no rule, for rules of logical axes where the model names none, and as
    `from_styles`, `from_patterns` and `from_logical_axes` do.
    """
    if asked is not None and (isinstance(asked, str) or not isinstance(asked, Mapping | Sequence)):
        raise LayoutError(
            f"layouts={asked!r}: expected a list of rules, such as [('.*weight', Layout.of(tp=Split(0)))], or a dict "
            f"of module pattern → style"
        )
    styles = asked if isinstance(asked, Mapping) else None
    rules = list(asked) if asked is not None and styles is None else []
    found = [*graph.pins, *(rule for rule in rules if isinstance(rule, Pin))]
    patterns: list[tuple[str, Layout]] = []
    logical: list[tuple[str, str | None]] = []
    for rule in rules:
        match rule:
            case Pin():
                pass
            case (str() as pattern, Layout() as layout):
                patterns.append((pattern, layout))
            case (str() as name, str() | None as mesh_axis):
                logical.append((name, mesh_axis))
            case _:
                raise LayoutError(
                    f"layouts= holds {rule!r}: expected (regular expression, Layout), (logical axis, mesh axis or "
                    "None), or a Pin; or a dict of module pattern → style instead of a list"
                )
    if styles is not None:
        found += from_styles(graph, styles, axis)
    if patterns:
        found += from_patterns(graph, patterns, (axis,))
    names = dict(graph.logical_axes)
    if logical and not names:
        raise LayoutError(
            f"rules for the logical axes {', '.join(repr(name) for name, _ in logical)} are given, and the parameters "
            f"of {graph.model_name} name none: create them with nnx.with_partitioning or nn.with_logical_partitioning, "
            "or give (regular expression, Layout)"
        )
    if names and not logical:  # without rules, a name counts only where it is a mesh axis
        names = {parameter: dims for parameter, dims in names.items() if axis in dims}
    found += from_logical_axes(graph, names, logical, (axis,))
    if logical and not {name for dims in names.values() for name in dims} & {name for name, _ in logical}:
        known = sorted({name for dims in names.values() for name in dims if name is not None})
        given = ", ".join(repr(name) for name, _ in logical)
        raise LayoutError(f"no rule for the logical axes {given} matches: the model's are {', '.join(known)}")
    return tuple(found)


def from_styles(graph: Graph, plan: Mapping[str, str], axis: str = "tp") -> tuple[Pin, ...]:
    """Pins of a ``base_model_tp_plan``: module pattern (``layers.*.mlp.up_proj``) → style.

    Patterns may leave out the base model's prefix. An unknown style causes a warning with the nearest style, and leaves
    that pattern's parameters free. Raises LayoutError when no pattern matches any parameter.
    """
    found: list[Pin] = []
    matched = False
    for pattern, style in plan.items():
        meaning = STYLES.get(style)
        regex = re.compile(r"(?:.*\.)?" + re.escape(pattern).replace(r"\*", r"[^.]+") + r"(?:\.[^.]+)?")
        mine = [p.name for p in graph.parameters if regex.fullmatch(p.name)]
        matched |= bool(mine)
        if meaning is None:
            warnings.warn(
                f"style {style!r} of {pattern!r} is not known; {nearest(style, STYLES)}. Its parameters are left to "
                "the solver, the rest of the plan holds",
                PinWarning,
                stacklevel=2,
            )
            continue
        for name in mine:
            pin = _styled(graph, name, meaning, axis, f"style {style!r} of {pattern!r}")
            if pin is not None:
                found.append(pin)
    if plan and not matched:
        raise LayoutError(_nothing_matches(graph, list(plan)))
    return tuple(found)


def _styled(graph: Graph, name: str, meaning: str, axis: str, source: str) -> Pin | None:
    shape = graph.tensors[next(p.tensor for p in graph.parameters if p.name == name)].fixed
    if meaning == "free":
        return None
    dim = {"out": len(shape) - 2, "in": len(shape) - 1, "rows": 0}.get(meaning.removeprefix("packed "), -1)
    if len(shape) == 1:
        dim = 0 if meaning.endswith("out") else -1
    if meaning == "whole" or dim < 0:
        return Pin(name, Layout(), source, (axis,))
    blocks = (shape[dim] // 2,) * 2 if meaning.startswith("packed") and shape[dim] % 2 == 0 else ()
    return Pin(name, Layout.of({axis: Split(dim, blocks)}), source)


def from_patterns(graph: Graph, rules: Sequence[tuple[str, Layout]], axes: Sequence[str] = ()) -> tuple[Pin, ...]:
    """Pins of an ordered list of (regular expression, layout): for every parameter the first that matches anywhere in
    one of its names. A tied parameter gets two pins where two expressions each match another of its names. ``axes`` are
    the axes that an empty layout replicates on. Raises LayoutError for an invalid expression, and when nothing matches.
    """
    compiled = []
    for pattern, layout in rules:
        try:
            compiled.append((re.compile(pattern), pattern, layout))
        except re.error as error:
            raise LayoutError(f"{pattern!r} is not a regular expression: {error}") from error
    found = []
    for parameter in graph.parameters:
        met: set[str] = set()
        for regex, pattern, layout in compiled:
            matches = {name for name in parameter.names if regex.search(name)}
            if matches and met.isdisjoint(matches):
                named = {axis for axis, _ in layout.placements}
                whole = tuple(axis for axis in axes if axis not in named)
                name = parameter.name if parameter.name in matches else min(matches)
                found.append(Pin(name, layout, f"pattern {pattern!r}", whole))
            met |= matches
    if rules and not found:
        raise LayoutError(_nothing_matches(graph, [pattern for pattern, _ in rules]))
    return tuple(found)


def from_logical_axes(
    graph: Graph,
    names: Mapping[str, Sequence[str | None]],
    rules: Sequence[tuple[str, str | None]] = (),
    axes: Sequence[str] = ("tp",),
) -> tuple[Pin, ...]:
    """Pins of logical axes: parameter → a name per dim, and ordered rules (name, mesh axis or None).

    The first rule for a name whose mesh axis is not used by an earlier dim of the same parameter applies, as in Flax. A
    name that is a mesh axis itself stands for it. A name without a rule leaves its dim whole. Raises LayoutError for a
    parameter that the model lacks, or with another number of names than dims.
    """
    known = {name: p for p in graph.parameters for name in (p.name, *p.aliases)}
    ruled = {name for name, _ in rules}
    found = []
    for parameter, dims in names.items():
        if parameter not in known:
            raise LayoutError(f"logical axes name {parameter!r}, which the model lacks; {_close(parameter, known)}")
        shape = graph.tensors[known[parameter].tensor].fixed
        if len(dims) != len(shape):
            raise LayoutError(f"{parameter} of shape {shape} has {len(shape)} dims, its logical axes are {tuple(dims)}")
        placements: dict[str, Placement] = {}
        for dim, name in enumerate(dims):
            if name is None:
                continue
            options = (
                [axis for given, axis in rules if given == name] if name in ruled else [name if name in axes else None]
            )
            axis = next((a for a in options if a is None or a not in placements), None)
            if axis is not None:
                placements[axis] = Split(dim)
        whole = tuple(axis for axis in axes if axis not in placements)
        found.append(Pin(known[parameter].name, Layout.of(placements), f"logical axes of {parameter}", whole))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class TensorParallelism:
    """SageMaker's marks on modules, by path; the innermost one counts. Modules marked False stay whole. True, and no
    mark, leave the choice to the solver, which reports what could not be split."""

    marks: Mapping[str, bool]

    def enabled(self, path: str) -> bool | None:
        """The innermost mark of a parameter or module; None without any."""
        parts = path.split(".")
        for depth in range(len(parts), -1, -1):
            mark = self.marks.get(".".join(parts[:depth]))
            if mark is not None:
                return mark
        return None

    def pins(self, names: Sequence[str], axis: str = "tp") -> tuple[Pin, ...]:
        """Pins of the parameters with these names. Raises LayoutError for a mark under which there is no parameter."""
        for path in self.marks:
            if path and not any(name == path or name.startswith(f"{path}.") for name in names):
                modules = {name.rpartition(".")[0] for name in names}
                raise LayoutError(
                    f"set_tensor_parallelism names {path!r}, under which no parameter is; {_close(path, modules)}"
                )
        return tuple(
            Pin(name, Layout(), "set_tensor_parallelism(…, False)", (axis,))
            for name in names
            if self.enabled(name) is False
        )


def resolve(graph: Graph, pins: Sequence[Pin], sizes: Mapping[str, int]) -> Resolved:
    """The pins of all sources together, for axes of these sizes.

    Raises LayoutError for an axis that the mesh lacks, a dim that a parameter lacks, and two pins that contradict each
    other (both are named; tied parameters count as one). A parameter whose dim does not divide is left free and
    reported.
    """
    tensor_of = {name: p.tensor for p in graph.parameters for name in (p.name, *p.aliases)}
    asked: dict[tuple[int, str], tuple[Placement, Pin]] = {}
    unsplit: list[tuple[str, str]] = []
    for pin in pins:
        if pin.name not in tensor_of:
            raise LayoutError(f"{pin.source} pins {pin.name!r}, which the model lacks; {_close(pin.name, tensor_of)}")
        tensor = tensor_of[pin.name]
        shape = graph.tensors[tensor].fixed
        for axis, placement in pin.layout.placements:
            if axis not in sizes:
                raise LayoutError(f"{pin.source} pins {pin.name} on axis {axis!r}; the mesh has {', '.join(sizes)}")
            if isinstance(placement, Split) and placement.dim >= len(shape):
                raise LayoutError(f"{pin.source} splits dim {placement.dim} of {pin.name}, whose shape is {shape}")
        for axis, size in sizes.items():
            wanted = pin.on(axis)
            if wanted is None:
                continue
            if isinstance(wanted, Split) and not divides(shape, [(wanted, size)]):
                unsplit.append((pin.name, _does_not_divide(pin, shape, wanted, axis, size)))
                continue
            before = asked.setdefault((tensor, axis), (wanted, pin))
            if before[0] != wanted:
                raise LayoutError(
                    f"two pins contradict each other on axis {axis!r}: {before[1].source} puts {before[1].name} at "
                    f"{before[0]}, {pin.source} puts {pin.name} at {wanted}: keep one of them"
                )
    tensors = dict.fromkeys(tensor for tensor, _ in asked)
    places = tuple(
        (tensor, tuple(asked[tensor, axis][0] if (tensor, axis) in asked else None for axis in sizes))
        for tensor in tensors
    )
    return Resolved(places, tuple(unsplit))


def _does_not_divide(pin: Pin, shape: Sequence[int], wanted: Split, axis: str, size: int) -> str:
    held = shape[wanted.dim]
    more = -(-held // size) * size
    return (
        f"{pin.source}: dim {wanted.dim} of shape {tuple(shape)} holds {held}, which axis {axis!r} of size {size} does "
        f"not divide; pad it to {more}, or use a size that divides {held}"
    )


def _nothing_matches(graph: Graph, patterns: Sequence[str]) -> str:
    names = [p.name for p in graph.parameters]
    shown = ", ".join(names[:3])
    given = ", ".join(map(repr, patterns))
    return f"none of {given} matches a parameter of {graph.model_name}; its names are like {shown}"


def _close(name: str, known: Mapping[str, object] | set[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.3)
    return f"the nearest is {close[0]!r}" if close else "nothing is like it"
