"""The places of a traced program where the plan's layouts apply: values as they are made, operands as they are read.

The plan's layouts are realised on a graph, captured from the very function that is going to run; each op of the graph
is an equation of the program (or a few of them), found by its path.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardwright.backends.jax.capture.steps import Path, Program, Step
from shardwright.backends.jax.program.split_lookups import terms_of
from shardwright.core.errors import PlanError
from shardwright.core.layout.placements import Partial, Placement, Split
from shardwright.core.layout.unit_layouts import Link, Places, RealisedUnit
from shardwright.core.model.graph import Graph

Place = tuple[Path, int]
"""The path of an equation, and the position of one of its results or operands."""

FOLLOWING = frozenset({"elementwise", "view", "dropout"})
"""The kinds of op whose results lie as their operands do: the compiler needs no word about them."""

OPTIONAL = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "transpose"})
"""The steps that one batch size may need and another not: a batch of one broadcasts without them."""


@dataclass(frozen=True, slots=True)
class Guide:
    """The placement of a value along the tensor axis, and that of its gradient; None: as it comes."""

    key: tuple[int, ...]
    """A key: readers of one value whose guides have the same key share the guided value."""
    value: Placement | None
    gradient: Placement | None
    batch_dims: tuple[int, ...]
    """The value's dims that count samples."""
    is_constraint: bool = True
    """Whether the guide constrains the sharding. False: it only gives the order in which a dim of blocks is held."""
    copies: bool = False
    """Whether the value is handed to several products as one copy for each rank, so that their gradients, terms of sums
    over the axis, are added up before one reduction."""


@dataclass(frozen=True)
class Guides:
    """All guides of a program."""

    made: Mapping[Place, Guide] = field(default_factory=dict)
    reads: Mapping[Place, tuple[Guide, ...]] = field(default_factory=dict)
    """The guides that a value goes through, one after the other, before an equation reads it."""
    pieces: Mapping[Path, tuple[int, int]] = field(default_factory=dict)
    """The products that read copies → (operand, its dim) that the axis splits."""
    terms: frozenset[Path] = frozenset()
    """The look-ups, and the equations that their results go through, that make a term for each rank of the axis."""
    fp8: frozenset[Path] = frozenset()
    """The products that are computed in fp8."""
    _around: frozenset[Path] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        paths = {*(path for path, _ in (*self.made, *self.reads)), *self.terms, *self.fp8}
        object.__setattr__(self, "_around", frozenset(p[:n] for p in paths for n in range(len(p))))

    def inside(self, path: Path) -> bool:
        """Whether an equation inside the one at ``path`` has a guide, or is computed in fp8."""
        return path in self._around


def guides(
    graph: Graph, units: Sequence[RealisedUnit], captured: Program, running: Program, *, with_copies: bool = True
) -> Guides:
    """The guides of ``running``. ``captured`` is the program that the graph was made of: the same but for the batch
    size. ``with_copies``: products may be written as products for each rank. Raises PlanError where the programs
    differ."""
    steps = dict(_aligned(captured, running))
    made: dict[Place, Guide] = {}
    reads: dict[Place, tuple[Guide, ...]] = {}
    pieces: dict[Path, tuple[int, int]] = {}
    owner = {op: unit for unit in units for op in range(unit.first_op, unit.first_op + len(unit.signatures))}
    leaving = {link.tensor: link for unit in units for link in unit.links if link.leaves}
    together = _read_together(graph, units) if with_copies else {}
    for op, unit in owner.items():
        if op not in steps:
            continue
        step, node = steps[op], graph.ops[op]
        ahead = [link for link in unit.links if not link.is_parameter]
        shared = {link.tensor: link for link in ahead if link.reader is None and not link.leaves}
        own = {link.position: link for link in ahead if link.reader == op}
        for position, tensor in enumerate(node.inputs):
            if not graph.tensors[tensor].fixed:
                continue
            chain = [own[position]] if position in own else []
            if tensor in shared:
                chain.insert(0, shared[tensor])
            source = graph.producer.get(tensor)
            if source is not None and owner[source] is not unit and tensor in leaving:
                chain.insert(0, leaving[tensor])
            found = tuple(g for link in chain if (g := _of_link(graph, unit, link)) is not None)
            piece = together.get((op, position))
            if piece is not None and found and step.path is not None and step.name == "dot_general":
                found = (*found[:-1], replace(found[-1], copies=True))
                pieces[step.path] = piece
            if found:
                reads.update((place, found) for place in _operand(step, position))
        for position, tensor in enumerate(node.outputs):
            if not graph.tensors[tensor].fixed:
                continue
            place = _result(step, position)
            (value,) = unit.operand(op, len(node.inputs) + position)
            if place is not None and not isinstance(value, Partial):
                batch = _batch_dims(graph, tensor)
                binds = node.kind not in FOLLOWING or tensor in leaving
                made.setdefault(place, Guide((tensor,), value, value, batch, binds))
    return Guides(made, reads, pieces, terms_of(graph, units, steps))


