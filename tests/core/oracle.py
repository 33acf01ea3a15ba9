"""Brute force over placements: run an op on the pieces that every rank would hold and see what comes out.

Framework-free: an op is a function from arrays to arrays, run rank by rank in this process. Pieces are real values; the
terms of partial values are random, so that nothing holds by luck but with asymmetric shapes and odd numbers.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import ceil
from typing import Any

import numpy as np

from shardwright.core.layout.placements import Partial, Placement, Replicate, Split
from shardwright.core.layout.signature import IDEMPOTENT, Signature
from shardwright.core.model.graph import Graph, Op
from shardwright.core.rules.legal_signatures import divides, signatures
from tests.comparison import Comparison

Array = np.ndarray
Function = Callable[[list[Array]], list[Array]]
REDUCE = {
    "sum": lambda terms: sum(terms[1:], terms[0]),
    "mean": lambda terms: sum(terms[1:], terms[0]) / len(terms),
    "max": lambda terms: np.maximum.reduce(terms),
    "min": lambda terms: np.minimum.reduce(terms),
}
PARTIALS = tuple(Partial(op) for op in ("sum", "mean", "max", "min"))


def cut(value: Array, placement: Placement, ranks: int, seed: int = 0) -> list[Array]:
    """What every rank holds."""
    if isinstance(placement, Replicate):
        return [value] * ranks
    if isinstance(placement, Split):
        blocks = placement.blocks or (value.shape[placement.dim],)
        starts = np.cumsum(blocks)[:-1]
        pieces = [np.split(block, ranks, placement.dim) for block in np.split(value, starts, placement.dim)]
        return [np.concatenate([block[rank] for block in pieces], placement.dim) for rank in range(ranks)]
    draws = np.random.default_rng([seed, ranks])
    if placement.op in ("sum", "mean"):
        rest = [draws.standard_normal(value.shape).astype(value.dtype) for _ in range(ranks - 1)]
        whole = value * (ranks if placement.op == "mean" else 1)
        return [*rest, whole - sum(rest, np.zeros_like(value))]
    sign = -1 if placement.op == "max" else 1
    owner = draws.integers(0, ranks, value.shape)
    if value.dtype == bool:
        other = np.zeros_like(value) if placement.op == "max" else np.ones_like(value)
        return [np.where(owner == rank, value, other) for rank in range(ranks)]
    away = [sign * draws.integers(0, 4, value.shape).astype(value.dtype) for _ in range(ranks)]
    return [np.where(owner == rank, value, value + away[rank]).astype(value.dtype) for rank in range(ranks)]


def holds(pieces: Sequence[Array], whole: Array, placement: Placement) -> bool:
    """Whether pieces lying like this are the whole."""
    if isinstance(placement, Split):
        if placement.dim >= whole.ndim or whole.shape[placement.dim] % len(pieces):
            return False
        if not divides(whole.shape, [(placement, len(pieces))]):
            return False
        expected = cut(whole, placement, len(pieces))
        return all(p.shape == q.shape and _close(p, q) for p, q in zip(pieces, expected, strict=True))
    if any(p.shape != whole.shape for p in pieces):
        return False
    if isinstance(placement, Replicate):
        return all(_close(p, whole) for p in pieces)
    if whole.dtype == bool or np.issubdtype(whole.dtype, np.integer):
        if placement.op == "mean":
            return all(_close(p, whole) for p in pieces)
        if whole.dtype == bool and placement.op == "sum":
            return False
    return _close(np.asarray(REDUCE[placement.op](list(pieces))), whole)


def _close(found: Array, expected: Array) -> bool:
    near = {"relative": 2e-4, "absolute": 2e-4, "nan_is_nan": True}
    return not Comparison().values(np.asarray(found, float), np.asarray(expected, float), **near).failures()


def candidates(value: Array, ranks: int, extra: Sequence[Placement] = ()) -> list[Placement]:
    """Every placement of an operand: whole, split along each dim that divides, partial for floating values."""
    found: list[Placement] = [Replicate()]
    found += [Split(dim) for dim, size in enumerate(value.shape) if size > 1 and size % ranks == 0]
    if np.issubdtype(value.dtype, np.floating):
        found += PARTIALS
    return [*found, *(p for p in dict.fromkeys(extra) if p not in found)]


FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ZeroDivisionError)


def perturbed(operands: Sequence[Array], seed: int) -> list[Array]:
    """Other values of the same kind: signs stay, positions and truth values are shuffled within their last dim."""
    draws = np.random.default_rng(seed)
    return [
        (v * draws.uniform(0.5, 1.5, v.shape)).astype(v.dtype)
        if np.issubdtype(v.dtype, np.floating)
        else draws.permuted(v, axis=-1)
        for v in operands
    ]


def _values(operands: Sequence[Array]) -> list[list[Array]]:
    """The operands, and other values; more of them for small ops, in which more holds by luck."""
    others = 3 if sum(v.size for v in operands) < 3000 else 1
    return [list(operands), *(perturbed(operands, seed) for seed in range(others))]


def run_pieces(function: Function, held: Sequence[Sequence[Array]], outputs: int) -> list[list[Array]] | None:
    """The op on every rank: output → rank → piece. None where a rank's pieces do not fit each other."""
    results = []
    for rank in range(len(held[0])):
        try:
            with np.errstate(all="ignore"):
                results.append(function([of_rank[rank] for of_rank in held]))
        except FAILURES:
            return None
    if any(len(made) != outputs for made in results):
        return None
    return [list(of_output) for of_output in zip(*results, strict=True)]


