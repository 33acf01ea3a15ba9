"""The values of a flat program that are in memory, and when, as XLA's CPU compiler has it: chains of elementwise
arithmetic are fused with what reads them, results take the memory of operands that end there, and operands of products
are laid out anew."""

from collections.abc import Collection
from functools import cached_property

from shardwright.backends.jax.program.equations import Equation, FlatProgram
from shardwright.backends.jax.program.in_turn import PRODUCTS
from shardwright.backends.jax.program.random_draws import DRAW, THREEFRY

FUSED = frozenset(
    {"abs", "add", "add_any", "and", "argmax", "argmin", "atan2", "broadcast_in_dim", "ceil", "clamp"}
    | {"convert_element_type", "copy", "cos", "div", "dynamic_slice", "eq", "erf", "exp", "exp2", "expand_dims"}
    | {"expm1", "floor", "ge", "gather", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic"}
    | {"lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_and", "reduce_max", "reduce_min"}
    | {"reduce_or", "reduce_sum", "rem", "reshape", "rev", "round", "rsqrt", "select_n", "sign", "sin", "slice"}
    | {"sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor", "mul_add"}
)
"""The primitives that XLA makes part of the loop that reads their result, or that read others so."""
REDUCED = frozenset(
    {"argmax", "argmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_sum"}
)  # fmt: skip
"""Those of them whose result is in memory: readers would run the loop again for every entry."""
MOVED = REDUCED | {"transpose", "broadcast_in_dim", "gather", "slice", "dynamic_slice", "rev", "iota", "pad"}
"""Those whose results have entries in other places than their operands."""
EXPENSIVE = frozenset(
    {"atan2", "cos", "erf", "exp", "exp2", "expm1", "gather", "log", "log1p", "logistic", "pow", "rsqrt", "sin"}
    | {"sqrt", "tanh"}
)
"""The fused primitives that are not run once more for every loop that reads their result."""
REPEATED = frozenset({"broadcast_in_dim", "iota"})
"""The fused primitives that every reader runs again."""
ADDS = frozenset({"add", "add_any"})
SAME_MEMORY = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient", "copy"})
BARRIER = "optimization_barrier"


def makes_zeros(equation: Equation) -> bool:
    """Whether an equation makes an array of zeros."""
    source = equation.inputs[0] if equation.primitive.name == "broadcast_in_dim" else None
    return source is not None and not isinstance(source, int) and not source.val


class Liveness:
    """The liveness of every value of a program that is in memory, from what makes it to the last that reads it."""

    def __init__(
        self,
        program: FlatProgram,
        sums: Collection[int],
        waiting: Collection[int] = (),
        *,
        is_part: bool = False,
        ending: Collection[int] = (),
        of_shards: bool = False,
    ) -> None:
        """``sums``: results in the memory of operands, each there as soon as its terms are. ``waiting``: values whose
        memory counts elsewhere. ``is_part``: whether the rest of a longer program reads the results, which else have
        memory of their own from the beginning. ``ending``: arguments whose memory is free behind their last reader.
        ``of_shards``: whether each device runs the program on a shard of its values."""
        self.program, self.is_part, self.ending, self.of_shards = program, is_part, ending, of_shards
        self._same: dict[int, int] = {}
        """Value → the value whose memory it is, where another made it."""
        self.equations: list[tuple[Equation, tuple[int, ...], tuple[int, ...]]] = []
        """The equations that run, with the memory that they read and make."""
        for equation in program.equations:
            name, read = equation.primitive.name, tuple(self._memory(value) for value in equation.values)
            if name == BARRIER:
                pairs = zip(equation.inputs, equation.outputs, strict=True)
                self._same.update((made, self._memory(atom)) for atom, made in pairs if isinstance(atom, int))
                self.equations.append((equation, read, ()))
            elif name in SAME_MEMORY and read:
                self._same[equation.outputs[0]] = read[0]
            else:
                self.equations.append((equation, read, equation.outputs))
        self.maker = {value: (equation, read) for equation, read, made in self.equations for value in made}
        self.readers: dict[int, list[tuple[Equation, tuple[int, ...]]]] = {}
        for equation, read, made in self.equations:
            for value in dict.fromkeys(read):
                self.readers.setdefault(value, []).append((equation, made))
        self.results = {self._memory(atom) for atom in program.outputs if isinstance(atom, int)}
        self.sums = {self._memory(value) for value in sums}
        self.waiting = {self._memory(value) for value in waiting}
        self.draws: list[int] = []
        """The bytes alive at every random draw, once `moments` has run."""
        self._known: dict[int, bool] = {}
        self._read_for: dict[int, frozenset[int]] = {}

    def _may_wait(self, value: int, index: int) -> bool:
        """Whether a value that fused ops have made before an equation can be made behind it, of what is still there."""
        sources = set().union(*map(self._sources, self.maker[value][1]))
        waits = self._last_reads.get(value, -1) > index
        return waits and all(self._last_reads.get(source, index + 1) > index for source in sources)

    def _drawing_bytes(self, equation: Equation) -> int:
        """The bytes that a draw takes beside its bits: Threefry's loop has two arrays of 32 bits an entry before each
        round, and two after it."""
        if equation.primitive.name != DRAW or str(self.program.avals[next(equation.values)].dtype) != THREEFRY:
            return 0
        (made,) = equation.outputs
        return 4 * 4 * int(self.program.avals[made].size) - self.program.size_bytes(made)

    def _window_bytes(self, equation: Equation) -> int:
        """The bytes that the gradient of a maximum over windows takes beside its result: XLA's CPU compiler finds the
        place of each maximum by a 32-bit array of places for each dim, of the entries and of the windows."""
        if equation.primitive.name != "select_and_scatter_add":
            return 0
        windows, entries = (self.program.avals[value] for value in equation.values)
        count = int(windows.size)
        return 4 * int(entries.ndim) * (int(entries.size) + count) + count * int(windows.dtype.itemsize)

    def moments(self) -> list[int]:
        """The bytes alive at every equation beside the arguments, less those of arguments that have ended."""
        last, relaid, copied, early = self._last_reads, *self._laid_out, self._made_early
        dying: dict[int, list[int]] = {}
        for value, index in (*last.items(), *relaid.items()):
            dying.setdefault(index, []).append(value)
        of_results = (v for v in self.results - self.sums - self.waiting - last.keys() if v in self.maker)
        alive = sum(map(self.program.size_bytes, of_results))
        found, known = [alive], {value for values in early.values() for value in values}
        late: list[int] = []
        for index, (equation, _, made) in enumerate(self.equations):
            alive += sum(map(self.program.size_bytes, early.get(index, ())))
            new, twice = [v for v in made if v in last and v not in known], [v for v in made if v in relaid]
            behind = twice if any(map(self._is_copied_from, twice)) else []
            alive += sum(map(self.program.size_bytes, new if behind else (*new, *twice)))
            shared = self._shared_bytes(new[0], index) if len(new) == 1 and twice == behind else 0
            if equation.primitive.name in PRODUCTS:
                late = []
            elif equation.primitive.name in FUSED:
                late += [value for value in made if value in last]
            if equation.primitive.name == DRAW:
                shared += sum(self.program.size_bytes(value) for value in late if self._may_wait(value, index))
                shared -= self._drawing_bytes(equation)
            shared -= self._window_bytes(equation)
            found.append(alive - shared + sum(map(self.program.size_bytes, copied.get(index, ()))))
            if equation.primitive.name == DRAW:
                self.draws.append(found[-1])
            ended = dying.get(index, ())
            alive -= sum(self.program.size_bytes(value) for value in ended if value not in behind)
            if behind:
                alive += sum(map(self.program.size_bytes, behind))
                found.append(alive)
                alive -= sum(self.program.size_bytes(value) for value in ended if value in behind)
        return found

    def _memory(self, value: int) -> int:
        return self._same.get(value, value)

    @cached_property
    def _last_reads(self) -> dict[int, int]:
        """The values that take memory as they are made, and the last equation that reads each."""
        made = {value: index for index, (_, _, values) in enumerate(self.equations) for value in values}
        relaid, _ = self._laid_out
        apart = set() if self.is_part else self.results
        last = {value: index for value, index in made.items() if self._is_stored(value) and value not in apart}
        for value in relaid.keys() & last.keys() - self.results:
            in_order = any(self._reads_in_order(equation, value) for equation, _ in self.readers[value])
            if not in_order and not self._is_copied_from(value):
                del last[value]
        last.update(dict.fromkeys(self.ending, 0))
        for index, (equation, read, values) in enumerate(self.equations):
            is_sum = not self.sums.isdisjoint(values)
            if equation.primitive.name == BARRIER or is_sum or any(self._is_stored(value) for value in values):
                plain = [v for v in read if v not in relaid or self._reads_in_order(equation, v)]
                for source in set().union(*map(self._sources, plain)) & last.keys():
                    # A gradient is added to its sum at once, wherever the program says so.
                    last[source] = max(last[source], made[source] + 1 if is_sum and source in made else index)
        last.update(dict.fromkeys(self.results & last.keys(), len(self.equations)))
        return last

    @cached_property
    def _made_early(self) -> dict[int, list[int]]:
        """The values that a stretch between two barriers makes of what was there before, by the equation at which the
        stretch begins: the compiler may make them first, in any order."""
        found: dict[int, list[int]] = {}
        there, begin = set(self.program.arguments), 0
        fresh: list[int] = []
        for index, (equation, read, made) in enumerate(self.equations):
            if equation.primitive.name == BARRIER:
                there.update(fresh)
                fresh, begin = [], index + 1
            fresh += [value for value in made if self._is_stored(value)]
            sources = set().union(*map(self._sources, read))
            if equation.primitive.name in FUSED and sources <= there:
                found.setdefault(begin, []).extend(value for value in made if value in self._last_reads)
        return found

    @cached_property
    def _laid_out(self) -> tuple[dict[int, int], dict[int, list[int]]]:
        """The operands of products that are laid out anew: those that fused ops make, beside the operand itself, with
        the last product that reads them; and the others, by the product."""
        relaid: dict[int, int] = {}
        copied: dict[int, list[int]] = {}
        for index, (equation, _, _) in enumerate(self.equations):
            for value in map(self._memory, self._operands_in_other_order(equation)):
                maker = self.maker.get(value)
                if maker is not None and maker[0].primitive.name in FUSED | {"pad"} and self._is_stored(value):
                    relaid[value] = index
                else:
                    copied.setdefault(index, []).append(value)
        return relaid, copied

    def _reads_in_order(self, equation: Equation, value: int) -> bool:
        """Whether an equation needs a value as it is made, too: convolutions read nothing but the copy that they lay
        out anew, while what products read so may stay beside the copy."""
        is_convolution = equation.primitive.name == "conv_general_dilated"
        return not is_convolution or value not in map(self._memory, self._operands_in_other_order(equation))

    def _operands_in_other_order(self, equation: Equation) -> list[int]:
        """The operands that are read in another order than they are in memory: of a convolution, the updates of a
        scatter, the first operand of a product that is summed along another dim than its last, and operands of many
        small products whose dims do not stand as XLA wants them."""
        name = equation.primitive.name
        if name == "conv_general_dilated":
            # Images are read as they are where their dims are in this order, kernels in none.
            dims = len(equation.params["dimension_numbers"].lhs_spec)
            in_order = equation.params["dimension_numbers"].lhs_spec == (0, dims - 1, *range(1, dims - 1))
            return [atom for atom in equation.inputs[in_order:] if isinstance(atom, int)]
        if name.startswith("scatter"):
            return [atom for atom in equation.inputs[2:3] if isinstance(atom, int)]
        if name != "dot_general":
            return []
        summed, batched = equation.params["dimension_numbers"]
        found = []
        for side, atom in enumerate(equation.inputs):
            if not isinstance(atom, int):
                continue
            count, along, many = len(self.program.avals[atom].shape), list(summed[side]), list(batched[side])
            is_last = along == list(range(count - len(along), count))
            if not many:
                is_plain = side == 1 or not along or max(along) == count - 1
            else:
                is_next = side == 1 and along == list(range(len(many), len(many) + len(along)))
                is_plain = many == list(range(len(many))) and (is_last or is_next)
            found += [] if is_plain else [atom]
        return found

    def _shared_bytes(self, value: int, index: int) -> int:
        """The bytes of a result that takes the memory of an operand which ends there."""
        size = self.program.size_bytes(value)
        if self._is_turned_product(value):
            return size
        ending = (source for source in self._read_in_place(value) if self._last_reads.get(source) == index)
        return size if any(self.program.size_bytes(source) == size for source in ending) else 0

    def _sources(self, value: int) -> frozenset[int]:
        """The values in memory from which fused ops make a value; itself where it is in memory."""
        if value not in self._read_for:
            if value not in self.maker or self._is_stored(value):
                found = frozenset({value})
            elif value in self.sums | self.waiting:
                found = frozenset()
            else:
                found = frozenset().union(*map(self._sources, self.maker[value][1]))
            self._read_for[value] = found
        return self._read_for[value]

    def _read_in_place(self, value: int) -> set[int]:
        """The values in memory of which fused ops read the entry in whose place they write. XLA gives the memory of one
        on only to what reads it as it was made: in the same shape, and behind no barrier."""
        equation, _ = self.maker[value]
        if equation.primitive.name not in FUSED - MOVED:
            return set()
        found: set[int] = set()
        for source in equation.values:
            if source in self.maker:
                found |= {source} if self._is_stored(source) else self._read_in_place(source)
        return found

    def _is_stored(self, value: int) -> bool:
        if value not in self._known:
            self._known[value] = self._takes_memory(value)
        return self._known[value]

    def _takes_memory(self, value: int) -> bool:
        if value not in self.maker or value in self.sums | self.waiting:
            return False
        equation, _ = self.maker[value]
        name = equation.primitive.name
        if self._is_added_in_place(value) or self._is_folded(equation) or self._is_scattered_into_other(value):
            return False
        if value in self.results or name in REDUCED or not (name in FUSED or self._is_outer(equation)):
            return True
        if self._is_scattered_sum(value):
            return True
        readers = self.readers.get(value, [])
        if any(reader.primitive.name not in FUSED for reader, _ in readers):
            return name not in REPEATED
        # Of a backward that is a program of its own, such a choice is made again for the sum.
        is_summed = self.is_part and any(reader.primitive.name == "reduce_sum" for reader, _ in readers)
        return len(readers) > 1 and (name in EXPENSIVE or (is_summed and name == "select_n"))

    def _is_added_in_place(self, value: int) -> bool:
        """Whether a value is a scatter into zeros that nothing but its sum reads: the sum is scattered into."""
        if not self.maker[value][0].primitive.name.startswith("scatter") or value in self.results:
            return False
        readers = self.readers.get(value, [])
        return len(readers) == 1 and self.sums.issuperset(readers[0][1])

    def _is_scattered_into_other(self, value: int) -> bool:
        """Whether a value is a scatter into zeros that is added to one other value: XLA scatters into that one. A sum
        over such a scatter is one of what is scattered; but not of shards, where rows may be on other devices."""
        if self.of_shards or value not in self.maker or value in self.results:
            return False
        equation, _ = self.maker[value]
        if not equation.primitive.name.startswith("scatter"):
            return False
        start = equation.inputs[0]
        if not isinstance(start, int) or start not in self.maker or not makes_zeros(self.maker[start][0]):
            return False
        readers = self.readers.get(value, [])
        adding = [made for reader, made in readers if reader.primitive.name in ADDS]
        others = [pair for pair in readers if pair[0].primitive.name not in ADDS]
        is_one = len(adding) == 1 and self.sums.isdisjoint(adding[0])
        return is_one and all(self._is_summed(*pair) for pair in others)

    def _is_scattered_sum(self, value: int) -> bool:
        """Whether a value is the sum of such a scatter and another value: a copy of it in another order is read from
        it, and not made beside it."""
        if value not in self.maker:
            return False
        equation, read = self.maker[value]
        return equation.primitive.name in ADDS and any(map(self._is_scattered_into_other, read))

    def _is_copied_from(self, value: int) -> bool:
        """Whether a copy of a value in another order is read from it, and not made beside it of what it is made of: XLA
        computes twice only what reads at most one array as large."""
        if self._is_scattered_sum(value):
            return True
        _, read = self.maker[value]
        makers = [self.maker.get(source) for source in read]
        large = (
            self.program.size_bytes(source) >= self.program.size_bytes(value)
            for source, maker in zip(read, makers, strict=True)
            if maker is None or maker[0].primitive.name not in REPEATED
        )
        return sum(large) > 1

    def _is_summed(self, equation: Equation, made: tuple[int, ...]) -> bool:
        """Whether nothing but sums reads what an equation makes, entry by entry."""
        name = equation.primitive.name
        if name == "reduce_sum":
            return True
        readers = [pair for value in made for pair in self.readers.get(value, [])]
        is_plain = name in FUSED - MOVED and self.results.isdisjoint(made)
        return is_plain and bool(readers) and all(self._is_summed(*pair) for pair in readers)

    def _is_turned_product(self, value: int) -> bool:
        """Whether a value is a product turned round, which nothing else reads: XLA swaps the operands."""
        equation, read = self.maker[value]
        if equation.primitive.name != "transpose" or len(equation.params["permutation"]) != 2:
            return False
        maker = self.maker.get(read[0])
        is_product = maker is not None and maker[0].primitive.name == "dot_general"
        return is_product and len(self.readers[read[0]]) == 1

    def _is_folded(self, equation: Equation) -> bool:
        """Whether an equation turns a matrix round for plain products alone, which read it either way."""
        if equation.primitive.name != "transpose" or len(equation.params["permutation"]) != 2:
            return False
        (value,) = equation.outputs
        readers = [reader for reader, _ in self.readers.get(value, [])]
        if not readers or value in self.results or self._is_turned_product(value):
            return False
        return all(
            reader.primitive.name == BARRIER
            or (reader.primitive.name == "dot_general" and not reader.params["dimension_numbers"][1][0])
            for reader in readers
        )

    def _is_outer(self, equation: Equation) -> bool:
        """Whether an equation is a product that sums over one entry: XLA multiplies instead."""
        if equation.primitive.name != "dot_general" or not isinstance(equation.inputs[0], int):
            return False
        (contracted, _), _ = equation.params["dimension_numbers"]
        return all(self.program.avals[equation.inputs[0]].shape[dim] == 1 for dim in contracted)
