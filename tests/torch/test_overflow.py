"""An overflow on one rank skips the step on all of them, and lowers the factor of losses alike."""

import json
from typing import Any

import pytest

from tests.torch.launch import on_ranks

CASES = ("dp", "pp", "tp", "shard 1", "shard 3")


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("overflow") / "seen.json"
    outcome = on_ranks("overflow.py", 2, str(out), *CASES, timeout_s=90)
    assert outcome.code == 0, outcome.text[-4000:]
    assert outcome.text.count("optimizer step 2 is skipped: gradients overflowed") == len(CASES), "said once by rank 0"
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_skip_the_step_in_which_one_overflows(seen: dict[str, list[dict[str, Any]]], case: str) -> None:
    for rank in seen[case]:
        assert rank["overflows"] == [False, True, False, False, False]
        assert rank["changed"] == [True, False, True, True, True]
        assert rank["scales"] == [256.0, 128.0, 128.0, 256.0, 256.0]
