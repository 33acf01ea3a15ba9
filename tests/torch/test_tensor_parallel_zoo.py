"""Model classes of every kind on a tensor axis of two ranks: loss, every gradient, every buffer are the plain model's,
however much of a model can be split; what cannot says why. `benchmarks/tensor_parallel_zoo.py` prints the table."""

import json
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.models.pieces import CLASSES
from tests.torch.launch import on_ranks

FEW = {
    "XLMWithLMHeadModel": "calls",  # reads a value between its blocks
    "DetrForObjectDetection": "calls",  # reads values inside some of its blocks
    "Wav2Vec2ForCTC": "whole",  # drops layers at random, draws masks by NumPy
}
BY_CALLS = {"XLMWithLMHeadModel", "BloomForCausalLM", "ProphetNetForConditionalGeneration", "JetMoeForCausalLM",
            "SwitchTransformersForConditionalGeneration", "DetrForObjectDetection",
            "BigBirdForMaskedLM", "Qwen3VLForConditionalGeneration"}  # fmt: skip
WHOLE = {"Wav2Vec2ForCTC", "SpeechT5ForSpeechToText"}


def run(folder: Path, names: list[str], timeout_s: float) -> dict[str, list[dict]]:
    out = folder / "found.json"
    outcome = on_ranks("zoo.py", 2, "tensor", str(out), *names, timeout_s=timeout_s)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(out.read_text())


def require_same(every: list[dict], mode: str) -> None:
    assert len(every) == 2
    Comparison.of_ranks(rank["same"] for rank in every).require("losses", "gradients")
    assert {rank["mode"] for rank in every} == {mode}
    assert every[0]["split"] == every[1]["split"]
    assert (every[0]["split"] == 0.0) == (mode == "whole")
    assert every[0]["split"] > 0.95 or every[0]["reasons"], "nobody says why so much is whole"


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    return run(tmp_path_factory.mktemp("zoo"), list(FEW), 240)


@pytest.fixture(scope="module")
def all_classes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    return run(tmp_path_factory.mktemp("zoo"), list(CLASSES), 3000)


@pytest.mark.parametrize("name", FEW)
def test_a_class_on_pieces_is_the_plain_one(few: dict[str, list[dict]], name: str) -> None:
    require_same(few[name], FEW[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CLASSES)
def test_forty_classes(all_classes: dict[str, list[dict]], name: str) -> None:
    require_same(all_classes[name], "calls" if name in BY_CALLS else "whole" if name in WHOLE else "pieces")


def test_there_are_forty() -> None:
    assert len(set(CLASSES)) >= 40
