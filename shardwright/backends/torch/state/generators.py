"""The states of a process's random generators, as tensors: torch's own, Python's and NumPy's."""

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def generator_states() -> dict[str, torch.Tensor]:
    """The states by kind. Whole numbers of 32 bits are exact in 64-bit floats, as is the normal number that Python's
    and NumPy's keep for the next call (NaN: none)."""
    _, words, kept = random.getstate()
    found = {"torch": torch.get_rng_state(), "python": _numbers(words, kept)}
    state: Any = np.random.get_state(legacy=True)
    kind, keys, place, has_one, one = state
    if kind == "MT19937":
        found["numpy"] = _numbers((*map(int, keys), place), one if has_one else None)
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    """Go on from these states. A kind that this process does not have is left out."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "python" in states:
        *words, kept = states["python"].tolist()
        random.setstate((3, tuple(map(int, words)), None if math.isnan(kept) else kept))
    if "numpy" in states:
        *keys, place, one = states["numpy"].tolist()
        has_one = not math.isnan(one)
        numbers = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", numbers, int(place), int(has_one), one if has_one else 0.0))


def _numbers(words: Any, kept: float | None) -> torch.Tensor:
    return torch.tensor([*words, math.nan if kept is None else kept], dtype=torch.float64)
