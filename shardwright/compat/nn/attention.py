"""SageMaker's ``DistributedAttentionLayer``: attention, with its residual connection and layer norms."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.compat.nn.distributed_module import (
    DistributedModule,
    require_probability,
    require_size,
    tensors_in,
)
from shardwright.compat.nn.positions import RotaryPairs, linear_biases, rotated
from shardwright.core.errors import ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariants:
    """Forms of attention that models have and SageMaker's pages do not name as arguments of these modules.

    Attributes:
        attention_bias: whether the projections have a bias.
        dense_bias: whether the one after the attention has; None: as the others.
        fused_qkv: whether one linear layer gives queries, keys and values, head by head: q, k and v of the first head,
            then of the second.
        rotary_dim: how many channels of each head are turned by their position; None: none.
        rotary_base: the base of their wave lengths.
        rotary_pairs: which channels are turned together.
        scale_attention_scores: whether scores are divided by the root of the head's size.
        scale_attn_by_layer_idx: whether they are divided by the number of the layer too, counted from 1.
    """

    attention_bias: bool = True
    dense_bias: bool | None = None
    fused_qkv: bool = False
    rotary_dim: int | None = None
    rotary_base: float = 10000.0
    rotary_pairs: RotaryPairs = "adjacent"
    scale_attention_scores: bool = True
    scale_attn_by_layer_idx: bool = False


@dataclass(frozen=True, slots=True)
class AttentionArguments(AttentionVariants):
    """The arguments of `DistributedAttentionLayer`; see `TransformerArguments`.

    Attributes:
        cross_attention: whether keys and values are those of the ``cross_states`` that it is given.
        layer_idx: the number of the layer, from 0, of ``scale_attn_by_layer_idx``.
        attention_window: how many tokens each one sees, itself and those before it, under ``causal_mask_size``; None:
            all before it.
        add_residual: whether what it is given is added to what it gives.
    """

    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    cross_attention: bool = False
    causal_mask_size: int | None = None
    pre_layernorm: bool = False
    post_layernorm: bool = True
    use_alibi: bool = False
    alibi_bias_max: int = 8
    layer_idx: int | None = None
    attention_window: int | None = None
    add_residual: bool = True

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "attention_head_size", "hidden_size", "alibi_bias_max"):
            require_size(name, getattr(self, name))
        require_probability("attention_dropout_prob", self.attention_dropout_prob)
        require_probability("hidden_dropout_prob", self.hidden_dropout_prob)
        require_layer_norms(self.pre_layernorm, self.post_layernorm, self.add_residual)
        if self.causal_mask_size is not None:
            require_size("causal_mask_size", self.causal_mask_size)
        if self.attention_window is not None:
            require_size("attention_window", self.attention_window)
            if self.causal_mask_size is None:
                raise ShardwrightError("attention_window needs causal_mask_size: it is of tokens before each one")
        if self.scale_attn_by_layer_idx and self.layer_idx is None:
            raise ShardwrightError("scale_attn_by_layer_idx=True needs layer_idx, the number of the layer from 0")
        if self.rotary_pairs not in ("adjacent", "halves"):
            raise ShardwrightError(f"rotary_pairs={self.rotary_pairs!r}: expected 'adjacent' or 'halves'")
        if self.rotary_dim is not None:
            require_size("rotary_dim", self.rotary_dim, 2)
            if self.rotary_dim % 2 or self.rotary_dim > self.attention_head_size:
                raise ShardwrightError(
                    f"rotary_dim={self.rotary_dim}: expected an even number of at most attention_head_size="
                    f"{self.attention_head_size}"
                )
        if self.cross_attention and (self.fused_qkv or self.rotary_dim is not None):
            given = "fused_qkv" if self.fused_qkv else "rotary_dim"
            raise ShardwrightError(f"cross_attention=True has no {given}: leave it out")


def require_layer_norms(before: bool, after: bool, has_residual: bool) -> None:
    """Raise ShardwrightError for a layer that has a residual connection and no layer norm."""
    if has_residual and not (before or after):
        raise ShardwrightError("pre_layernorm=False and post_layernorm=False: at least one of them must be True")


class DistributedAttentionLayer(DistributedModule):
    """Attention over heads, a projection, dropout, the residual connection, and layer norms before or after.

    ``forward`` takes one tuple: (hidden_states [N, S, H], attention_mask), or under ``cross_attention`` (hidden_states,
    cross_states [N, S2, H], attention_mask). The mask is added to the scores, and broadcast to [N, heads, S, S2];
    None: nothing is masked. Under ``rotary_dim`` the tuple may end with position_ids [N or 1, S]; else tokens are
    counted from 0. It returns one tensor of the shape of ``hidden_states``.
    """

    Arguments = AttentionArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given: AttentionArguments = self.arguments
        inner = given.num_attention_heads * given.attention_head_size
        if given.fused_qkv:
            self.query_key_value = nn.Linear(given.hidden_size, 3 * inner, bias=given.attention_bias)
        else:
            self.query = nn.Linear(given.hidden_size, inner, bias=given.attention_bias)
            self.key = nn.Linear(given.hidden_size, inner, bias=given.attention_bias)
            self.value = nn.Linear(given.hidden_size, inner, bias=given.attention_bias)
        self.dense = nn.Linear(
            inner, given.hidden_size, bias=given.attention_bias if given.dense_bias is None else given.dense_bias
        )
        self.dropout2 = nn.Dropout(given.hidden_dropout_prob)
        if given.pre_layernorm:
            self.pre_layernorm = nn.LayerNorm(given.hidden_size, eps=given.layernorm_epsilon)
        if given.post_layernorm:
            self.layernorm = nn.LayerNorm(given.hidden_size, eps=given.layernorm_epsilon)
        initialize(self, given)

    def forward(self, inputs: Any) -> torch.Tensor:
        given: AttentionArguments = self.arguments
        name = type(self).__name__
        if given.cross_attention:
            hidden, cross, mask = tensors_in(name, inputs, ("hidden_states", "cross_states", "attention_mask"))
            positions = None
        else:
            names = ("hidden_states", "attention_mask", "position_ids")
            hidden, mask, positions = tensors_in(name, inputs, names, optional=1)
            cross = None
        assert hidden is not None
        states = self.pre_layernorm(hidden) if given.pre_layernorm else hidden
        query, key, value = self._projected(states, states if cross is None else cross)
        if given.rotary_dim is not None:
            query, key = self._rotated(query, key, positions)
        context = self._attended(query, key, value, mask)
        output = self.dropout2(self.dense(context.transpose(1, 2).flatten(2)))
        if given.add_residual:
            output = output + hidden
        found: torch.Tensor = self.layernorm(output) if given.post_layernorm else output
        return found

    def _projected(self, states: torch.Tensor, cross: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each [N, heads, S, head size]."""
        size = self.arguments.attention_head_size
        if self.arguments.fused_qkv:
            fused = self.query_key_value(states).unflatten(-1, (-1, 3 * size)).transpose(1, 2)
            return tuple(fused.chunk(3, dim=-1))
        each = (self.query(states), self.key(cross), self.value(cross))
        return tuple(one.unflatten(-1, (-1, size)).transpose(1, 2) for one in each)

    def _rotated(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        given: AttentionArguments = self.arguments
        assert given.rotary_dim is not None
        if positions is None:
            positions = torch.arange(query.shape[-2], device=query.device)[None]
        how: dict[str, Any] = {"dim": given.rotary_dim, "base": given.rotary_base, "pairs": given.rotary_pairs}
        return rotated(query, positions, **how), rotated(key, positions, **how)

    def _attended(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        given: AttentionArguments = self.arguments
        longest = None if given.cross_attention else given.causal_mask_size
        is_causal = longest is not None
        length = key.shape[-2]
        if longest is not None and length > longest:
            raise ShardwrightError(
                f"a sequence of {length} tokens is longer than causal_mask_size={longest}: give a larger "
                f"causal_mask_size"
            )
        if given.use_alibi and not given.cross_attention:
            biases = linear_biases(given.num_attention_heads, length, given.alibi_bias_max, query)
            mask = biases if mask is None else mask + biases
        window = given.attention_window if is_causal else None
        if is_causal and (mask is not None or window is not None):
            places = torch.arange(length, device=query.device)
            before = places[:, None] - places
            is_seen = before >= 0 if window is None else (before >= 0) & (before < window)
            none = torch.zeros((), dtype=query.dtype, device=query.device)
            mask = torch.where(is_seen, none if mask is None else mask, torch.finfo(query.dtype).min)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=given.attention_dropout_prob if self.training else 0.0,
            is_causal=is_causal and mask is None,
            scale=attention_scale(
                given.attention_head_size if given.scale_attention_scores else None,
                given.layer_idx if given.scale_attn_by_layer_idx else None,
            ),
        )  # fmt: skip


def attention_scale(head_size: int | None, layer_idx: int | None) -> float:
    """What scores are multiplied by: 1 / (√head_size · (layer_idx + 1)), without the factor that is None."""
    return 1.0 / (math.sqrt(head_size or 1) * (1 if layer_idx is None else layer_idx + 1))


def initialize(module: nn.Module, given: Any) -> None:
    """Draw the weights of a module's linear layers from a normal distribution, under ``use_normal_initialization``."""
    if given.use_normal_initialization:
        for one in module.children():
            if isinstance(one, nn.Linear):
                nn.init.normal_(one.weight, std=given.initializer_range)
