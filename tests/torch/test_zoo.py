"""Model classes of every kind, split over ranks, against the plain model: loss, every gradient, every buffer.

Train mode, dropout on, configurations as they are but tiny. `benchmarks/zoo.py` does this for all of `transformers`.
"""

import json
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.torch.launch import torchrun

RECORDED = (
    "NeuMF", "ResidualNetwork",
    # decoders, encoders, both
    "GPT2LMHeadModel", "LlamaForCausalLM", "Gemma3ForCausalLM", "BertForMaskedLM", "DebertaV2ForMaskedLM",
    "AlbertForMaskedLM", "FunnelForMaskedLM", "XLMWithLMHeadModel", "ProphetNetForConditionalGeneration",
    "T5ForConditionalGeneration", "BartForConditionalGeneration",
    # mixtures of experts, state spaces, both
    "MixtralForCausalLM", "DeepseekV3ForCausalLM", "JetMoeForCausalLM", "SwitchTransformersForConditionalGeneration",
    "MambaForCausalLM", "JambaForCausalLM", "RwkvForCausalLM",
    # images, video, depth, detection, masks
    "ViTForImageClassification", "SwinForImageClassification", "ConvNextForImageClassification",
    "ResNetForImageClassification", "SegformerForSemanticSegmentation", "DPTForDepthEstimation",
    "DetrForObjectDetection", "VideoMAEForVideoClassification", "ViTMAEForPreTraining",
    # several kinds of input
    "CLIPModel", "BlipForConditionalGeneration", "LayoutLMForMaskedLM",
    # sound and series
    "WhisperForConditionalGeneration", "ASTForAudioClassification", "PatchTSTForRegression",
    # layers dropped at random, masks and blocks drawn by NumPy
    "SpeechT5ForSpeechToText", "Wav2Vec2ForCTC", "WavLMForSequenceClassification", "BigBirdForMaskedLM",
    # attributes of units that are set between them
    "RecurrentGemmaForCausalLM",
)  # fmt: skip
BY_MESSAGES = (
    "HieraForPreTraining", "SuperPointForKeypointDetection", "TimesFmModelForPrediction",
    "Qwen3VLForConditionalGeneration",
)  # fmt: skip
"""What is drawn, or computed, decides how many patches or points there are; each sample is taken apart by itself; a
tensor is kept in an attribute that the next step asks for."""
ON_FOUR = ("T5ForConditionalGeneration", "MixtralForCausalLM", "CLIPModel")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[dict]]:
    folder: Path = tmp_path_factory.mktemp("zoo")
    found = {}
    for ranks, classes in ((2, (*RECORDED, *BY_MESSAGES)), (4, ON_FOUR)):
        out = folder / f"{ranks}.json"
        outcome = torchrun("zoo.py", ranks, "pipeline", str(out), *classes, timeout_s=400)
        assert outcome.code == 0, outcome.text[-4000:]
        found |= {(name, ranks): result for name, result in json.loads(out.read_text()).items()}
    return found


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in (*RECORDED, *BY_MESSAGES)), *((name, 4) for name in ON_FOUR)]
)
def test_a_split_class_is_the_plain_one(results: dict[tuple[str, int], list[dict]], name: str, ranks: int) -> None:
    every = results[name, ranks]
    assert len(every) == ranks
    Comparison.of_ranks(rank["same"] for rank in every).require("losses", "gradients")
    assert {rank["mode"] for rank in every} == {"messages" if name in BY_MESSAGES else "recorded"}
    assert all(rank["elements"] for rank in every), "a rank holds nothing"
