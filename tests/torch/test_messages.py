"""Models whose control flow depends on values, over three ranks: exactly as the plain model trains."""

import json
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.torch.launch import on_ranks

CASES = (
    "depth:3:1:interleaved",
    "depth:3:1:simple",
    "chosen:3:1:interleaved",
    "exit:3:1:1f1b",
    "loop:3:1:interleaved",
    "nested:3:1:interleaved",
)
OVER_REPLICAS = ("depth:3:2:interleaved", "chosen:3:2:interleaved", "exit:3:2:simple", "normed:3:2:interleaved")


def check(found: dict[str, object]) -> None:
    assert found["by_messages"]
    Comparison.of_ranks(found["same"]).require("losses", "gradients", "weights")
    assert found["crossings"] > 0
    assert all(held < found["whole"] for held in found["held"]), found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    file: Path = tmp_path_factory.mktemp("messages") / "results.json"
    outcome = on_ranks("messages.py", 3, str(file), *CASES, timeout_s=200)
    assert outcome.code == 0, outcome.text[-4000:]
    said = outcome.text.count("this model runs by message passing from now on")
    assert said == len(CASES), "once for each model, on rank 0"
    return {found["case"]: found for found in json.loads(file.read_text())}


@pytest.mark.parametrize("case", CASES)
def test_training_by_messages_is_exact(results: dict[str, dict[str, object]], case: str) -> None:
    check(results[case])


@pytest.mark.slow
def test_training_by_messages_over_replicas_is_exact(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    outcome = on_ranks("messages.py", 6, str(file), *OVER_REPLICAS, timeout_s=300)
    assert outcome.code == 0, outcome.text[-4000:]
    for found in json.loads(file.read_text()):
        check(found)
