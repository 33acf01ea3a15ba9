"""Transformers of `x_transformers`, by what sets them apart."""

from typing import Any

from torch.nn import functional as F

from benchmarks.real_networks.registry import (
    BUILDERS,
    LENGTH,
    VOCABULARY,
    Made,
    built_by,
    next_tokens,
    normal,
    to_target,
    tokens,
)


def decoder(**options: Any) -> Made:
    from x_transformers import Decoder, TransformerWrapper

    options = {"dim": 32, "depth": 3, "heads": 2, "attn_dim_head": 16} | options
    outer = {name: options.pop(name) for name in list(options) if name in OUTER}
    model = TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=Decoder(**options), **outer
    )  # fmt: skip
    return model, {"x": tokens(LENGTH, VOCABULARY)}, next_tokens


OUTER = ("num_memory_tokens", "use_abs_pos_emb", "tie_embedding", "emb_dropout", "scaled_sinu_pos_emb")
DECODERS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "rotary_glu": {"rotary_pos_emb": True, "ff_glu": True, "ff_swish": True, "use_rmsnorm": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1, "use_abs_pos_emb": False},
    "relative_bias": {"rel_pos_bias": True},
    "grouped_queries": {"attn_kv_heads": 1, "attn_flash": True},
    "memory_tokens": {"num_memory_tokens": 3, "attn_num_mem_kv": 2},
    "sandwich": {"sandwich_coef": 2, "depth": 4},
    "macaron": {"macaron": True, "use_scalenorm": True},
    "gated_attention": {"attn_gate_values": True, "attn_head_scale": True, "gate_residual": True},
    "dropouts": {"attn_dropout": 0.1, "ff_dropout": 0.1, "emb_dropout": 0.1},
    "tied": {"tie_embedding": True, "scaled_sinu_pos_emb": True, "use_abs_pos_emb": False},
    "talking_heads": {"attn_pre_talking_heads": True, "attn_qk_norm": True},
}
for _name, _options in DECODERS.items():
    BUILDERS[f"x_transformers:{_name}"] = lambda options=_options: decoder(**options)


@built_by("x_transformers")
def autoregressive_wrapper() -> Made:
    from x_transformers import AutoregressiveWrapper

    model, batch, _ = decoder(rotary_pos_emb=True)
    return AutoregressiveWrapper(model), batch, lambda model, batch: model(batch["x"])


@built_by("x_transformers")
def encoder_decoder() -> Made:
    from x_transformers import XTransformer

    model = XTransformer(
        dim=32, enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=2, enc_max_seq_len=LENGTH, dec_num_tokens=VOCABULARY,
        dec_depth=2, dec_heads=2, dec_max_seq_len=LENGTH, tie_token_emb=True,
    )  # fmt: skip
    batch = {"source": tokens(LENGTH, VOCABULARY), "target": tokens(LENGTH, VOCABULARY)}
    return model, batch, lambda model, batch: model(batch["source"], batch["target"])


@built_by("x_transformers")
def vision() -> Made:
    from x_transformers import Encoder, ViTransformerWrapper

    model = ViTransformerWrapper(
        image_size=16, patch_size=4, num_classes=7, attn_layers=Encoder(dim=32, depth=3, heads=2)
    )
    batch = {"x": normal(3, 16, 16), "y": tokens(1, 7)[:, 0]}
    return model, batch, lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])


@built_by("x_transformers")
def continuous() -> Made:
    from x_transformers import ContinuousTransformerWrapper, Decoder

    model = ContinuousTransformerWrapper(
        dim_in=8, dim_out=8, max_seq_len=LENGTH, attn_layers=Decoder(dim=32, depth=3, heads=2)
    )
    return model, {"x": normal(LENGTH, 8), "target": normal(LENGTH, 8)}, to_target()