def _read_together(graph: Graph, units: Sequence[RealisedUnit]) -> dict[tuple[int, int], tuple[int, int]]:
    """The (op, operand) → (operand, dim) that is split, of the products that share an operand whose gradients they
    leave as terms of one sum."""
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for unit in units:
        summed = {
            link.tensor
            for link in unit.links
            if link.reader is None and not link.leaves and link.gradient_before != link.gradient_after
            and isinstance(link.gradient_before[0], Partial)
        }  # fmt: skip
        for tensor in summed:
            mine: dict[tuple[int, int], tuple[int, int]] = {}
            for link in unit.links:
                if link.tensor != tensor or link.reader is None or graph.ops[link.reader].kind != "contraction":
                    continue
                (signature,) = unit.signatures[link.reader - unit.first_op]
                split = [(i, p.dim) for i, p in enumerate(signature.inputs) if isinstance(p, Split)]
                as_it_is = not link.forward and not link.backward
                if as_it_is and len(split) == 1 and len(signature.inputs) == 2 and split[0][0] != link.position:
                    mine[(link.reader, link.position)] = split[0]
            if len(mine) > 1:
                found |= mine
    return found


def _of_link(graph: Graph, unit: RealisedUnit, link: Link) -> Guide | None:
    value = _wanted(link.before, link.after)
    gradient = _wanted(link.gradient_before, link.gradient_after) if link.flows else value
    if value is None and gradient is None:
        return None
    reader = -1 if link.reader is None else link.reader
    key = (link.tensor, -1 if link.leaves else unit.unit, reader, link.position)
    return Guide(key, value, gradient, _batch_dims(graph, link.tensor))


def _wanted(before: Places, after: Places) -> Placement | None:
    (now,), (then,) = before, after
    return None if now == then or isinstance(then, Partial) else then


def _batch_dims(graph: Graph, tensor: int) -> tuple[int, ...]:
    return tuple(dim for dim, slope in enumerate(graph.tensors[tensor].per_sample) if slope)


def _operand(step: Step, position: int) -> Iterator[Place]:
    """The places where the equations of a step read its operand ``position`` (literals are not counted)."""
    value = [v for v in step.inputs if v is not None][position]
    if step.path is not None:
        given = [i for i, v in enumerate(step.inputs) if v is not None]
        yield step.path, given[position]
    for member in step.members:
        if member.path is not None:
            yield from ((member.path, i) for i, v in enumerate(member.inputs) if v == value)


def _result(step: Step, position: int) -> Place | None:
    value = step.outputs[position]
    for member in step.members or (step,):
        if member.path is not None and value in member.outputs:
            return member.path, member.outputs.index(value)
    return None


def _aligned(captured: Program, running: Program) -> Iterator[tuple[int, Step]]:
    """The (op, step of the running program) of the ops that both programs hold."""
    i = j = 0
    while i < len(captured.steps) and j < len(running.steps):
        one, other = captured.steps[i], running.steps[j]
        if _name(captured, one) == _name(running, other):
            if len(one.inputs) == len(other.inputs):
                yield i, other
            i, j = i + 1, j + 1
        elif one.name in OPTIONAL:
            i += 1
        elif other.name in OPTIONAL:
            j += 1
        else:
            where = captured.calls[one.call].path or "the model"
            raise PlanError(
                f"in {where}, {one.name} with two samples is {other.name} with the microbatch of the plan: make the "
                "function run the same ops at every batch size, or plan with another microbatch"
            )


def _name(program: Program, step: Step) -> tuple[str, str]:
    return program.calls[step.call].path, step.name
