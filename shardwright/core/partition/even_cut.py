"""The cut into stages with the least largest stage time, as far as stages are even."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from shardwright.core.partition.exact import Matrix, min_max_cut, spread_cut

EVEN_SHARE = 1.15
"""The most parameters of a pipeline rank, as a multiple of an equal share, beside one parameter that cannot be cut."""
PRICE_OF_EVENNESS = 1.25
"""The factor by which the slowest stage may take longer for an even cut."""
LEAST_SHARE = 0.5
"""The least work of a stage, as a share of an equal part of the time, unless the slowest stage then took
`PRICE_OF_EVENNESS` times as long."""


def even_cut(
    times: Sequence[Matrix],
    elements: Matrix,
    largest_parameter: int,
    ranks: int,
    fits: NDArray[np.bool_] | None,
) -> list[int] | None:
    """The first unit of every stage: least largest stage time, then least parameters; None when no cut fits.

    Of one stage on each rank, cuts that spread the parameters evenly (no rank above `EVEN_SHARE` of its share plus the
    largest parameter) come first, and before them those in which also no stage idles (`LEAST_SHARE`), unless they are
    slower by more than `PRICE_OF_EVENNESS`.

    Args:
        times: for every stage, the seconds ``[a, b]`` of units a … b-1 on its rank.
        elements: the parameter entries of such units.
        largest_parameter: the entries of the largest parameter.
        ranks: the number of ranks that share the stages.
        fits: for every stage, whether such units fit its rank's memory; None: they do.
    """
    stages, units = len(times), len(elements) - 1
    fastest = min_max_cut(times, elements, stages, fits)
    if fastest is None or stages > ranks:
        return fastest
    even_elements = EVEN_SHARE * elements[0, units] / ranks + largest_parameter
    even = np.broadcast_to(elements <= even_elements, (stages, *elements.shape))
    busy = np.stack([matrix >= LEAST_SHARE * matrix[0, units] / stages for matrix in times])
    longest = PRICE_OF_EVENNESS * _slowest(times, fastest)
    for wanted in (even & busy, busy):
        if all(wanted[stage, a, b] for stage, (a, b) in enumerate(pairwise((*fastest, units)))):
            return fastest
        cut = min_max_cut(times, elements, stages, wanted if fits is None else fits & wanted)
        if cut is not None and _slowest(times, cut) <= longest:
            return cut
    # Single units are too large, so some stage idles. The other units are spread over the other stages.
    cut = min_max_cut(times, elements, stages, even if fits is None else fits & even)
    if cut is None or (bound := _slowest(times, cut)) > longest:
        return spread_cut(times, _slowest(times, fastest), fits)
    return spread_cut(times, bound, even if fits is None else fits & even)


def _slowest(times: Sequence[Matrix], cut: Sequence[int]) -> float:
    units = len(times[0]) - 1
    return max(float(matrix[a, b]) for matrix, (a, b) in zip(times, pairwise((*cut, units)), strict=True))