def true_outputs(
    function: Function, operands: Sequence[Array], wholes: Sequence[Array], inputs: Sequence[Placement], ranks: int,
    asked: Sequence[Sequence[Placement]],
) -> list[set[Placement]]:  # fmt: skip
    """For every output the placements, among those asked for, that the pieces really have; none where the op cannot
    run, or an output has none. A function with ``takes_shape`` is told the shape of the piece that it should make."""
    held = [cut(v, p, ranks, seed=31 * i + 7) for i, (v, p) in enumerate(zip(operands, inputs, strict=True))]
    nothing: list[set[Placement]] = [set() for _ in wholes]
    if hasattr(function, "takes_shape"):
        for placement in asked[0]:
            shape = list(wholes[0].shape)
            if isinstance(placement, Split):
                shape[placement.dim] //= ranks

            def shaped(values: list[Array], shape: tuple[int, ...] = tuple(shape)) -> list[Array]:
                return function(values, shape)  # type: ignore[call-arg]

            pieces = run_pieces(shaped, held, 1)
            if pieces is not None and holds(pieces[0], wholes[0], placement):
                nothing[0].add(placement)
        return nothing
    pieces = run_pieces(function, held, len(wholes))
    if pieces is None:
        return nothing
    found = [
        {p for p in places if holds(of_output, whole, p)}
        for of_output, whole, places in zip(pieces, wholes, asked, strict=True)
    ]
    return found if all(found) else nothing


def compare_rules(graph: Graph, op: Op, functions: Sequence[Function], operands: Sequence[Array], ranks: int,
                  batch: int) -> tuple[list[str], list[str], int]:  # fmt: skip
    """(wrong rules, missing rules, how many input placements were run) of one op along one axis.

    A rule must hold for every function given (an op with other constants) and for other values too. Signatures that
    need an offset or a reduction inside are not run as they stand: other tests run them with it."""
    runs = [(function, values) for function in functions for values in _values(operands)]
    results = [whole_of(function, values) for function, values in runs]
    declared = [s for s in signatures(graph, op, batch) if _divide(s, [*operands, *results[0]], ranks)]
    plain = [s for s in declared if not s.need]
    offered = [candidates(value, ranks, [s.inputs[i] for s in declared]) for i, value in enumerate(operands)]
    asked = [
        list(dict.fromkeys([*candidates(whole, ranks, [s.outputs[i] for s in declared]), *PARTIALS]))
        for i, whole in enumerate(results[0])
    ]
    wrong: list[str] = []
    missing: list[str] = []
    needing = {s.inputs for s in declared if s.need}
    count = 0
    for inputs in product(*offered):
        if inputs in needing:
            continue
        count += 1
        said = [
            {placement for s in matching(plain, inputs) for placement in implied_outputs(s.outputs[i])}
            for i in range(len(asked))
        ]
        truth: list[set[Placement]] = []
        for (function, values), wholes in zip(runs, results, strict=True):
            found = true_outputs(function, values, wholes, inputs, ranks, asked)
            truth = [a & b for a, b in zip(truth, found, strict=True)] if truth else found
            if not any(truth) and not any(said):
                break
        shown = ", ".join(map(str, inputs))
        for i, whole in enumerate(results[0]):
            wrong += [f"{shown} → output {i} is {p}" for p in said[i] - truth[i]]
            missing += [f"{shown} → output {i} is {p}" for p in truth[i] - said[i] if not _trivial(p, whole)]
    return wrong, missing, count


