"""One training step of a model class on two stages of two replicas that share its state, against the plain model."""

from typing import Any

import torch

import shardwright.torch as sw
from tests.models.equality import MICROBATCHES, WAIT_S, Found, compare, first_step, made, plain_step
from tests.models.pieces import CLASSES, DTYPES

MORE = (
    "MistralForCausalLM", "Qwen2ForCausalLM", "Phi3ForCausalLM", "GemmaForCausalLM", "StableLmForCausalLM",
    "OlmoForCausalLM", "CohereForCausalLM", "GPTJForCausalLM", "GPTBigCodeForCausalLM", "CodeGenForCausalLM",
    "ElectraForMaskedLM", "CamembertForMaskedLM", "MPNetForMaskedLM", "MobileBertForMaskedLM",
    "PegasusForConditionalGeneration", "MBartForConditionalGeneration", "LEDForConditionalGeneration",
    "DeiTForImageClassification", "BeitForImageClassification",
    "GPTNeoForCausalLM", "PersimmonForCausalLM", "SqueezeBertForMaskedLM", "ConvBertForMaskedLM",
)  # fmt: skip
REFUSED = (
    # by messages, which do not shard
    "SwitchTransformersForConditionalGeneration", "Qwen3VLForConditionalGeneration",
    # layers are dropped at random, others on each replica
    "Wav2Vec2ForCTC",
)  # fmt: skip
SHARDED = tuple(name for name in (*CLASSES, *MORE) if name not in REFUSED)
"""The classes of the tensor axis, and more."""
STAGES, REPLICAS, LEVEL = 2, 2, 3


def sharded_step(name: str, ranks: int) -> Found:
    """The step of `plain_step` on this rank of four, with gradients put together from the pieces of both replicas."""
    assert ranks == STAGES * REPLICAS
    dtype = DTYPES.get(name, torch.float32)
    expected = plain_step(name, dtype)
    try:
        return _step(name, dtype, expected)
    finally:
        sw.shutdown()


def _step(name: str, dtype: torch.dtype, expected: Any) -> Found:
    def start() -> tuple[sw.DistributedModel, dict[str, Any]]:
        sw.init(
            {"pipeline_parallel_degree": STAGES, "ddp": True, "shard": LEVEL, "wait_timeout_s": WAIT_S,
             "microbatches": MICROBATCHES // REPLICAS}
        )  # fmt: skip
        plain, given = made(name, dtype)
        own = {
            key: value.chunk(REPLICAS)[sw.rdp_rank()] if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in given.items()
        }
        return sw.DistributedModel(plain), own

    model, out, asked = first_step(start)
    parts, held = model.runtime.split_model.parts, {}
    elements = sum(parameter.numel() for parameter in model.local_parameters())
    for key, parameter in sorted(model.local_named_parameters()):
        gradient = parameter.grad
        there = torch.tensor([float(gradient is not None)])
        torch.distributed.all_reduce(there, group=sw.get_rdp_process_group())
        if float(there) and parts.is_part(key):
            gradient = parts.whole(key, torch.empty(0, dtype=dtype) if gradient is None else gradient)
        held[key] = gradient
    own_losses = [float(loss) for loss in out.outputs]
    first = sw.rdp_rank() * len(own_losses)
    losses = expected.losses[:first] + own_losses + expected.losses[first + len(own_losses) :]
    same = compare(name, losses, held, model, expected)
    mode = "recorded" if model.runtime.messages is None else "messages"
    return Found(mode, same.report(), elements, asked)
