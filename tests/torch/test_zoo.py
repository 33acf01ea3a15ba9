"""Model classes of every kind, split over ranks, against the plain model: loss, every gradient, every buffer.

Train mode, dropout on, configurations as they are but tiny. `benchmarks/zoo.py` does this for all of `transformers`.
One or two of each kind are run with every change, the others with the slow tests.
"""

import json
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.torch.launch import on_ranks

RECORDED = (
    # two towers; a decoder and an encoder with a decoder are elsewhere and on four ranks
    "NeuMF",
    # a mixture of experts
    "MixtralForCausalLM",
    # images, several kinds of input
    "CLIPModel",
    # sound: layers dropped at random, masks drawn by NumPy
    "Wav2Vec2ForCTC",
    # attributes of units that are set between them
    "RecurrentGemmaForCausalLM",
)  # fmt: skip
MORE = (
    "GPT2LMHeadModel", "DebertaV2ForMaskedLM", "T5ForConditionalGeneration", "ConvNextForImageClassification",
    "Gemma3ForCausalLM", "MambaForCausalLM", "DetrForObjectDetection", "SpeechT5ForSpeechToText",
    "ResidualNetwork", "LlamaForCausalLM", "BertForMaskedLM", "AlbertForMaskedLM", "FunnelForMaskedLM",
    "XLMWithLMHeadModel", "ProphetNetForConditionalGeneration", "BartForConditionalGeneration",
    "DeepseekV3ForCausalLM", "JetMoeForCausalLM", "SwitchTransformersForConditionalGeneration", "JambaForCausalLM",
    "RwkvForCausalLM", "ViTForImageClassification", "SwinForImageClassification", "ResNetForImageClassification",
    "SegformerForSemanticSegmentation", "DPTForDepthEstimation", "VideoMAEForVideoClassification",
    "ViTMAEForPreTraining", "BlipForConditionalGeneration", "LayoutLMForMaskedLM", "WhisperForConditionalGeneration",
    "ASTForAudioClassification", "PatchTSTForRegression", "WavLMForSequenceClassification", "BigBirdForMaskedLM",
)  # fmt: skip
BY_MESSAGES = (
    "SuperPointForKeypointDetection", "TimesFmModelForPrediction",
    "Qwen3VLForConditionalGeneration",
)  # fmt: skip
MORE_BY_MESSAGES = ("HieraForPreTraining",)
"""What is computed, or drawn, decides how many points or patches there are; each sample is taken apart by itself; a
tensor is kept in an attribute that the next step asks for."""
ON_FOUR = ("T5ForConditionalGeneration", "MixtralForCausalLM", "CLIPModel")


Results = dict[tuple[str, int], list[dict]]


def run(folder: Path, launches: dict[int, tuple[str, ...]]) -> Results:
    found = {}
    for ranks, classes in launches.items():
        out = folder / f"{ranks}.json"
        outcome = on_ranks("zoo.py", ranks, "pipeline", str(out), *classes, timeout_s=400)
        assert outcome.code == 0, outcome.text[-4000:]
        found |= {(name, ranks): result for name, result in json.loads(out.read_text()).items()}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("zoo"), {2: (*RECORDED, *BY_MESSAGES), 4: ON_FOUR[:1]})


@pytest.fixture(scope="module")
def more_results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(tmp_path_factory.mktemp("zoo"), {2: (*MORE, *MORE_BY_MESSAGES), 4: ON_FOUR[1:]})


def require_plain(every: list[dict], name: str, ranks: int) -> None:
    assert len(every) == ranks
    Comparison.of_ranks(rank["same"] for rank in every).require("losses", "gradients")
    assert {rank["mode"] for rank in every} == {"messages" if name in (*BY_MESSAGES, *MORE_BY_MESSAGES) else "recorded"}
    assert all(rank["elements"] for rank in every), "a rank holds nothing"


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in (*RECORDED, *BY_MESSAGES)), (ON_FOUR[0], 4)])
def test_a_split_class_is_the_plain_one(results: Results, name: str, ranks: int) -> None:
    require_plain(results[name, ranks], name, ranks)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in (*MORE, *MORE_BY_MESSAGES)), *((name, 4) for name in ON_FOUR[1:])]
)
def test_other_classes(more_results: Results, name: str, ranks: int) -> None:
    require_plain(more_results[name, ranks], name, ranks)
