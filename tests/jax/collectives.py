"""Collectives: those of a compiled program, and those of a plan."""

import math
import re
from collections import Counter
from collections.abc import Iterable

from shardwright.core.layout.unit_layouts import RealisedUnit
from shardwright.core.model.graph import Graph

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
ITEM_BYTES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1, "f64": 8, "s64": 8, "u8": 1, "s8": 1}

_INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def of_program(text: str) -> Counter[tuple[str, int]]:
    """(kind, bytes of the whole value) of every array that a collective of compiled HLO carries; a call that carries
    several counts once for each."""
    found: Counter[tuple[str, int]] = Counter()
    for line in text.splitlines():
        if match := _INSTRUCTION.search(line):
            for dtype, dims in _ARRAY.findall(match[1]):
                size = ITEM_BYTES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
                found[(match[2], size)] += 1
    return found


def of_units(graph: Graph, units: Iterable[RealisedUnit], batch: int) -> Counter[tuple[str, int]]:
    """(kind, bytes of the whole value) of every conversion that the layouts of some units need, both ways."""
    found: Counter[tuple[str, int]] = Counter()
    for unit in units:
        for link in unit.links:
            ahead = () if link.is_parameter else link.forward
            for step in (*ahead, *link.backward):
                if step.collective:
                    found[(step.collective.replace("_", "-"), graph.tensors[link.tensor].size_bytes(batch))] += 1
    return found
