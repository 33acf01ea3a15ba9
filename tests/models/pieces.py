"""One training step of a model class on the tensor axis, against the plain model in one process."""

from dataclasses import dataclass
from typing import Any

import torch

import shardwright.torch as sw
from tests.models import inputs
from tests.models.equality import GRADIENT, MICROBATCHES, OF_ALL, Expected, made, plain_step

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
        loss: the worst relative difference.
        gradient: the worst, in units of what is allowed.
        bad: names of gradients and buffers that are off.
        split: the share of the parameters' elements that lie in pieces.
        reasons: why the rest is whole.
        mode: "pieces", "calls" (unit by unit, between whole values), "whole" (every rank runs the model) or
            "messages".
    """

    loss: float
    gradient: float
    bad: list[str]
    split: float
    reasons: list[str]
    mode: str


def tensor_step(name: str, ranks: int) -> OnPieces:
    """The step of `plain_step` on this rank, with parameters and gradients put together from the pieces of all."""
    expected = plain_step(name, DTYPES.get(name, torch.float32))
    sw.init({"tensor_parallel_degree": ranks, "microbatches": MICROBATCHES, "wait_timeout_s": 60.0})
    try:
        return _step(name, expected)
    finally:
        sw.shutdown()


def _step(name: str, expected: Expected) -> OnPieces:
    plain, given = made(name, DTYPES.get(name, torch.float32))
    model = sw.DistributedModel(plain)

    @sw.step
    def train_step(model: Any, batch: Any) -> Any:
        loss = inputs.loss_of(model, batch)
        model.backward(loss)
        return loss

    losses = [float(loss) for loss in train_step(model, given).outputs]
    runtime = model.runtime
    shards, tensor = runtime.gradients.shards, runtime.tensor
    everything = torch.stack([gradient.norm() for gradient in expected.gradients.values()]).norm()
    worst, bad, elements, in_pieces = 0.0, [], 0, 0
    for key, parameter in sorted(model.local_named_parameters()):
        is_split = shards is not None and key in shards.places
        count = parameter.numel() * (sw.tp_size() if is_split else 1)
        elements, in_pieces = elements + count, in_pieces + (count if is_split else 0)
        got, reference = parameter.grad, expected.gradients.get(key)
        if got is not None and shards is not None:
            got = shards.whole(key, got)
        if got is None or reference is None:
            if any(one is not None and bool(one.any()) for one in (got, reference)):
                bad.append(key)
            continue
        off = float((got - reference).norm() / (GRADIENT * reference.norm() + OF_ALL * everything))
        worst = max(worst, off)
        if not off <= 1.0:
            bad.append(key)
    for key, buffer in model.local_named_buffers():
        wanted = expected.buffers.get(key)
        if wanted is not None and not torch.allclose(buffer, wanted, rtol=1e-4, atol=1e-6, equal_nan=True):
            bad.append(key)
    off = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(losses, expected.losses, strict=True))
    plan = model.session.plan
    reasons = [] if plan is None else [f"{slot}: {reason}" for slot, reason in plan.unsplit]
    mode = "messages" if runtime.messages is not None else "pieces"
    if tensor is not None and tensor.by_calls_because:
        mode = "calls" if shards is not None and shards.places else "whole"
        reasons = [tensor.by_calls_because, *(f"{path}: {why}" for path, why in tensor.whole_units.items())]
    return OnPieces(off, worst, bad, in_pieces / max(elements, 1), reasons, mode)
