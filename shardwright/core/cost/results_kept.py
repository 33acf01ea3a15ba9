"""What a unit keeps, and what it computes again, where results of its products are kept op by op."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.core.values.recompute_modes import kept_modules, kind_of


@dataclass(frozen=True, slots=True)
class KeptResult:
    """The result of one product or attention."""

    module: str
    """The path of the module that makes it, inside of the unit."""
    is_plain: bool
    """Whether it is a matrix product, and not attention."""
    size_bytes: int
    again_s: float
    """Seconds that making it again takes."""


@dataclass(frozen=True, slots=True)
class ByOp:
    """The results of one microbatch of a unit, and what is beside them."""

    beside_bytes: int
    """The bytes that are kept beside results: what enters the unit, and statistics."""
    beside_s: float
    """Seconds to compute all but products again."""
    results: tuple[KeptResult, ...]
    unfused_bytes: int = 0
    """The bytes that are kept beside the results of attention where it is no kernel of its own."""

    def saved_bytes(self, mode: str, most: int) -> int:
        """The bytes that are kept under a mode that goes by op, ``most`` of which the unit saves at all."""
        kept = [each for each, stays in self._kept(mode) if stays]
        unfused = self.unfused_bytes if any(not each.is_plain for each in kept) else 0
        return min(self.beside_bytes + sum(each.size_bytes for each in kept) + unfused, most)

    def again_s(self, mode: str) -> float:
        """Seconds that computing the rest again adds to the backward."""
        return self.beside_s + sum(each.again_s for each, stays in self._kept(mode) if not stays)

    def scaled(self, factor: float) -> "ByOp":
        """The same where all takes ``factor`` times as long."""
        results = tuple(replace(each, again_s=each.again_s * factor) for each in self.results)
        return replace(self, beside_s=self.beside_s * factor, results=results)

    def _kept(self, mode: str) -> Iterator[tuple[KeptResult, bool]]:
        """Each result, and whether it is kept."""
        kind, modules, plain = kind_of(mode), kept_modules(mode), 0
        for each in self.results:
            if kind == "elementwise":
                yield each, True
            elif kind == "alternate":
                yield each, not each.is_plain or plain % 2 == 0
            else:
                yield each, each.module in modules
            plain += each.is_plain


NOTHING = ByOp(0, 0.0, ())
