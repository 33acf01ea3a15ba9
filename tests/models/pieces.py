"""One training step of a model class on the tensor axis, against the plain model in one process."""

from dataclasses import dataclass
from typing import Any

import torch

import shardwright.torch as sw
from tests.models.equality import (
    MICROBATCHES,
    Expected,
    compare,
    first_step,
    made,
    plain_step,
)

CLASSES = (
    # decoders
    "GPT2LMHeadModel", "LlamaForCausalLM", "Gemma3ForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
    "GPTNeoXForCausalLM", "FalconForCausalLM",
    # encoders
    "BertForMaskedLM", "RobertaForMaskedLM", "DebertaV2ForMaskedLM", "AlbertForMaskedLM", "FunnelForMaskedLM",
    "XLMWithLMHeadModel", "DistilBertForMaskedLM", "XLNetLMHeadModel", "LayoutLMForMaskedLM", "BigBirdForMaskedLM",
    # both
    "T5ForConditionalGeneration", "BartForConditionalGeneration", "ProphetNetForConditionalGeneration",
    # mixtures of experts, state spaces, recurrences
    "MixtralForCausalLM", "DeepseekV3ForCausalLM", "JetMoeForCausalLM", "SwitchTransformersForConditionalGeneration",
    "MambaForCausalLM", "JambaForCausalLM", "RwkvForCausalLM",
    # images, video, depth, detection, masks
    "ViTForImageClassification", "SwinForImageClassification", "ConvNextForImageClassification",
    "ResNetForImageClassification", "SegformerForSemanticSegmentation", "DPTForDepthEstimation",
    "DetrForObjectDetection", "VideoMAEForVideoClassification", "ViTMAEForPreTraining",
    # several kinds of input
    "CLIPModel", "BlipForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    # sound and series
    "WhisperForConditionalGeneration", "ASTForAudioClassification", "PatchTSTForRegression", "Wav2Vec2ForCTC",
    "SpeechT5ForSpeechToText",
)  # fmt: skip
DTYPES = {"ResNetForImageClassification": torch.float64}
"""Batch norms over two values, as its last ones are here, turn rounding into differences that are no errors."""


@dataclass(frozen=True, slots=True)
class OnPieces:
    """What one rank of the tensor axis found.

    Attributes:
        same: the report of its `Comparison`.
        split: the share of the parameters' elements that lie in pieces.
        reasons: why the rest is whole.
        mode: "pieces", "calls" (unit by unit, between whole values), "whole" (every rank runs the model) or
            "messages".
    """

    same: dict[str, Any]
    split: float
    reasons: list[str]
    mode: str


def tensor_step(name: str, ranks: int) -> OnPieces:
    """The step of `plain_step` on this rank, with parameters and gradients put together from the pieces of all."""
    expected = plain_step(name, DTYPES.get(name, torch.float32))
    try:
        return _step(name, ranks, expected)
    finally:
        sw.shutdown()


def _step(name: str, ranks: int, expected: Expected) -> OnPieces:
    def start() -> tuple[sw.DistributedModel, dict[str, Any]]:
        sw.init({"tensor_parallel_degree": ranks, "microbatches": MICROBATCHES, "wait_timeout_s": 60.0})
        plain, given = made(name, DTYPES.get(name, torch.float32))
        return sw.DistributedModel(plain), given

    model, out, _ = first_step(start)
    losses = [float(loss) for loss in out.outputs]
    runtime = model.runtime
    shards, tensor = runtime.split_model.parts.tensor, runtime.tensor
    elements, in_pieces, held = 0, 0, {}
    for key, parameter in sorted(model.local_named_parameters()):
        is_split = shards is not None and key in shards.places
        count = parameter.numel() * (sw.tp_size() if is_split else 1)
        elements, in_pieces = elements + count, in_pieces + (count if is_split else 0)
        has_pieces = shards is not None and parameter.grad is not None
        held[key] = shards.whole(key, parameter.grad) if has_pieces else parameter.grad
    same = compare(name, losses, held, model, expected)
    plan = model.session.plan
    reasons = [] if plan is None else [f"{slot}: {reason}" for slot, reason in plan.unsplit]
    mode = "messages" if runtime.messages is not None else "pieces"
    if tensor is not None and tensor.by_calls_because:
        mode = "calls" if shards is not None and shards.places else "whole"
        reasons = [tensor.by_calls_because, *(f"{path}: {why}" for path, why in tensor.whole_units.items())]
    return OnPieces(same.report(), in_pieces / max(elements, 1), reasons, mode)
