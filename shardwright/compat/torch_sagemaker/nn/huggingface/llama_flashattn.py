"""``torch.sagemaker.nn.huggingface.llama_flashattn``, which is refused where it is used."""

from typing import Any

from shardwright.compat.torch_sagemaker.names import BY_NAME
from shardwright.core.errors import MissingCapabilityError


class LlamaFlashAttention:
    """Raises MissingCapabilityError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MissingCapabilityError(
            f"LlamaFlashAttention: {BY_NAME['nn.huggingface.llama_flashattn.LlamaFlashAttention'].says}"
        )
