"""Sums over the parameters of several meshes: first the sum of every mesh, then the sum of those.

A norm of all gradients is traced as one long sum, parameter after parameter. In that order it would go from mesh to
mesh, each waiting for the one before it; grouped, it takes one exchange, of one scalar from each. Only the order of
additions changes.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from shardwright.backends.jax.program.equations import Equation, FlatProgram, needed

ASSOCIATIVE = frozenset({"add", "add_any", "max", "min", "and", "or"})


def regrouped(flat: FlatProgram, home: Mapping[int, int | None]) -> FlatProgram:
    """The program with every sum of scalars of several meshes grouped by mesh. home: the mesh of every value; None for
    a value that any mesh may make."""
    sums = {
        total: terms for total, terms in _sums(flat).items()
        if len(terms) > len({home[term] for term in terms}) > 1
    }  # fmt: skip
    new = replace(flat, avals=list(flat.avals), equations=[])

    def add(terms: list[int], like: Equation) -> int:
        so_far = terms[0]
        for term in terms[1:]:
            made = new.new(flat.avals[like.outputs[0]])
            new.equations.append(replace(like, inputs=(so_far, term), outputs=(made,)))
            so_far = made
        return so_far

    for equation in flat.equations:
        terms = sums.get(equation.outputs[0]) if equation.outputs else None
        if terms is None:
            new.equations.append(equation)
            continue
        of_mesh: dict[int | None, list[int]] = {}
        for term in terms:
            of_mesh.setdefault(home[term], []).append(term)
        partial = [add(own, equation) for own in of_mesh.values()]
        new.equations.append(replace(equation, inputs=(add(partial[:-1], equation), partial[-1])))
    new.equations = needed(new.equations, (a for a in new.outputs if isinstance(a, int)))
    return new


def _sums(flat: FlatProgram) -> dict[int, tuple[int, ...]]:
    """The terms of every sum of scalars. A sum that is read by nothing but the next of its kind is part of that one."""
    uses = Counter(v for e in flat.equations for v in e.values)
    uses.update(atom for atom in flat.outputs if isinstance(atom, int))
    maker: dict[int, Equation] = {}
    found: dict[int, tuple[int, ...]] = {}
    for equation in flat.equations:
        values = tuple(equation.values)
        if equation.primitive.name not in ASSOCIATIVE or len(values) < 2:
            continue
        (total,) = equation.outputs
        if not all(flat.avals[v].shape == () and flat.avals[v].dtype == flat.avals[total].dtype for v in values):
            continue
        terms: tuple[int, ...] = ()
        for value in values:
            inner = uses[value] == 1 and value in found and maker[value].primitive is equation.primitive
            terms += found.pop(value) if inner else (value,)
        maker[total], found[total] = equation, terms
    return found
