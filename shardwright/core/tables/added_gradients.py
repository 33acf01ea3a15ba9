"""The memory of compiled backwards that add the gradient of each parameter to its sum as soon as it is made."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shardwright.core.partition.exact import Matrix, range_sums


def adding_bytes(beside: NDArray[np.float64], boundaries: Sequence[int], looped: Sequence[int]) -> Matrix:
    """The bytes ``[a, b]`` that the backward of a stage of units a … b-1 holds beside what is kept.

    What one unit hands to the unit before it is there while that one runs; gradients that wait for a unit further
    ahead are part of it. What the stage itself is handed came as a message.

    Args:
        beside: the bytes that each unit's backward holds, with gradients of parameters at their moments.
        boundaries: the bytes that enter each unit from before.
        looped: the bytes in which each unit's loops add gradients up, all through the stage.
    """
    units = len(beside)
    in_order = np.tri(units, dtype=bool).T
    handed_on = np.array([*boundaries[1:], 0], dtype=np.float64)
    most = np.maximum.accumulate(np.where(in_order, beside + handed_on, 0.0), axis=1)
    found: Matrix = np.zeros((units + 1, units + 1))
    found[:-1, 1:] = np.where(in_order, beside, 0.0)
    found[:-1, 2:] = np.maximum(found[:-1, 2:], most[:, :-1])
    return found + range_sums(looped)
