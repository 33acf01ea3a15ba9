"""Tensor layouts on the ``tp`` axis, found per class of unit: which groups of dims to split.

For every unit class the splittable groups of dims are enumerated, alone and together, and the set with the best score
is kept: products shrink by the degree, partial sums are all-reduced in the forward pass, partial gradients in
the backward pass. Megatron's column/row pairs (arXiv 1909.08053, section 3) come out of this, they are not put in.
Parameters that units share (a tied embedding) are decided together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from shardwright.core.cost.work import UnitWork, WorkCounter
from shardwright.core.fold import Folded, Unit
from shardwright.core.layout import Layout, Split
from shardwright.core.rules.axes import Dim, DimGroup, dim_groups
from shardwright.core.structure import Slot, unit_slots

MAX_JOINT_GROUPS = 10
"""Above this many splittable groups in one unit they are added one by one, best first, instead of in all subsets."""

Score = Callable[[UnitWork, int], float]
"""What a candidate costs, from the work of one sample and the parameter entries that one rank holds: less is better."""


@dataclass(frozen=True, slots=True)
class UnitSplit:
    """What is split in one unit."""

    dims: frozenset[Dim] = frozenset()
    slots: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    """(role, slot dim, blocks) of every parameter that is split."""
    unsplit: tuple[tuple[str, str], ...] = ()
    """(role, reason) of every matrix that is not."""

    def layout(self, role: str) -> Layout:
        """The layout of a slot, in slot dims."""
        for name, dim, blocks in self.slots:
            if name == role:
                return Layout.of(tp=Split(dim, blocks))
        return Layout()

    def layouts(self) -> dict[str, Layout]:
        return {role: self.layout(role) for role, _, _ in self.slots}


def choose_splits(
    folded: Folded, counter: WorkCounter, degree: int, score: Score, precision: str
) -> dict[int, UnitSplit]:
    """The split of every fold class for a tensor axis of ``degree`` ranks."""
    representatives = [folded.units[members[0]] for members in folded.classes]
    if degree == 1:
        return {unit.fold_class: UnitSplit() for unit in representatives}
    candidates = {
        unit.fold_class: _Candidates(folded, counter, unit, degree, score, precision) for unit in representatives
    }
    chosen = {c: candidate.best({}) for c, candidate in candidates.items()}
    for users in _shared_parameters(representatives):
        chosen.update(_agree(users, candidates, chosen))
    return {c: candidates[c].split(groups) for c, groups in chosen.items()}


def _shared_parameters(units: list[Unit]) -> list[tuple[int, tuple[int, ...]]]:
    """(parameter, fold classes that use it) for those used by more than one class."""
    users: dict[int, list[int]] = {}
    for unit in units:
        for parameter in unit.parameters:
            users.setdefault(parameter, []).append(unit.fold_class)
    return [(p, tuple(classes)) for p, classes in users.items() if len(classes) > 1]


def _agree(
    shared: tuple[int, tuple[int, ...]], candidates: "dict[int, _Candidates]", chosen: dict[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    """One placement for a parameter that several classes use: the one that costs least over all of them."""
    parameter, classes = shared
    options = {candidates[c].placement(chosen[c], parameter) for c in classes} | {None}
    best: tuple[float, dict[int, tuple[int, ...]]] | None = None
    for option in sorted(options, key=repr):
        picks = {c: candidates[c].best({parameter: option}) for c in classes}
        if any(candidates[c].placement(picks[c], parameter) != option for c in classes):
            continue
        total = sum(candidates[c].cost(picks[c]) for c in classes)
        if best is None or total < best[0] - 1e-15:
            best = (total, picks)
    return best[1] if best else {c: candidates[c].best({parameter: None}) for c in classes}


class _Candidates:
    """The sets of groups that one unit can split, and what each costs."""

    def __init__(
        self, folded: Folded, counter: WorkCounter, unit: Unit, degree: int, score: Score, precision: str
    ) -> None:
        graph = folded.graph
        self._slots = unit_slots(graph, unit)
        self._tensor = {slot.role: graph.parameters[slot.parameter].tensor for slot in self._slots}
        self._sizes = {t: graph.tensors[t].elements(1) for t in self._tensor.values()}
        self._groups = dim_groups(graph, unit)
        self._degree = degree
        self._legal = [i for i, g in enumerate(self._groups) if not g.obstacle and g.divisor % degree == 0]
        self._unit, self._counter, self._score, self._precision = unit, counter, score, precision
        self._costs: dict[tuple[int, ...], float] = {}

    def cost(self, groups: tuple[int, ...]) -> float:
        if groups not in self._costs:
            dims = self._dims(groups)
            work = self._counter.count(self._unit, 1, self._precision, dims, self._degree)
            split = {tensor for tensor, _ in dims}
            held = sum(size // (self._degree if t in split else 1) for t, size in self._sizes.items())
            self._costs[groups] = self._score(work, held)
        return self._costs[groups]

    def best(self, pinned: dict[int, tuple[int, tuple[int, ...]] | None]) -> tuple[int, ...]:
        """The cheapest compatible set of groups in which the pinned parameters are placed as given."""
        usable = self._legal
        if len(usable) <= MAX_JOINT_GROUPS:
            sets = [s for n in range(len(usable) + 1) for s in combinations(usable, n) if self._compatible(s)]
        else:
            sets = self._grown(usable)
        allowed = [s for s in sets if all(self.placement(s, p) == place for p, place in pinned.items())]
        return min(allowed, key=lambda s: (self.cost(s), len(s), s), default=())

    def _grown(self, usable: list[int]) -> list[tuple[int, ...]]:
        sets: list[tuple[int, ...]] = [()]
        while True:
            wider = [(*sets[-1], g) for g in usable if g not in sets[-1] and self._compatible((*sets[-1], g))]
            if not wider:
                return sets
            sets.append(min(wider, key=self.cost))

    def _compatible(self, groups: tuple[int, ...]) -> bool:
        """No tensor is split along two dims."""
        tensors = [tensor for g in groups for tensor, _ in self._groups[g].dims]
        return len(tensors) == len(set(tensors))

    def _dims(self, groups: tuple[int, ...]) -> frozenset[Dim]:
        return frozenset(dim for g in groups for dim in self._groups[g].dims)

    def placement(self, groups: tuple[int, ...], parameter: int) -> tuple[int, tuple[int, ...]] | None:
        """(the parameter's own dim, blocks) along which it is split, or None. Units may use one parameter in different
        ways, an embedding and its transpose, so slot dims do not tell."""
        for slot in self._slots:
            if slot.parameter == parameter and (place := self._slot_placement(groups, slot)) is not None:
                return slot.dims[place[0]], place[1]
        return None

    def _slot_placement(self, groups: tuple[int, ...], slot: Slot) -> tuple[int, tuple[int, ...]] | None:
        for g in groups:
            for tensor, dim in self._groups[g].dims:
                if tensor == self._tensor[slot.role] and dim in slot.dims:
                    return slot.dims.index(dim), self._groups[g].blocks_of((tensor, dim))
        return None

    def split(self, groups: tuple[int, ...]) -> UnitSplit:
        places = {slot.role: self._slot_placement(groups, slot) for slot in self._slots}
        slots = tuple((role, *place) for role, place in places.items() if place is not None)
        unsplit = tuple(
            (slot.role, self._reason(slot)) for slot in self._slots if len(slot.shape) > 1 and places[slot.role] is None
        )
        return UnitSplit(self._dims(groups), slots, unsplit)

    def _reason(self, slot: Slot) -> str:
        tensor = self._tensor[slot.role]
        reasons = [self._why_not(g) for g in self._groups if any(t == tensor for t, _ in g.dims)]
        return "; ".join(dict.fromkeys(reasons))

    def _why_not(self, group: DimGroup) -> str:
        if group.obstacle:
            return group.obstacle
        if group.divisor % self._degree:
            return f"{self._degree} does not divide {group.divisor}"
        return "splitting it costs more than it saves"
