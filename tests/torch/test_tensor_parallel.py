"""Models replayed on pieces by the solver's layouts: loss and every gradient are the unsplit model's, and what goes
over the wire is what the layouts say."""

import json
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.torch.launch import on_ranks

CASES = ("least memory", "more memory", "slow links")
MODELS = {
    2: ("gpt2", "t5", "llama", "fused", "recurrence"),
    4: ("gpt2-heads4", "llama-heads4", "bert-heads4"),
}


MORE = ("bert", "albert", "vit", "ncf", "mixtral")


def run(folder: Path, processes: int, models: tuple[str, ...]) -> dict[str, dict]:
    out = folder / f"{processes}.json"
    outcome = on_ranks("tensor_parallel.py", processes, str(out), *models, timeout_s=240)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return run(tmp_path_factory.mktemp("tensor_parallel"), 2, MODELS[2])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return run(tmp_path_factory.mktemp("tensor_parallel"), 4, MODELS[4])


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return run(tmp_path_factory.mktemp("tensor_parallel"), 2, MORE)


def require_same(result: dict) -> None:
    Comparison.of_ranks(result["same"]).require("losses", "gradients")
    for way in ("forward", "backward"):
        if "select" in result["whole_ops"]:  # a write into a part of a tensor, which runs whole
            assert result["moved"][way] >= result["planned"][way]
        else:
            assert result["moved"][way] == result["planned"][way]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS[2])
def test_a_model_on_pieces_is_the_unsplit_one(two: dict[str, dict], model: str, case: str) -> None:
    require_same(two[f"{model}, {case}"])


@pytest.mark.slow
def test_a_unit_compiles_whole(tmp_path: Path) -> None:
    """By torch.compile, without a break in the graph."""
    out = tmp_path / "out.json"
    outcome = on_ranks("tensor_parallel.py", 2, str(out), "compiled", timeout_s=240)
    assert outcome.code == 0, outcome.text[-4000:]
    for result in json.loads(out.read_text()).values():
        Comparison.of_ranks(result["same"]).require("losses", "gradients")


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MORE)
def test_more_models(more: dict[str, dict], model: str, case: str) -> None:
    require_same(more[f"{model}, {case}"])
    assert more[f"{model}, {case}"]["whole_ops"] == []


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", MODELS[4])
def test_on_four_ranks(four: dict[str, dict], model: str, case: str) -> None:
    require_same(four[f"{model}, {case}"])


@pytest.mark.parametrize("model", MODELS[2])
def test_parameters_are_held_once(two: dict[str, dict], model: str) -> None:
    """Under the tightest limit nearly everything is split."""
    result = two[f"{model}, least memory"]
    assert result["held"] <= 1.15 * result["whole"] / 2


def test_a_fused_projection_is_split_block_by_block_and_nothing_is_gathered_behind_it(two: dict[str, dict]) -> None:
    result = two["gpt2, slow links"]
    assert result["split"]["transformer.h.1.attn.c_attn.weight"] == "S1[32|32|32]"
    # Each of two sublayers gathers the sequence and scatters its sum, and the other way round backward.
    assert result["calls"]["unit 2 forward"] == result["calls"]["unit 2 backward"] == 4
    assert "unit 2 inner" not in result["calls"]
    assert all(two[f"gpt2, {case}"]["in_attention"] == 0 for case in CASES)


def test_nothing_runs_whole_but_writes_in_place(two: dict[str, dict]) -> None:
    """T5 shifts its labels by writing into a new tensor; a recurrence writes its steps into one."""
    others = [result for name, result in two.items() if not name.startswith(("t5", "recurrence"))]
    assert {op for result in others for op in result["whole_ops"]} == set()
