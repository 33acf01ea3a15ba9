"""``smp.nn``: SageMaker's distributed modules, as ordinary modules that the planner divides along the tensor axis.

Their parameters are whole, and have the names of the reference implementations in SageMaker's documentation:
``seq_layers.0.attention.query.weight``. They run under any plan, as other modules do.
"""

from torch.nn import LayerNorm as FusedLayerNorm

from shardwright.compat.names import refused
from shardwright.compat.nn import huggingface
from shardwright.compat.nn.attention import DistributedAttentionLayer
from shardwright.compat.nn.distributed_module import DistributedModule
from shardwright.compat.nn.flash_attention import FlashAttentionLayer
from shardwright.compat.nn.language_model import DistributedTransformerLMHead
from shardwright.compat.nn.linear_and_embedding import DistributedEmbedding, DistributedLinear
from shardwright.compat.nn.transformer import (
    DistributedTransformer,
    DistributedTransformerLayer,
    DistributedTransformerOutputLayer,
)

__all__ = [
    "DistributedAttentionLayer",
    "DistributedEmbedding",
    "DistributedLinear",
    "DistributedModule",
    "DistributedTransformer",
    "DistributedTransformerLMHead",
    "DistributedTransformerLayer",
    "DistributedTransformerOutputLayer",
    "FlashAttentionLayer",
    "FusedLayerNorm",
    "huggingface",
]


def __getattr__(name: str) -> object:
    raise refused(f"nn.{name}")
