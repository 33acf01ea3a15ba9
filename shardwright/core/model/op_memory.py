"""The memory of one op's passes as its framework's own derivative was seen to hold it."""

from dataclasses import dataclass, replace

Line = tuple[int, int]
"""Bytes as (fixed, for each sample)."""


@dataclass(frozen=True, slots=True)
class OpBytes:
    """Bytes of an op beside its operands, results and their gradients."""

    kept: Line = (0, 0)
    """What the backward reads that is neither operand nor result: indices, masks, statistics."""
    forward: Line = (0, 0)
    """The most that the forward holds for a while; below 0 where a result is in the memory of an operand."""
    backward: Line = (0, 0)
    """The same of the backward, beside what it reads, the gradients of the results and those that it makes."""


@dataclass(frozen=True, slots=True)
class OpMemory:
    """The memory of one op. Positions count the inputs of the op, then its outputs.

    Attributes:
        keeps: the operands and results that the backward reads.
        handed_on: the inputs whose gradient is in the memory of the result's gradient.
        weightless: the inputs whose gradient repeats fewer numbers, and so has next to no memory.
        unmade: the operands and results that have no memory: values between ops that stand for one call.
        wide: the bytes of a step in float32.
        narrow: those of a step in 16 bits.
        is_known: False where nothing was seen: everything is counted then, from above.
    """

    keeps: tuple[int, ...] = ()
    handed_on: tuple[int, ...] = ()
    weightless: tuple[int, ...] = ()
    unmade: tuple[int, ...] = ()
    wide: OpBytes = OpBytes()
    narrow: OpBytes = OpBytes()
    is_known: bool = True

    def of_share(self, share: float) -> "OpMemory":
        """The memory where the op does so large a share of what it did."""

        def part(of: OpBytes) -> OpBytes:
            kept, forward, backward = (
                (round(a * share), round(b * share)) for a, b in (of.kept, of.forward, of.backward)
            )
            return OpBytes(kept, forward, backward)

        return replace(self, wide=part(self.wide), narrow=part(self.narrow))

    def bytes_of(self, precision: str) -> OpBytes:
        """The bytes of steps of a precision."""
        return self.wide if precision == "fp32" else self.narrow


def at(line: Line, batch: int) -> int:
    """The bytes of ``batch`` samples."""
    return line[0] + line[1] * batch
