"""After `shutdown` nothing of a session is held, so that a notebook can train the next model."""

import json
from pathlib import Path

from tests.torch.launch import on_ranks


def test_models_are_freed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    outcome = on_ranks("freed.py", 2, str(out), timeout_s=120)
    assert outcome.code == 0, outcome.text[-4000:]
    found = json.loads(out.read_text())
    assert len(found) == 8
    assert {form: names for form, names in found.items() if names} == {}
