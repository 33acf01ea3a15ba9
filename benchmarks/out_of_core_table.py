"""What both frameworks' parts of `out_of_core.py` share: pins, names of plans, and the table."""

from collections.abc import Sequence
from pathlib import Path

MIB = 2**20
MEMORY_BYTES = 2**33
"""Of the device; all but the budget is reserved."""
PINS = {"pp": 1, "dp": 1, "tp": 1, "precision": "fp32", "loss_scope": "replica", "headroom": 0.0}
KEPT, RECOMPUTED, AWAY, PLANNED = "all kept", "all recomputed", "all offloaded", "planned"


def show(header: Sequence[str], rows: Sequence[Sequence[str]], write: Path | None) -> None:
    """Print a table, and add it to a file."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    print("\n".join(lines))
    if write is not None:
        with write.open("a", encoding="utf-8") as file:
            file.write("\n" + "\n".join(lines) + "\n")
