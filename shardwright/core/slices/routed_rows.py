"""Rows of tokens that a mixture of experts puts in the order of their experts, and back.

Rows of tokens are sorted by the expert of each, multiplied by the matrix of their expert, and put back where they came
from, or added up there. Between, a row lies at a place that follows from all tokens, and its values from its own token
alone. So the same ops on the rows of a slice make the same of them, as long as nothing reads the order for anything
else: how many rows an expert has, a number drawn for a place, rows of two orders together.

What ops compute with (divisors, bounds of a histogram) is taken at its word here; a runtime looks at it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.core.model.graph import Graph, Op

Says = Literal["row", "token", "place", "count", "border", "nothing"]
"""What the numbers of a tensor say: for a place in the order, which row lies there, or of which token; for a row, the
place where it lies; for an expert, how many rows it has, or where they end; nothing that may be used."""
SAME = frozenset({"to", "_to_copy", "clone", "contiguous", "convert_element_type", "copy", "stop_gradient", "detach"})
RESHAPES = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze",
                      "_reshape_alias", "expand_dims"})  # fmt: skip
COUNTS = frozenset({"histc", "bincount"})
LOOKS_UP = frozenset({"index", "index_select", "_unsafe_index"})
PUTS = frozenset({"index_put", "_index_put_impl", "_unsafe_index_put", "index_copy"})
DIVIDES = frozenset({"floor_divide", "div"})
CHOICES = frozenset({"topk", "sort", "max", "min"})
"""Ops whose second result is numbers from 0 on."""
EQUAL = frozenset({"zeros", "empty", "zeros_like", "empty_like", "new_zeros", "new_empty"})
"""Ops that make a tensor that is alike everywhere, or not read before it is written."""
WIDE = frozenset({"int32", "int64", "float32", "float64"})
OTHERWISE = "puts tokens in another order, in a way that is not known to follow from each token alone"


@dataclass(frozen=True, slots=True)
class Routed:
    """What a runtime has to look at, of the ops that put rows in the order of their experts.

    Attributes:
        order: tensor → the order in which its rows lie, by the tensor that says which row lies where.
        sorts, counts, puts: the ops that sort rows, count those of every expert, and put rows somewhere.
        divisors: op that makes tokens of rows → the number it has to divide by.
        places: the ops that number places from 0 on; they run with slices, of their length.
        borders: tensor → the experts of rows that lie between its borders.
        grouped: product of rows with the matrices of their experts → those experts.
        apart: tensors that cannot be put together from slices.
    """

    order: Mapping[int, int] = field(default_factory=dict)
    sorts: frozenset[int] = frozenset()
    counts: frozenset[int] = frozenset()
    puts: frozenset[int] = frozenset()
    divisors: Mapping[int, int] = field(default_factory=dict)
    places: frozenset[int] = frozenset()
    borders: Mapping[int, int] = field(default_factory=dict)
    grouped: Mapping[int, int] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()


class RoutedRows:
    """The rules of these ops.

    Args:
        dims: tensor → its sequence dim.
        flat: tensor whose dim is batch, sequence and perhaps more in one → its rows for each token.
        tokens: of the sequence.
    """

    def __init__(self, graph: Graph, dims: dict[int, int], flat: dict[int, int], tokens: int) -> None:
        self.graph, self.dims, self.flat, self.tokens = graph, dims, flat, tokens
        self.order: dict[int, int] = {}
        self.made_with_slices: set[int] = set()
        """The ops that make what is written or read here alone, such as the numbers of places."""
        self._says: dict[int, tuple[Says, int]] = {}
        """Tensor → what it says, and of which order, or of which experts."""
        self._experts: dict[int, int] = {}
        """Order → the experts by which it sorts."""
        self._same: dict[int, int] = {}
        """Tensor → the tensor of whose values it has the same in another order."""
        self._sorts, self._counts, self._puts, self._places = (set[int]() for _ in range(4))
        self._divisors: dict[int, int] = {}
        self._grouped: dict[int, int] = {}
        self._users: dict[int, list[Op]] = {}
        for op in graph.ops:
            for tensor in set(op.inputs):
                self._users.setdefault(tensor, []).append(op)

    @property
    def found(self) -> Routed:
        borders = {t: experts for t, (says, experts) in self._says.items() if says == "border"}
        return Routed(
            self.order, frozenset(self._sorts), frozenset(self._counts), frozenset(self._puts), self._divisors,
            frozenset(self._places), borders, self._grouped, self.apart,
        )  # fmt: skip

    @property
    def numbers(self) -> frozenset[int]:
        """The tensors whose numbers name rows, places or experts."""
        return frozenset(self._says)

    @property
    def apart(self) -> frozenset[int]:
        """The tensors that mean something in their slice alone."""
        return frozenset(self._says.keys() | self.order.keys())

    def read(self, number: int, op: Op) -> str | None:
        """Note what an op does with rows: '' where it is known, a reason where it cannot run in slices, and None where
        it is left to the op's labels."""
        said = [tensor for tensor in op.inputs if tensor in self._says]
        if said and all(self._says[t][0] in ("count", "border") for t in said):
            return self._of_experts(op)
        if op.kind == "sort" and len(op.inputs) == 1 and self._is_row_of_numbers(op.inputs[0]):
            return self._sort(number, op)
        if op.base_name in COUNTS and len(op.inputs) == 1 and not said and self._is_row_of_numbers(op.inputs[0]):
            if not self._is_for_borders(op.outputs[0]):
                return "needs how many tokens go to each expert"
            self._counts.add(number)
            self._says[op.outputs[0]] = "count", self._root(op.inputs[0])
            return ""
        if op.base_name == "repeat_interleave" and len(op.inputs) == 1 and op.inputs[0] in self.flat:
            return OTHERWISE if said or op.inputs[0] in self.order else self._repeat(op)
        if said:
            return self._by_order(number, op)
        if not self.order.keys() & set(op.inputs):
            return None
        if op.base_name == "_grouped_mm" and op.inputs[0] in self.order and op.inputs[1] not in self.dims:
            self._grouped[number] = self._experts[self.order[op.inputs[0]]]
            return self._rows(op.outputs[0], self.order[op.inputs[0]], is_in_order=True)
        return self._in_order(op)

    def follow(self, op: Op) -> None:
        """Note in which order the rows lie that an op makes by its labels."""
        orders = {self.order[t] for t in op.inputs if t in self.order}
        for order in orders:
            self.order.update(dict.fromkeys((t for t in op.outputs if t in self.dims), order))

    # -- the ops ---------------------------------------------------------------------------------------------------

    def _in_order(self, op: Op) -> str | None:
        """An op on rows in the order of experts, which has to be one on each row."""
        among = [t for t in op.inputs if t in self.dims]
        if len({self.order.get(t) for t in among}) > 1:
            return "brings tokens together with tokens in another order"
        if op.kind == "dropout":
            return "draws random numbers for tokens in the order of their experts"
        along = {
            labels[self.dims[t]] for t, labels in zip(op.inputs, op.input_labels, strict=True) if t in self.dims
        }  # fmt: skip
        for tensor, labels in zip(op.inputs, op.input_labels, strict=True):
            if tensor not in self.dims and along.intersection(label for label in labels if label >= 0):
                return "takes a constant along tokens in the order of their experts"
        return None

    def _sort(self, number: int, op: Op) -> str:
        (given,), made = op.inputs, op.outputs
        said = self._says.get(given)
        if said is not None:
            if said[0] != "row":
                return OTHERWISE
            self._sorts.add(number)
            for tensor in made:
                self._rows(tensor, said[1], is_in_order=False)
                self._says[tensor] = "nothing", said[1]
            self._says[made[-1]] = "place", said[1]
            return ""
        if given in self.order:
            return OTHERWISE
        if not self._is_choice(given):
            return "sorts the tokens by what is not known to be numbers from 0 on, as topk gives them"
        self._sorts.add(number)
        order = made[-1]
        self.flat[order] = self.flat[given]
        self._experts[order] = self._root(given)
        for tensor in made:
            self._rows(tensor, order, is_in_order=True)
        self._says[order] = "row", order
        if len(made) > 1:
            self._same[made[0]] = self._root(given)
        return ""

    def _repeat(self, op: Op) -> str | None:
        (given,), (made,) = op.inputs, op.outputs
        one, two = self.graph.tensors[given], self.graph.tensors[made]
        dim = self.dims[given]
        times, rest = divmod(two.per_sample[dim], one.per_sample[dim]) if len(one.fixed) == len(two.fixed) else (0, 1)
        others = [d for d in range(len(one.fixed)) if d != dim]
        if rest or two.fixed[dim] or [one.fixed[d] for d in others] != [two.fixed[d] for d in others]:
            return None
        self.dims[made], self.flat[made] = dim, self.flat[given] * times
        return ""

    def _of_experts(self, op: Op) -> str:
        """An op on how many rows every expert has."""
        (given,) = op.inputs if len(op.inputs) == 1 else (-1,)
        says, experts = self._says.get(given, ("nothing", -1))
        if op.base_name == "cumsum" and says == "count":
            self._says[op.outputs[0]] = "border", experts
        elif says != "nothing" and (op.base_name in SAME or op.base_name in RESHAPES):
            self._says[op.outputs[0]] = says, experts
        else:
            return "needs how many tokens go to each expert"
        return ""

    def _by_order(self, number: int, op: Op) -> str:
        """An op that reads which rows lie where."""
        name, inputs = op.base_name, op.inputs
        at = next(position for position, tensor in enumerate(inputs) if tensor in self._says)
        says, order = self._says[inputs[at]]
        is_only = sum(tensor in self._says for tensor in inputs) == 1
        if is_only and len(inputs) == 1 and name in SAME and says != "nothing":
            self._rows(op.outputs[0], order, is_in_order=inputs[0] in self.order)
            self._says[op.outputs[0]] = says, order
            return ""
        if is_only and len(inputs) == 1 and name in DIVIDES and says == "row":
            self._rows(op.outputs[0], order, is_in_order=True)
            self._says[op.outputs[0]] = "token", order
            return ""
        if is_only and at == 1 and len(inputs) == 2 and name in LOOKS_UP:
            return self._look_up(op, says, order)
        if is_only and at == 1 and len(inputs) == 3 and name in (*PUTS, "index_add"):
            return self._put(number, op, says, order)
        return OTHERWISE

    def _look_up(self, op: Op, says: Says, order: int) -> str:
        source, index = op.inputs
        labels = op.input_labels[0]
        is_along = self.dims.get(source) == 0 and source in self.flat and op.role(labels[0]) == "index"
        if not is_along or len(self.graph.tensors[index].fixed) != 1:
            return OTHERWISE
        if says == "place" and self.order.get(source) == order:
            return self._rows(op.outputs[0], order, is_in_order=False)
        if source in self.order or says not in ("row", "token") or not self._divides(index, says, order, source):
            return OTHERWISE
        return self._rows(op.outputs[0], order, is_in_order=True)

    def _put(self, number: int, op: Op, says: Says, order: int) -> str:
        """A write of rows, or of the numbers of places, where the rows came from."""
        target, index, values = op.inputs
        tensors = self.graph.tensors
        if len(tensors[index].fixed) != 1 or not self._is_made_for(target, EQUAL) or not tensors[target].fixed:
            return OTHERWISE
        rows, rest = divmod(tensors[target].per_sample[0], self.tokens)
        if rest or not rows or tensors[target].fixed[0]:
            return OTHERWISE
        first, *others = op.output_labels[0]
        if op.base_name == "index_add" and (first >= 0 or min(others, default=0) < 0):
            return OTHERWISE  # along another dim than the first
        puts_places = self._is_made_for(values, {"arange"}) and values not in self.dims
        if op.base_name == "index_add":
            if self.order.get(values) != order or says not in ("row", "token"):
                return OTHERWISE
            if not self._divides(index, says, order, None, rows):
                return OTHERWISE
        elif says != "row" or rows != self.flat[order]:
            return OTHERWISE
        elif puts_places:
            if [(tensors[t].fixed, tensors[t].per_sample) for t in (values, target)].count(
                ((0,), (rows * self.tokens,))
            ) < 2:
                return OTHERWISE
            self._make_with_slices(values, rows)
            self._places.add(self.graph.producer[values])
        elif self.order.get(values) != order or self.dims.get(values) != 0 or values in self._says:
            return OTHERWISE
        self._make_with_slices(target, rows)
        self._puts.add(number)
        made = op.outputs[0]
        self.dims[made], self.flat[made] = 0, rows
        if op.base_name != "index_add" and puts_places:
            self._says[made] = "place", order
        return ""

    # -- what they ask ---------------------------------------------------------------------------------------------

    def _rows(self, tensor: int, order: int, *, is_in_order: bool) -> str:
        """Note that a tensor has the rows of an order, in that order or in their own."""
        self.dims[tensor], self.flat[tensor] = 0, self.flat[order]
        if is_in_order:
            self.order[tensor] = order
        return ""

    def _divides(self, index: int, says: Says, order: int, source: int | None, rows: int = 0) -> bool:
        """Whether an index names the rows of a tensor that has ``rows`` for each token; notes by what it has to have
        been divided."""
        number, rest = divmod(self.flat[order], rows if source is None else self.flat[source])
        if rest:
            return False
        if says == "row":
            return number == 1
        while self.graph.ops[self.graph.producer[index]].base_name not in DIVIDES:
            index = self.graph.ops[self.graph.producer[index]].inputs[0]
        return self._divisors.setdefault(self.graph.producer[index], number) == number

    def _is_for_borders(self, counts: int) -> bool:
        """Whether counts are added up to borders of rows, and nothing else reads them."""
        users = self._users.get(counts, [])
        return (
            bool(users)
            and counts not in self.graph.outputs
            and all(
                op.base_name == "cumsum"
                or ((op.base_name in SAME or op.base_name in RESHAPES) and self._is_for_borders(op.outputs[0]))
                for op in users
            )
        )

    def _is_row_of_numbers(self, tensor: int) -> bool:
        return tensor in self.flat and self.dims.get(tensor) == 0 and len(self.graph.tensors[tensor].fixed) == 1

    def _is_choice(self, tensor: int) -> bool:
        """Whether a tensor is numbers from 0 on: the places of the largest, or of the smallest."""
        root = self._root(tensor)
        maker = self.graph.producer.get(root)
        if maker is None:
            return False
        op = self.graph.ops[maker]
        if op.kind == "concat":
            return all(map(self._is_choice, op.inputs))
        return op.base_name in ("argmax", "argmin", "argsort") or (
            op.base_name in CHOICES and (len(op.inputs), len(op.outputs)) == (1, 2) and root == op.outputs[1]
        )

    def _root(self, tensor: int) -> int:
        """The tensor whose values these are, in another shape, order or type."""
        while True:
            maker = self.graph.producer.get(tensor)
            if tensor in self._same:
                tensor = self._same[tensor]
            elif (
                maker is not None
                and len(self.graph.ops[maker].inputs) == 1
                and (self.graph.ops[maker].base_name in SAME or self.graph.ops[maker].base_name in RESHAPES)
                and self.graph.tensors[tensor].dtype in WIDE
            ):
                tensor = self.graph.ops[maker].inputs[0]
            else:
                return tensor

    def _is_made_for(self, tensor: int, names: set[str] | frozenset[str]) -> bool:
        """Whether an op of these names makes a tensor, which one op alone reads."""
        maker = self.graph.producer.get(tensor)
        return (
            maker is not None
            and self.graph.ops[maker].kind == "create"
            and self.graph.ops[maker].base_name in names
            and len(self._users.get(tensor, ())) == 1
            and tensor not in self.graph.outputs
        )

    def _make_with_slices(self, tensor: int, rows: int) -> None:
        self.made_with_slices.add(self.graph.producer[tensor])
        self.dims[tensor], self.flat[tensor] = 0, rows
