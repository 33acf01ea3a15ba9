"""``torch.sagemaker.nn.attn``: torch's scaled dot-product attention, which takes a flash kernel where there is one."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.compat.nn.distributed_module import require_probability
from shardwright.core.errors import ShardwrightError

_HEADS = {"b h s d": 1, "b s h d": 2}
"""Of each layout, the dim of the heads."""


class FlashSelfAttention(nn.Module):
    """Attention of queries, keys and values with as many heads.

    Args:
        scale: what scores are multiplied by; default: 1 / √(head size).
        triton_flash_attention: takes no other kernel here, and has no dropout, as there.
        use_alibi: whether ``forward`` takes a mask, under ``triton_flash_attention``.
    """

    def __init__(
        self, attention_dropout_prob: float = 0.0, scale: float | None = None, triton_flash_attention: bool = False,
        use_alibi: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        require_probability("attention_dropout_prob", attention_dropout_prob)
        if use_alibi and not triton_flash_attention:
            raise ShardwrightError("use_alibi=True needs triton_flash_attention=True")
        if triton_flash_attention and attention_dropout_prob > 0:
            raise ShardwrightError("triton_flash_attention=True has no dropout: give attention_dropout_prob=0.0")
        self.attention_dropout_prob, self.scale, self.use_alibi = attention_dropout_prob, scale, use_alibi

    def forward(
        self, qkv: torch.Tensor | Sequence[torch.Tensor], attn_mask: torch.Tensor | None = None, causal: bool = False,
        cast_dtype: torch.dtype | None = None, layout: str = "b h s d",
    ) -> torch.Tensor:  # fmt: skip
        """The attention of ``qkv``, three tensors or one with three times the heads; ``attn_mask`` is added to the
        scores. Returns [batch, heads, sequence, head size]."""
        if attn_mask is not None and not self.use_alibi:
            raise ShardwrightError("attn_mask needs triton_flash_attention=True and use_alibi=True")
        query, key, value = _parts(qkv, 3, layout, cast_dtype)
        if attn_mask is not None and causal:
            places = torch.arange(query.shape[2], device=query.device)
            attn_mask = torch.where(places[:, None] >= places, attn_mask, torch.finfo(attn_mask.dtype).min)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=causal and attn_mask is None, scale=self.scale,
            dropout_p=self.attention_dropout_prob if self.training else 0.0,
        )  # fmt: skip


class FlashGroupedQueryAttention(nn.Module):
    """Attention of queries whose heads share keys and values in groups.

    Args:
        scale: what scores are multiplied by; default: 1 / √(head size).
    """

    def __init__(self, attention_dropout_prob: float = 0.0, scale: float | None = None) -> None:
        super().__init__()
        require_probability("attention_dropout_prob", attention_dropout_prob)
        self.attention_dropout_prob, self.scale = attention_dropout_prob, scale

    def forward(
        self, q: torch.Tensor, kv: torch.Tensor | Sequence[torch.Tensor], causal: bool = False,
        cast_dtype: torch.dtype | None = None, layout: str = "b s h d",
    ) -> torch.Tensor:  # fmt: skip
        """The attention of ``q`` to ``kv``, two tensors or one with twice the heads. Returns
        [batch, heads, sequence, head size]."""
        (query,), (key, value) = _parts((q,), 1, layout, cast_dtype), _parts(kv, 2, layout, cast_dtype)
        groups, left = divmod(query.shape[1], key.shape[1])
        if left:
            raise ShardwrightError(f"{query.shape[1]} heads of queries do not share {key.shape[1]} of keys evenly")
        return F.scaled_dot_product_attention(
            query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1), is_causal=causal,
            scale=self.scale, dropout_p=self.attention_dropout_prob if self.training else 0.0,
        )  # fmt: skip


def _parts(
    given: torch.Tensor | Sequence[torch.Tensor], number: int, layout: str, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """The parts as [batch, heads, sequence, head size]. Raises ShardwrightError for another form."""
    if layout not in _HEADS:
        raise ShardwrightError(f"layout={layout!r}: expected 'b h s d' or 'b s h d'")
    heads = _HEADS[layout]
    if isinstance(given, torch.Tensor):
        if given.dim() != 4 or given.shape[heads] % number:
            raise ShardwrightError(
                f"a tensor of shape {tuple(given.shape)} is no {number} tensors of the layout {layout!r}, side by side "
                f"along the heads"
            )
        parts = list(given.chunk(number, heads))
    else:
        parts = list(given)
    if len(parts) != number or any(part.dim() != 4 for part in parts):
        raise ShardwrightError(f"given {len(parts)} tensors: expected {number}, of the layout {layout!r}")
    laid = parts if heads == 1 else [part.transpose(1, 2) for part in parts]
    return laid if dtype is None else [part.to(dtype) for part in laid]
