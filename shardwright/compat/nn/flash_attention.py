"""SageMaker's ``FlashAttentionLayer``: torch's scaled dot-product attention, which takes a flash kernel where there is
one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from shardwright.compat.nn.attention import attention_scale
from shardwright.compat.nn.distributed_module import DistributedModule, require_probability
from shardwright.core.errors import ShardwrightError


@dataclass(frozen=True, slots=True)
class FlashAttentionArguments:
    """The arguments of `FlashAttentionLayer`.

    Attributes:
        scale_attention_scores: whether scores are divided by the root of ``attention_head_size``.
        scale_attn_by_layer_idx: whether they are divided by ``layer_idx`` + 1 too.
        scale: what scores are multiplied by, in the place of both.
        triton_flash_attention: takes no other kernel here, and has no dropout, as there.
        use_alibi: whether ``forward`` takes a mask, under ``triton_flash_attention``.
    """

    attention_dropout_prob: float = 0.1
    attention_head_size: int | None = None
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False
    layer_idx: int | None = None
    scale: float | None = None
    triton_flash_attention: bool = False
    use_alibi: bool = False

    def __post_init__(self) -> None:
        require_probability("attention_dropout_prob", self.attention_dropout_prob)
        if self.scale is None:
            if self.scale_attention_scores and self.attention_head_size is None:
                raise ShardwrightError("scale_attention_scores=True needs attention_head_size")
            if self.scale_attn_by_layer_idx and self.layer_idx is None:
                raise ShardwrightError("scale_attn_by_layer_idx=True needs layer_idx, the number of the layer from 0")
        if self.use_alibi and not self.triton_flash_attention:
            raise ShardwrightError("use_alibi=True needs triton_flash_attention=True")
        if self.triton_flash_attention and self.attention_dropout_prob > 0:
            raise ShardwrightError("triton_flash_attention=True has no dropout: give attention_dropout_prob=0.0")


class FlashAttentionLayer(DistributedModule):
    """Attention of queries, keys and values that lie in one tensor, [N, S, 3, heads, head size].

    ``forward(qkv, attn_mask=None, causal=False)`` returns [N, heads, S, head size]. The mask is added to the scores.
    """

    Arguments = FlashAttentionArguments

    def forward(self, qkv: torch.Tensor, attn_mask: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        given: FlashAttentionArguments = self.arguments
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ShardwrightError(f"qkv has the shape {tuple(qkv.shape)}: expected [N, S, 3, heads, head size]")
        if attn_mask is not None and not given.use_alibi:
            raise ShardwrightError("attn_mask needs triton_flash_attention=True and use_alibi=True")
        if attn_mask is not None and causal:
            places = torch.arange(qkv.shape[1], device=qkv.device)
            attn_mask = torch.where(places[:, None] >= places, attn_mask, torch.finfo(attn_mask.dtype).min)
        query, key, value = (qkv.select(2, one).transpose(1, 2) for one in range(3))
        scale = given.scale
        if scale is None:
            scale = attention_scale(
                given.attention_head_size if given.scale_attention_scores else None,
                given.layer_idx if given.scale_attn_by_layer_idx else None,
            )
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=causal and attn_mask is None, scale=scale,
            dropout_p=given.attention_dropout_prob if self.training else 0.0,
        )  # fmt: skip
