"""Loss, every gradient, the norm and the final weights equal those of the unsplit model, over 20 steps of AdamW."""

import json
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.torch.launch import on_ranks

PROCESSES = {
    2: (
        "gpt2:2:1:1f1b", "gpt2:1:2:1f1b", "gpt2:2:1:interleaved-1f1b:2", "t5:2:1:1f1b", "llama:2:1:gpipe",
        "albert:2:1:1f1b", "mixtral:2:1:1f1b",
    ),
    4: ("gpt2:2:2:1f1b",),
}  # fmt: skip
SLOW = {
    2: ("gpt2:2:1:interleaved", "bert:2:1:1f1b", "t5:2:1:1f1b", "llama:2:1:gpipe"),
    4: ("gpt2:4:1:1f1b",),
}
"""Over all of the steps."""


def run(folder: Path, launches: dict[int, tuple[str, ...]], *options: str) -> dict[str, dict]:
    found = {}
    for processes, cases in launches.items():
        out = folder / f"{processes}.json"
        outcome = on_ranks("equality.py", processes, *options, str(out), *cases, timeout_s=200)
        assert outcome.code == 0, outcome.text[-4000:]
        found |= {result["case"]: result for result in json.loads(out.read_text())}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return run(tmp_path_factory.mktemp("equality"), PROCESSES)


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return run(tmp_path_factory.mktemp("equality"), SLOW, "--all")


def require_same(result: dict) -> None:
    Comparison.of_ranks(result["same"]).require("losses", "gradients", "norms", "weights")
    assert result["same_order"]


def require_shares(result: dict) -> None:
    assert max(result["held"]) <= 1.15 * result["whole"] * result["share"]
    assert result["share"] < 1
    assert sum(result["held"]) >= result["whole"]


@pytest.mark.parametrize("case", [case for cases in PROCESSES.values() for case in cases])
def test_a_split_run_is_the_unsplit_run(results: dict[str, dict], case: str) -> None:
    require_same(results[case])


@pytest.mark.parametrize("case", ["gpt2:2:1:1f1b", "gpt2:2:2:1f1b", "llama:2:1:gpipe"])
def test_no_rank_holds_more_than_its_share(results: dict[str, dict], case: str) -> None:
    require_shares(results[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for cases in SLOW.values() for case in cases])
def test_other_runs_are_the_unsplit_run(slow_results: dict[str, dict], case: str) -> None:
    require_same(slow_results[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2:4:1:1f1b", "bert:2:1:1f1b"])
def test_no_rank_of_other_runs_holds_more_than_its_share(slow_results: dict[str, dict], case: str) -> None:
    require_shares(slow_results[case])