def whole_of(function: Function, operands: Sequence[Array]) -> list[Array]:
    if hasattr(function, "takes_shape"):
        return function(list(operands), function.takes_shape)  # type: ignore[call-arg]
    return function(list(operands))


def _trivial(placement: Placement, whole: Array) -> bool:
    """Whether integer or boolean outputs make a placement mean nothing of its own: their sums hold only by zeros."""
    if not isinstance(placement, Partial):
        return False
    if placement.op == "mean":
        return not np.issubdtype(whole.dtype, np.floating)
    return False


def _divide(signature: Signature, operands: Sequence[Array], ranks: int) -> bool:
    return all(
        divides(value.shape, [(p, ranks)]) if isinstance(p, Split) else True
        for value, p in zip(operands, (*signature.inputs, *signature.outputs), strict=True)
    )


# --- two axes


def cut_twice(value: Array, places: Sequence[Placement], sizes: Sequence[int], seed: int = 0) -> list[list[Array]]:
    """What rank (i, j) of a mesh of two axes holds: split dims are cut by the first axis first."""
    outer = cut(value, places[0], sizes[0], seed)
    return [cut(piece, _local(places, value.shape, sizes), sizes[1], seed + 1 + i) for i, piece in enumerate(outer)]


def _local(places: Sequence[Placement], shape: Sequence[int], sizes: Sequence[int]) -> Placement:
    """The second axis's placement on a piece of the first: blocks shrink when the first axis cut the same dim."""
    first, second = places
    if isinstance(first, Split) and isinstance(second, Split) and first.dim == second.dim and second.blocks:
        return Split(second.dim, tuple(b // sizes[0] for b in second.blocks))
    return second


def together(pieces: Sequence[Array], placement: Placement, blocks_of: Sequence[int] = ()) -> Array | None:
    """One axis's pieces put together; None where they do not fit."""
    if isinstance(placement, Replicate):
        return pieces[0] if all(p.shape == pieces[0].shape and _close(p, pieces[0]) for p in pieces) else None
    if isinstance(placement, Partial):
        if any(p.shape != pieces[0].shape for p in pieces) or (
            pieces[0].dtype == bool and placement.op in ("sum", "mean")
        ):
            return None
        return np.asarray(REDUCE[placement.op](list(pieces)))
    if placement.dim >= pieces[0].ndim:
        return None
    parts = [
        np.split(p, np.cumsum([b // len(pieces) for b in placement.blocks])[:-1], placement.dim)
        if placement.blocks else [p]
        for p in pieces
    ]  # fmt: skip
    try:
        return np.concatenate(
            [np.concatenate([part[k] for part in parts], placement.dim) for k in range(len(parts[0]))], placement.dim
        )
    except ValueError:
        return None


def holds_twice(grid: Sequence[Sequence[Array]], whole: Array, places: Sequence[Placement],
                sizes: Sequence[int]) -> bool:  # fmt: skip
    """Whether the pieces of a two-axis mesh, lying like this, are the whole."""
    inner = _local(places, whole.shape, sizes)
    columns = [together(row, inner) for row in grid]
    if any(c is None for c in columns):
        return False
    found = together([c for c in columns if c is not None], places[0])
    return found is not None and found.shape == whole.shape and _close(found, whole)


def run_grid(
    function: Function,
    operands: Sequence[Array],
    chosen: Sequence[Sequence[Placement]],
    sizes: Sequence[int],
    whole: Array,
    wanted: Sequence[Placement],
) -> list[list[list[Array]]] | None:
    """The op on every rank of a two-axis mesh: output → first coordinate → second coordinate → piece. ``whole`` and
    ``wanted`` tell a function that takes the shape of its piece what that is."""
    shape = list(whole.shape)
    for placement, size in zip(wanted, sizes, strict=True):
        if isinstance(placement, Split):
            shape[placement.dim] //= size
    held = [
        cut_twice(v, places, sizes, seed=31 * i + 7) for i, (v, places) in enumerate(zip(operands, chosen, strict=True))
    ]
    outputs: list[list[list[Array]]] | None = None
    for i, j in product(range(sizes[0]), range(sizes[1])):
        try:
            with np.errstate(all="ignore"):
                values = [grid[i][j] for grid in held]
                made = function(values, tuple(shape)) if hasattr(function, "takes_shape") else function(values)
        except FAILURES:
            return None
        if outputs is None:
            outputs = [[[] for _ in range(sizes[0])] for _ in made]
        for output, value in zip(outputs, made, strict=True):
            output[i].append(value)
    return outputs


def splits_fit(values: Sequence[Array], places: Sequence[Sequence[Placement]], sizes: Sequence[int]) -> bool:
    return all(
        divides(value.shape, [(p, n) for p, n in zip(of_value, sizes, strict=True) if isinstance(p, Split)])
        for value, of_value in zip(values, places, strict=True)
    )


def declared_pairs(graph: Graph, op: Op, operands: Sequence[Array], wholes: Sequence[Array], sizes: Sequence[int],
                   batch: int) -> Iterator[tuple[Signature, Signature]]:  # fmt: skip
    """The pairs of plain signatures that a two-axis mesh of these sizes admits."""
    plain = [s for s in signatures(graph, op, batch) if not s.need]
    for pair in joint([plain, plain]):
        places = [list(p) for p in zip(*((*s.inputs, *s.outputs) for s in pair), strict=True)]
        if splits_fit([*operands, *wholes], places, sizes):
            yield pair[0], pair[1]


def said_twice(pairs: Sequence[tuple[Signature, Signature]], inputs: Sequence[Sequence[Placement]], output: int,
               outputs: Sequence[Placement]) -> bool:  # fmt: skip
    """Whether some declared pair gives these outputs for these inputs, by what the placements stand for."""
    return any(
        all(
            bool(matching([s], [p[axis] for p in inputs])) and outputs[axis] in implied_outputs(s.outputs[output])
            for axis, s in enumerate(pair)
        )
        for pair in pairs
    )


def random_pairs(operands: Sequence[Array], wholes: Sequence[Array], sizes: Sequence[int], count: int,
                 seed: int) -> Iterator[tuple[list[list[Placement]], list[list[Placement]]]]:  # fmt: skip
    """Seeded placements of every operand and output on both axes."""
    draws = np.random.default_rng(seed)
    made = 0
    while made < count:
        places = []
        for value in (*operands, *wholes):
            offered = [candidates(value, n) for n in sizes]
            while True:
                pick: list[Any] = [o[draws.integers(len(o))] for o in offered]
                if commute(pick) and divides(
                    value.shape, [(p, n) for p, n in zip(pick, sizes, strict=True) if isinstance(p, Split)]
                ):
                    break
            places.append(pick)
        made += 1
        yield places[: len(operands)], places[len(operands) :]


def compare_pairs(name: str, graph: Graph, op: Op, functions: Sequence[Function], operands: Sequence[Array],
                  sizes: Sequence[int], batch: int, count: int) -> tuple[list[str], int, int]:  # fmt: skip
    """(failures, declared pairs run, other placements run) of one op on a mesh of two axes."""
    function = functions[0]
    wholes = whole_of(function, operands)
    failures: list[str] = []
    pairs = list(declared_pairs(graph, op, operands, wholes, sizes, batch))
    for pair in pairs:
        chosen = [list(p) for p in zip(*(s.inputs for s in pair), strict=True)]
        results = [list(p) for p in zip(*(s.outputs for s in pair), strict=True)]
        made = run_grid(function, operands, chosen, sizes, wholes[0], results[0])
        if made is None or not all(
            holds_twice(grid, whole, places, sizes) for grid, whole, places in zip(made, wholes, results, strict=True)
        ):
            failures.append(f"{name}: {pair[0]} with {pair[1]} does not hold")
    others = 0
    for chosen, results in random_pairs(operands, wholes, sizes, count, seed=len(name)):
        others += 1
        for output, places in enumerate(results):
            if any(_trivial(p, wholes[output]) for p in places) or said_twice(pairs, chosen, output, places):
                continue
            if all(
                _really(each, given, chosen, sizes, output, places) for each in functions for given in _values(operands)
            ):
                failures.append(f"{name}: {chosen} → {places} holds and is not declared")
    return failures, len(pairs), others


def _really(function: Function, operands: Sequence[Array], chosen: Sequence[Sequence[Placement]], sizes: Sequence[int],
            output: int, places: Sequence[Placement]) -> bool:  # fmt: skip
    whole = whole_of(function, operands)[output]
    made = run_grid(function, operands, chosen, sizes, whole, places)
    return made is not None and len(made) > output and holds_twice(made[output], whole, places, sizes)


Captured = tuple[Graph, Op, list[Function], list[Array]]
"""An op, its functions over arrays (several where a rule must hold for several constants), its operands in order."""


def check_one_axis(name: str, captured: Captured, ranks: int) -> None:
    """Fails unless exactly the declared rules of an op hold along one axis."""
    wrong, missing, count = compare_rules(*captured, ranks, 2)
    assert not wrong, f"wrong rules of {name}: {wrong}"
    assert not missing, f"missing rules of {name}: {missing}"
    assert count > 1


def check_two_axes(captured: dict[str, Captured], sizes: Sequence[int], declared: int, others: int) -> None:
    """Fails unless all declared pairs of rules hold on a mesh of two axes, and none of at least ``others`` seeded
    placements that are not declared; ``declared``: at least so many pairs must have been run."""
    each = ceil(others / len(captured))
    found = [compare_pairs(name, *case, sizes, 2, each) for name, case in captured.items()]
    failures = [failure for of_case, _, _ in found for failure in of_case]
    assert not failures, failures
    assert sum(pairs for _, pairs, _ in found) > declared
    assert sum(seeded for _, _, seeded in found) >= others


# What placements mean beyond one op -----------------------------------------------------------------------------


def stands_for(given: Placement, wanted: Placement) -> bool:
    """Whether a value that lies as ``given`` already lies as ``wanted``: the same, or equal copies where an idempotent
    partial value is wanted."""
    return given == wanted or (isinstance(given, Replicate) and isinstance(wanted, Partial) and wanted.op in IDEMPOTENT)


def matching(signatures: Iterable[Signature], inputs: Sequence[Placement]) -> tuple[Signature, ...]:
    """The signatures that inputs placed like this can use as they lie."""
    return tuple(
        s for s in signatures if all(stands_for(given, wanted) for given, wanted in zip(inputs, s.inputs, strict=True))
    )


def implied_outputs(placement: Placement) -> tuple[Placement, ...]:
    """The placement, and those that it stands for."""
    if isinstance(placement, Replicate):
        return (placement, *(Partial(op) for op in IDEMPOTENT))
    return (placement,)


def commute(placements: Iterable[Placement]) -> bool:
    """Whether the partial values of one tensor along several axes may be reduced in any order: sums and means may, and
    maxima among themselves; a maximum of sums is not the sum of maxima, so a tensor never holds both."""
    ops = {p.op for p in placements if isinstance(p, Partial)}
    return ops <= {"sum", "mean"} or len(ops) == 1


def joint(per_axis: Sequence[Sequence[Signature]]) -> tuple[tuple[Signature, ...], ...]:
    """The joint signatures for all axes of a mesh, one signature for each axis: all choices whose operands hold no
    mixed partial values.

    Axes are independent otherwise: the shards of one axis compute the op again, on smaller operands. Whether dims that
    several axes split divide is for the caller to check (`core.rules.legal_signatures.divides`).
    """
    found = []
    for chosen in product(*per_axis):
        operands = zip(*((*s.inputs, *s.outputs) for s in chosen), strict=True)
        if all(commute(places) for places in operands):
            found.append(chosen)
    return tuple(found)
