"""A reader of loss programs: follows values forwards and says how the losses of microbatches make the loss of a batch.

Every value is a sum of terms N / (B^p · C), where N is a constant, a function of each entry's own sample, or a sum over
samples. A value that no such form holds is lost, with the op that lost it. Linear ops keep terms apart, a sum over the
batch dim turns functions of a sample into sums, and a division by a sum that gradients do not reach makes it the count.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from shardwright.core.model.loss.combination import Combination, Guard
from shardwright.core.model.loss.places import LostError, growing, lost, of_labels, of_reshape
from shardwright.core.model.loss.program import LossOp, LossProgram
from shardwright.core.model.loss.result import ResultOfBatch, place_by_shape
from shardwright.core.model.loss.values import CONSTANT, SAMPLE, Place, Term, Value, normalized, power_of
from shardwright.core.model.loss.verdict import Finding, Verdict


def read_loss(program: LossProgram, loss: int) -> Verdict:
    """The verdict on value ``loss`` of a program, which has one entry."""
    reader = _Reader(program)
    for op in program.ops:
        reader.read(op)
    try:
        return _verdict(reader.value(loss))
    except LostError as error:
        return Verdict(finding=error.finding)


def read_results(program: LossProgram, values: Sequence[int]) -> list[ResultOfBatch]:
    """What values of a program are to the samples of its batch."""
    reader, orders = _Reader(program), _OrderReader(program)
    for op in program.ops:
        reader.read(op)
        orders.read(op)
    return [_result(reader, orders, number) for number in values]


def _result(reader: "_Reader", orders: "_OrderReader", number: int) -> ResultOfBatch:
    place, finding = place_by_shape(*reader.program.shapes[number], reader.program.sizes)
    if place is None and finding is None:
        return ResultOfBatch(None, _verdict(_value(reader, number)))
    ordered = _value(orders, number)
    finding = ordered.finding or finding
    if any(term.kind == "position" for term in ordered.terms):
        finding = Finding("unknown", "it depends on the places of samples in their batch")
    if finding is None and ordered.place is not None:
        return ResultOfBatch(ordered.place, grows=True)
    return ResultOfBatch(None, Verdict(finding=finding), grows=True)


def _value(reader: "_Reader", number: int) -> Value:
    try:
        return reader.value(number)
    except LostError as error:
        return Value(finding=error.finding)


def _verdict(value: Value) -> Verdict:
    if value.finding is not None:
        return Verdict(finding=value.finding)
    kinds_of_terms = {term.kind for term in value.terms}
    if value.place is not None or "position" in kinds_of_terms:
        return Verdict(finding=Finding("unknown", "the loss depends on the places of samples in their batch"))
    if "guarded" in kinds_of_terms:
        return Verdict(finding=Finding("coupled", "the loss adds a count that was kept from zero"))
    constant = CONSTANT in value.terms
    # A constant R · B^-p is the sum of R over samples, times B^-(p + 1).
    combinations = list({
        Combination(t.power + (t.kind == "constant"), t.count) for t in value.terms if t != CONSTANT
    })  # fmt: skip
    combinations.sort(key=lambda c: (c.count is not None, c.power, 0 if c.count is None else c.count.value))
    alone = len(combinations) == 1 and not constant
    if not alone and not all(c.is_normalized for c in combinations):
        kinds = list(dict.fromkeys([*(c.reduction for c in combinations), *(["a constant"] if constant else [])]))
        return Verdict(
            finding=Finding(
                "mixed",
                f"the loss adds terms that microbatches add up to in different ways ({', '.join(kinds)}), and a "
                f"microbatch has one weight for all of them",
            )
        )
    return Verdict(tuple(combinations), constant)


class _Reader:
    def __init__(self, program: LossProgram) -> None:
        self.program = program
        self._values: dict[int, Value] = {}

    def value(self, number: int) -> Value:
        found = self._values.get(number)
        if found is None:
            found = self._values[number] = self._source(number)
        return found

    def _source(self, number: int) -> Value:
        source = self.program.sources.get(number)
        if source is None or source.kind == "fixed":
            if (
                growing(self.program, number, LossOp("fill", "something outside of the step", (), (number,)))
                is not None
            ):
                finding = Finding("unknown", "a tensor grows with the batch that comes from outside of the step")
                return Value(finding=finding)
            made = Value(number=None if source is None else source.number)
            return self._known(made) if made.number is not None else made
        if source.kind == "trained":
            return Value(gradient=True)
        found = growing(self.program, number, LossOp("fill", "the batch", (), (number,)))
        if found is None:
            return Value()
        return Value(frozenset({SAMPLE}), Place(found[0], 1, found[1]))

    def _known(self, value: Value) -> Value:
        """A constant whose number is known, as the power of the batch size that it is."""
        assert value.number is not None
        power = power_of(value.number, self.program.sizes)
        if power is None:
            return replace(value, finding=Finding("unknown", f"the loss uses {self._numbers(value.number)}"))
        return replace(value, terms=frozenset({Term("constant", -power)}))

    def _numbers(self, number: tuple[float, float]) -> str:
        small, large = self.program.sizes
        return f"a number that is {number[0]:g} at batch {small} and {number[1]:g} at batch {large}"

    def read(self, op: LossOp) -> None:
        gradient = False
        try:
            inputs = [self.value(number) for number in op.inputs]
            gradient = op.differentiable and any(value.gradient for value in inputs)
            found = next((value.finding for value in inputs if value.finding is not None), None)
            if found is not None:
                raise LostError(found)
            for number, value in zip(op.outputs, _RULES[op.how](self, op, inputs), strict=True):
                self._values[number] = replace(value, gradient=gradient)
        except LostError as error:
            for number in op.outputs:
                self._values[number] = Value(finding=error.finding, gradient=gradient)

    # Ops that move entries -----------------------------------------------------------------------------------------

    def reshape(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        (value,) = inputs
        if value.place is None:
            return [value]
        before, after = self.program.shapes[op.inputs[0]][0], self.program.shapes[op.outputs[0]][0]
        place = of_reshape(op, value.place, before, after, self.program.sizes[0])
        found = growing(self.program, op.outputs[0], op)
        if found is None or found != (place.dim, place.outer * place.inner):
            raise lost("unknown", op, "gives a shape that does not follow from the batch size")
        return [replace(value, place=place)]

    def same(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        places, _ = of_labels(op, self.program, inputs)
        number = inputs[0].number if len(places) == 1 and places[0] is None else None
        return [replace(inputs[0], place=place, number=number) for place in places]

    def concat(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        (dim,), (number,) = op.dims, op.outputs
        found = growing(self.program, number, op)
        terms = normalized(frozenset[Term]().union(*(value.terms for value in inputs)))
        along = found is not None and found[0] == dim
        if not along:
            places, _ = of_labels(op, self.program, inputs)
            return [Value(terms, places[0])]
        places_of = [value.place for value in inputs]
        if any(p is None or p.dim != dim for p in places_of):
            raise lost("unknown", op, "puts samples and other entries into one dim")
        given = [p for p in places_of if p is not None]
        if len({p.inner for p in given}) > 1:
            raise lost("unknown", op, "puts samples of different sizes into one dim")
        return [Value(terms, Place(dim, sum(p.outer for p in given), given[0].inner))]

    def cut(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        (value,), (dim,) = inputs, op.dims
        if value.place is None or value.place.dim != dim:
            if op.offsets[0] != op.offsets[1]:
                return self.unlike(op, inputs)
            places, _ = of_labels(op, self.program, inputs)
            return [replace(value, place=place, number=None) for place in places]
        place, made = value.place, []
        for position, number in enumerate(op.outputs):
            starts = [offsets[position] for offsets in op.offsets]
            found = growing(self.program, number, op)
            blocks = [start % (size * place.inner) for start, size in zip(starts, self.program.sizes, strict=True)]
            if found is None or found[0] != dim or found[1] % place.inner or any(blocks):
                raise lost("unknown", op, "takes some samples out of the batch")
            made.append(replace(value, place=replace(place, outer=found[1] // place.inner), number=None))
        return made

    def lookup(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        table, indices = inputs[0], inputs[1:]
        if not all(value.is_plain for value in inputs):
            raise lost("coupled", op, "looks entries up by what depends on several samples")
        if table.place is not None and table.place.dim in op.dims:
            index = indices[op.dims.index(table.place.dim)]
            found = growing(self.program, op.outputs[0], op)
            number = op.inputs[1 + op.dims.index(table.place.dim)]
            if (
                index.place is None
                or found is None
                or index.terms != frozenset({Term("position")})
                or _order(index.place) != _order(table.place)
                or any(v.place is not None and _order(v.place) != _order(table.place) for v in indices)
                or found[1] != table.place.outer * table.place.inner
                or prod(self.program.shapes[number][0]) != self.program.shapes[op.inputs[0]][0][table.place.dim]
            ):
                raise lost("unknown", op, "looks samples up by their places in the batch")
            return [Value(frozenset({SAMPLE}), replace(table.place, dim=found[0], free=False))]
        places, _ = of_labels(op, self.program, inputs)
        return [Value(_plain(op, inputs), place) for place in places]

    # Ops that compute ----------------------------------------------------------------------------------------------

    def map(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        places, _ = of_labels(op, self.program, inputs)
        return [Value(_plain(op, inputs), place) for place in places]

    def add(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        places, _ = of_labels(op, self.program, inputs)
        terms = frozenset[Term]().union(*(value.terms for value in inputs))
        guarded = None
        if op.number is not None and any(op.number):
            extra = self._known(Value(number=op.number))
            if extra.finding is not None:
                raise LostError(extra.finding)
            terms |= extra.terms
            if len(inputs) == 1 and op.number[0] == op.number[1]:
                guarded = inputs[0].guarded_by(Guard("add", op.number[0]), op.inputs[0]).guarded
        elif len(inputs) == 2:
            known = next((i for i in (1, 0) if inputs[i].number is not None and inputs[i].is_constant), None)
            if known is not None and (number := inputs[known].number) is not None:
                other = 1 - known
                guarded = inputs[other].guarded_by(Guard("add", number[0]), op.inputs[other]).guarded
        return [Value(normalized(terms), place, guarded=guarded) for place in places]

    def scale(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        (value,) = inputs
        places, _ = of_labels(op, self.program, inputs)
        assert op.number is not None
        power = power_of(op.number, self.program.sizes)
        if power is None:
            raise lost("unknown", op, f"uses {self._numbers(op.number)}")
        guarded = None
        if power == 0 and value.guarded is not None:
            guarded = value.guarded_by(Guard("scale", op.number[0]), op.inputs[0]).guarded
        made = value.with_terms(frozenset(replace(t, power=t.power - power) for t in value.terms))
        number = None
        if value.number is not None:
            number = (value.number[0] * op.number[0], value.number[1] * op.number[1])
        return [replace(made, place=place, guarded=guarded, number=number) for place in places]

    def at_least(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        if op.number is not None and op.number[0] != op.number[1]:
            raise lost("unknown", op, f"uses {self._numbers(op.number)}")
        if all(value.is_plain for value in inputs):
            return self.map(op, inputs)
        number, which = op.number, 0
        if len(inputs) == 2:
            which = int(inputs[0].number is not None)
            number = inputs[1 - which].number
        if number is not None and number[0] == number[1]:
            made = self._kept_from(inputs[which], op.inputs[which], number[0])
            if made is not None:
                return [made]
        raise lost("coupled", op, "is no linear function of a sum over the batch")

    def _kept_from(self, value: Value, number: int, least: float) -> Value | None:
        """A count after it is kept from below ``least``; None where the value is no count."""
        found = value.guarded_by(Guard("at_least", least), number).guarded
        if found is not None:
            return Value(frozenset({Term("guarded")}), guarded=found)
        (term,) = value.terms if len(value.terms) == 1 else (None,)
        if term is not None and term.kind == "constant" and value.number is not None and least <= min(value.number):
            return value  # the number of samples, which is above it
        return None

    def multiply(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        places, _ = of_labels(op, self.program, inputs)
        terms = inputs[0].terms
        for other in inputs[1:]:
            terms = self._products(op, terms, other.terms)
        number = None
        if len(inputs) == 2 and inputs[0].number is not None and inputs[1].number is not None:
            (a, b), (c, d) = inputs[0].number, inputs[1].number
            number = (a * c, b * d)
        return [Value(terms, place, number=number if place is None else None) for place in places]

    @staticmethod
    def _products(op: LossOp, left: frozenset[Term], right: frozenset[Term]) -> frozenset[Term]:
        found = set()
        for a in left:
            for b in right:
                kinds = {a.kind, b.kind}
                if "position" in kinds:
                    raise lost("unknown", op, "computes with the places of samples in their batch")
                if "guarded" in kinds:
                    raise lost("coupled", op, "is no linear function of a sum over the batch")
                if (a.kind == "sum" and b.kind != "constant") or (b.kind == "sum" and a.kind != "constant"):
                    raise lost("coupled", op, "multiplies a sum over the batch by what depends on samples too")
                if a.count is not None and b.count is not None:
                    raise lost("coupled", op, "divides by two sums over the batch")
                kind = a.kind if b.kind == "constant" else b.kind
                found.add(Term(kind, a.power + b.power, a.count or b.count))
        return normalized(frozenset(found))

    def divide(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        above, below = inputs
        places, _ = of_labels(op, self.program, inputs)
        number = None
        if above.number is not None and below.number is not None and all(below.number):
            number = (above.number[0] / below.number[0], above.number[1] / below.number[1])
        if below.is_plain or (len(below.terms) == 1 and next(iter(below.terms)).kind == "constant"):
            terms = frozenset(replace(t, power=-t.power) for t in below.terms)
            if any(t.count is not None for t in terms):
                raise lost("coupled", op, "divides by what was divided by a sum over the batch")
            terms = self._products(op, above.terms, terms)
            return [Value(terms, place, number=number if place is None else None) for place in places]
        if below.gradient:
            raise lost("coupled", op, "divides by a sum over the batch that depends on the parameters")
        count = below.as_count(op.inputs[1])
        if count is None or not self._one_entry(op.inputs[1]):
            raise lost("coupled", op, "divides by what is no plain count of the batch")
        if any(t.count is not None for t in above.terms):
            raise lost("coupled", op, "divides by two sums over the batch")
        return [Value(frozenset(replace(t, count=count) for t in above.terms), place) for place in places]

    def total(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        (value,) = inputs
        places, summed = of_labels(op, self.program, inputs)
        terms = value.terms
        if summed:
            terms = self._summed(op, terms)
            if op.how == "mean":
                terms = frozenset(replace(t, power=t.power + 1) for t in terms)
        number = value.number if value.place is None and op.how == "mean" else None
        guarded = value.guarded if value.place is None and self._one_entry(op.inputs[0]) else None
        return [Value(terms, place, number=number, guarded=guarded) for place in places]

    def _one_entry(self, number: int) -> bool:
        return prod(self.program.shapes[number][0]) == 1

    @staticmethod
    def _summed(op: LossOp, terms: frozenset[Term]) -> frozenset[Term]:
        """The terms after a sum over the batch dim: entries that all samples share are there B times."""
        if any(t.kind in ("position", "guarded") for t in terms):
            raise lost("unknown", op, "computes with the places of samples in their batch")
        return frozenset(replace(t, kind="sum") if t.kind == "sample" else replace(t, power=t.power - 1) for t in terms)

    def contract(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        places, summed = of_labels(op, self.program, inputs)
        terms = inputs[0].terms
        for other in inputs[1:]:
            terms = self._products(op, terms, other.terms)
        return [Value(self._summed(op, terms) if summed else terms, place) for place in places]

    def select(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        condition, first, second = inputs
        places, _ = of_labels(op, self.program, inputs)
        if not condition.is_plain:
            raise lost("coupled", op, "chooses by what depends on the batch as a whole")
        terms = self._products(op, condition.terms, first.terms) | self._products(op, condition.terms, second.terms)
        return [Value(normalized(terms), place) for place in places]

    # Ops that make values ------------------------------------------------------------------------------------------

    def fill(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        return [self._filled(op, number) for number in op.outputs]

    def _filled(self, op: LossOp, number: int) -> Value:
        found = growing(self.program, number, op)
        made = Value(place=None if found is None else Place(found[0], 1, found[1], free=True))
        if op.number is None:
            return made
        if found is not None and power_of(op.number, self.program.sizes) == 0:
            return made
        known = self._known(replace(made, number=op.number))
        return known if found is None else replace(known, number=None)

    def position(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        (number,) = op.outputs
        found = growing(self.program, number, op)
        if found is None:
            return [Value()]
        return [Value(frozenset({Term("position")}), Place(found[0], 1, found[1]))]

    def draw(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        made = []
        for number in op.outputs:
            found = growing(self.program, number, op)
            place = None if found is None else Place(found[0], 1, found[1], free=True)
            made.append(Value(frozenset({CONSTANT if place is None else SAMPLE}), place))
        return made

    def unlike(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        small, large = self.program.sizes
        raise lost("unknown", op, f"computes with a number that is another at batch {small} than at batch {large}")

    def opaque(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        grown = [growing(self.program, number, op) for number in op.outputs]
        if any(value.place is not None for value in inputs) or any(g is not None for g in grown):
            raise lost("unknown", op, "is not known to work on samples one by one")
        return [Value(_plain(op, inputs))] * len(op.outputs)

    def detach(self, op: LossOp, inputs: list[Value]) -> list[Value]:
        return [inputs[0]] * len(op.outputs)


class _OrderReader(_Reader):
    """A reader of the places of samples alone, whatever their entries are made of. What modules of the model make, and
    nothing more is known of, has an entry for each sample in their order; what the step around them makes is read."""

    def read(self, op: LossOp) -> None:
        super().read(op)
        for number in op.outputs:
            self._values[number] = self._of_order(op, number, self._values[number])

    def _of_order(self, op: LossOp, number: int, value: Value) -> Value:
        place, finding = place_by_shape(*self.program.shapes[number], self.program.sizes)
        if place is None and finding is None:
            return Value()
        statistic = any(op.role(label) == "statistic" for labels in op.labels for label in labels)
        if value.finding is not None:
            is_plain = place is not None and place.inner == 1 and (op.is_in_module or statistic)
            return Value(frozenset({SAMPLE}), place) if is_plain else value
        kinds = {term.kind for term in value.terms}
        return Value(frozenset({Term("position")} if "position" in kinds else {SAMPLE}), value.place)


def _order(place: Place) -> tuple[int, int]:
    return place.outer, place.inner


def _plain(op: LossOp, inputs: list[Value]) -> frozenset[Term]:
    """The terms of any function of its operands."""
    for value in inputs:
        for term in value.terms:
            if term.kind == "position":
                raise lost("unknown", op, "computes with the places of samples in their batch")
            if term.kind in ("sum", "guarded") or term.count is not None:
                raise lost("coupled", op, "is no linear function of a sum or a mean over the batch")
            if not term.is_plain:
                raise lost("unknown", op, "computes with the number of samples")
    return frozenset({SAMPLE if any(SAMPLE in value.terms for value in inputs) else CONSTANT})


_RULES: dict[str, Callable[[_Reader, LossOp, list[Value]], list[Value]]] = {
    "map": _Reader.map, "same": _Reader.same, "reshape": _Reader.reshape, "add": _Reader.add, "scale": _Reader.scale,
    "multiply": _Reader.multiply, "divide": _Reader.divide, "sum": _Reader.total, "mean": _Reader.total,
    "contract": _Reader.contract, "at_least": _Reader.at_least, "select": _Reader.select, "lookup": _Reader.lookup,
    "concat": _Reader.concat, "cut": _Reader.cut, "fill": _Reader.fill, "position": _Reader.position,
    "draw": _Reader.draw, "detach": _Reader.detach, "opaque": _Reader.opaque, "unlike": _Reader.unlike,
}  # fmt: skip
