"""Tiny configurations of `transformers` models, made from the fields that each configuration class declares.

Sizes are found by their names: layers, heads, widths, vocabularies, images. What does not concern size stays as the
class has it by default (caches, dropout, activations). `OVERRIDES` has what follows from no name.
"""

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

WIDTH = 64
HEADS = 4
VOCABULARY = 128
LAYERS = 4
IMAGE = 32

_REFERENCE = (
    "hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "hidden_dim", "embedding_size", "model_dim",
    "encoder_hidden_size", "d_embed", "width", "projection_dim",
)  # fmt: skip
"""Names of the width that the others are scaled with."""

_LAYERS = re.compile(r"(^|_)(n_layers?|layers?|depth|num_blocks|num_hidden_groups|n_blocks)$")
_HEADS = re.compile(r"(heads?|num_query_groups)$")
_KEY_HEADS = re.compile(r"key_value|kv|query_group")
_HEAD_DIM = re.compile(r"(head_dim|d_kv|head_size|attention_head_dim|head_width|d_head)$")
_POSITIONS = re.compile(r"position|n_ctx|context_length|max_seq|max_length|max_sequence")
_INNER = re.compile(r"intermediate|ffn|d_ff|inner|mlp_dim|feedforward|mlp_hidden|fc_dim")
_EXPERTS = re.compile(
    r"(num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_moe_experts|ffn_num_experts)$"
)
_CHOSEN = re.compile(r"experts_per_tok|top_k|topk|num_selected|experts_top_k")
_WIDTH = re.compile(r"hidden|embed|emb|model|channel|dim|width|size|rank|features|filters|planes")
_FIXED = re.compile(
    r"num_channels|in_channels|in_chans|kernel|patch|stride|window|image|_token|label|sampl|n_fft|hop|num_mel|seed|"
    r"num_codebook|batch|tubelet|chunk|group|ratio|factor|frame|type_vocab|spectro|num_feat|input_channels|depth_mult|"
    r"num_queries|num_feature_levels|relative|bucket|^max_|^min_|^num_(?!attention|hidden|key|heads)|dilation|input_size"
)

OVERRIDES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "overrides.json").read_text())
"""By configuration class, fields that names do not give."""


def tiny_config(cls: type[PreTrainedConfig], given: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """A tiny configuration of a class. ``given`` are fields that the class above it sets."""
    return cls(**tiny_fields(cls, given))


def tiny_fields(cls: type[PreTrainedConfig], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields that make a configuration tiny; parts of it are configurations in turn."""
    own = {f.name: _default(f) for f in fields(cls)}
    given = dict(given or {})
    known = {**own, **given}
    reference = next((known[n] for n in _REFERENCE if isinstance(known.get(n), int) and known[n]), WIDTH)
    stacks = sum(name in own for name in ("encoder_layers", "decoder_layers"))
    layers = LAYERS // 2 if stacks == 2 else LAYERS
    old_layers = [v for n, v in own.items() if isinstance(v, int) and _LAYERS.search(n)]
    made: dict[str, Any] = {}
    for name, value in known.items():
        if name in cls.sub_configs_defaults:
            made[name] = _tiny_part(cls, name, value)
            continue
        if name.startswith("_") or (name in vars_of_base() and name != "vocab_size"):
            if name in given:
                made[name] = value
            continue
        small = _shrunk(name, value, WIDTH / max(reference, WIDTH), layers)
        if isinstance(value, (list, tuple)) and len(value) in old_layers and len(value) > layers:
            small = type(value)(value[:layers])
        if small is not value or name in given:
            made[name] = small
    made.update(copy.deepcopy(OVERRIDES.get(cls.__name__, {})))
    return made


def _default(f: Any) -> Any:
    if f.default is not MISSING:
        return f.default
    return f.default_factory() if f.default_factory is not MISSING else None


_BASE: set[str] = set()


def vars_of_base() -> set[str]:
    if not _BASE:
        _BASE.update(f.name for f in fields(PreTrainedConfig))
    return _BASE


def _tiny_part(cls: type[PreTrainedConfig], name: str, value: Any) -> Any:
    spec = cls.sub_configs_defaults[name]
    part = spec.config_class
    if not issubclass(part, PreTrainedConfig) or part is PreTrainedConfig:
        kind = value.get("model_type") if isinstance(value, Mapping) else None
        part = spec.get_config_class(kind or spec.model_type)
    if value is None and spec.optional:
        return None
    inner = dict(spec.init_kwargs)
    if isinstance(value, Mapping):
        inner.update(value)
    inner.pop("model_type", None)
    return tiny_config(part, inner)


def _shrunk(name: str, value: Any, scale: float, layers: int) -> Any:
    if name == "head_dim" and value is None:
        return WIDTH // HEADS
    if name == "num_key_value_heads" and value is None:
        return HEADS
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return _shrunk_int(name, value, scale, layers)
    if (
        isinstance(value, (list, tuple))
        and value
        and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    ):
        return _shrunk_list(name, value, scale)
    if name == "out_features" and value:
        return type(value)(f"stage{i + 1}" for i in range(len(value)))
    return value


def _shrunk_int(name: str, value: int, scale: float, layers: int) -> int:
    if name.endswith("vocab_size"):
        return min(value, VOCABULARY)
    if name in ("out_hidden_size", "projection_dim"):
        return WIDTH
    if name in ("n_group", "topk_group", "num_expert_group"):
        return 1
    if name == "image_size":
        return min(value, IMAGE)
    if name == "patch_size":
        return min(value, 8)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _CHOSEN.search(name):
        return min(value, 2)
    if _LAYERS.search(name):
        return min(value, layers)
    if _HEAD_DIM.search(name):
        return min(value, WIDTH // HEADS)
    if _HEADS.search(name):
        return min(value, 2 if _KEY_HEADS.search(name) and value < 16 else HEADS)
    if _POSITIONS.search(name):
        return min(value, 128)
    if _INNER.search(name):
        return min(value, 2 * WIDTH)
    if _WIDTH.search(name) and not _FIXED.search(name) and value >= 32:
        return _rounded(value * scale)
    return value


def _shrunk_list(name: str, value: Any, scale: float) -> Any:
    kind = type(value)
    if re.search(r"depths|layers|num_blocks|num_layers|block_repeats", name):
        return kind(min(v, 2) for v in value)
    if _HEADS.search(name):
        return kind(_power_of_two(min(v, HEADS)) for v in value)
    if re.search(
        r"hidden_sizes|embed_dims?|dims|widths|channels|_sizes|filters|planes|conv_dim", name
    ) and not re.search(r"kernel|patch|stride|window|image|pool|crop|resolution", name):
        small = min(1.0, 16 / max(8, min(value)))
        return kind(_rounded(v * small) if v > 8 else v for v in value)
    if name == "out_indices":
        return kind(range(1, len(value) + 1))
    if name == "image_size":
        return kind(min(v, IMAGE) for v in value)
    return value


def _rounded(value: float) -> int:
    return max(8, round(value / 8) * 8)


def _power_of_two(value: int) -> int:
    return 1 << (value.bit_length() - 1)
