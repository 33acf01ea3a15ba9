"""What users can import, and with which arguments, changes on purpose alone."""

import difflib
from pathlib import Path

from tests.packaging.public_api import lines

SNAPSHOT = Path(__file__).parent / "public_api.txt"


def test_the_public_names_are_those_of_the_snapshot() -> None:
    kept, found = SNAPSHOT.read_text(encoding="utf-8").splitlines(), list(lines())
    difference = "\n".join(difflib.unified_diff(kept, found, "snapshot", "found", lineterm="", n=0))
    assert kept == found, f"{difference}\nmeant? python -m tests.packaging.public_api > {SNAPSHOT.name}"
