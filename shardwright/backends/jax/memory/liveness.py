"""The values of a flat program that are in memory, and when, with chains of elementwise arithmetic fused and operands
laid out as XLA's CPU compiler does."""

from collections.abc import Collection
from functools import cached_property

from shardwright.backends.jax.program.equations import Equation, FlatProgram

FUSED = frozenset(
    {"abs", "add", "add_any", "and", "argmax", "argmin", "atan2", "broadcast_in_dim", "ceil", "clamp"}
    | {"convert_element_type", "copy", "cos", "div", "dynamic_slice", "eq", "erf", "exp", "exp2", "expand_dims"}
    | {"expm1", "floor", "ge", "gather", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic"}
    | {"lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "reduce_and", "reduce_max", "reduce_min"}
    | {"reduce_or", "reduce_sum", "rem", "reshape", "rev", "round", "rsqrt", "select_n", "sign", "sin", "slice"}
    | {"sqrt", "square", "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor", "mul_add"}
)
"""The primitives that XLA makes part of the loop that reads their result."""
REPEATED = frozenset({"broadcast_in_dim", "iota"})
"""The fused primitives that every reader runs again."""
SAME_MEMORY = frozenset({"reshape", "squeeze", "expand_dims", "stop_gradient", "copy"})


class Liveness:
    """The liveness of every value of a program that is in memory, from what makes it to the last that reads it."""

    def __init__(self, program: FlatProgram, in_place: Collection[int]) -> None:
        """``in_place``: values that take the memory of others."""
        self.program, self.in_place = program, in_place
        self.maker = {value: equation for equation in program.equations for value in equation.outputs}
        self.readers: dict[int, list[Equation]] = {}
        for equation in program.equations:
            for value in equation.values:
                self.readers.setdefault(value, []).append(equation)
        self.results = {atom for atom in program.outputs if isinstance(atom, int)}

    def moments(self) -> list[int]:
        """The bytes alive at every equation, and none before the first. Arguments are the caller's."""
        spans, equations = self._spans, self.program.equations
        alive = 0
        found = [alive]
        dying: dict[int, list[int]] = {}
        for value, (_, last) in spans.items():
            dying.setdefault(last, []).append(value)
        for index, equation in enumerate(equations):
            alive += sum(self.program.size_bytes(value) for value in equation.outputs if value in spans)
            found.append(alive + self._copied_bytes(equation))
            if relaid := self._relaid_bytes(equation):
                found.append(max(0, alive - sum(map(self.program.size_bytes, equation.outputs)) + relaid))
            alive -= sum(map(self.program.size_bytes, dying.get(index, ())))
        return found

    @cached_property
    def _spans(self) -> dict[int, tuple[int, int]]:
        """The values in memory: the equation that makes each, and the last that reads it."""
        made = {value: index for index, e in enumerate(self.program.equations) for value in e.outputs}
        stored = {value for value in made if self._is_stored(value)}
        last: dict[int, int] = {}
        sources: dict[int, set[int]] = {}
        for index, equation in enumerate(self.program.equations):
            read: set[int] = set()
            for value in equation.values:
                read |= {value} if value in stored else sources.get(value, set())
            for value in equation.outputs:
                sources[value] = read
            if any(value in stored for value in equation.outputs):
                last.update(dict.fromkeys(read, index))
        last.update(dict.fromkeys(self.results & stored, len(self.program.equations)))
        return {value: (made[value], last.get(value, made[value])) for value in stored}

    def _copied_bytes(self, equation: Equation) -> int:
        """The bytes of operands that are laid out anew for one product: of a convolution, and of products of many small
        matrices."""
        name = equation.primitive.name
        if name == "dot_general":
            (_, _), (batched, _) = equation.params["dimension_numbers"]
            if not batched:
                return 0
        elif name != "conv_general_dilated":
            return 0
        return sum(self.program.size_bytes(value) for value in equation.values)

    def _relaid_bytes(self, equation: Equation) -> int:
        """The bytes beside the operands of one plain product, before its result is there, where its first operand is
        read along another dim than its last. It is laid out anew, and where fused ops make it, anew from what these
        read, which is there until then. Without the gradient that the product makes, which counts as one that waits."""
        if equation.primitive.name != "dot_general" or not isinstance(equation.inputs[0], int):
            return 0
        (contracted, _), (batched, _) = equation.params["dimension_numbers"]
        operand = equation.inputs[0]
        if batched or not contracted or max(contracted) == len(self.program.avals[operand].shape) - 1:
            return 0
        found = self.program.size_bytes(operand)
        found += sum(map(self.program.size_bytes, self._read_by_fused(operand)))
        made = sum(self.program.size_bytes(value) for value in equation.outputs if self._is_gradient(value))
        return max(0, found - made)

    def _read_by_fused(self, value: int) -> set[int]:
        """The stored values from which fused ops make a value."""
        maker, found = self.maker.get(value), set[int]()
        if maker is None or maker.primitive.name not in FUSED | SAME_MEMORY | {"pad"}:
            return found
        for read in maker.values:
            found |= {read} if read in self._spans else self._read_by_fused(read)
        return found

    def _is_gradient(self, value: int) -> bool:
        """Whether a value is a gradient that waits, but for the order of its dims."""
        while value not in self.in_place:
            readers = self.readers.get(value, [])
            if len(readers) != 1 or readers[0].primitive.name not in SAME_MEMORY | {"transpose"}:
                return False
            (value,) = readers[0].outputs
        return True

    def _is_stored(self, value: int) -> bool:
        maker = self.maker[value]
        name = maker.primitive.name
        if name in SAME_MEMORY or value in self.in_place or self._is_folded(maker):
            return False
        if not (name in FUSED or self._is_outer(maker)) or value in self.results:
            return True
        readers = self.readers.get(value, [])
        if any(self._needs_memory(reader) for reader in readers):
            return name not in REPEATED
        return len(readers) > 1 and name not in REPEATED

    def _is_folded(self, equation: Equation) -> bool:
        """Whether an equation turns a matrix round for plain products alone, which read it either way."""
        if equation.primitive.name != "transpose" or len(equation.params["permutation"]) != 2:
            return False
        readers = self.readers.get(equation.outputs[0], [])
        if not readers or equation.outputs[0] in self.results:
            return False
        return all(e.primitive.name == "dot_general" and not e.params["dimension_numbers"][1][0] for e in readers)

    def _is_outer(self, equation: Equation) -> bool:
        """Whether an equation is a product that sums over one entry: XLA multiplies instead."""
        if equation.primitive.name != "dot_general" or not isinstance(equation.inputs[0], int):
            return False
        (contracted, _), _ = equation.params["dimension_numbers"]
        return all(self.program.avals[equation.inputs[0]].shape[dim] == 1 for dim in contracted)

    def _needs_memory(self, reader: Equation) -> bool:
        if reader.primitive.name in SAME_MEMORY:
            return any(self._needs_memory(after) for v in reader.outputs for after in self.readers.get(v, ()))
        return reader.primitive.name not in FUSED
