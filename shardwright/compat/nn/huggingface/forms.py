"""The distributed form of a Hugging Face model, with its weights.

SageMaker's library puts such forms in the place of models when it wraps them. Here models stay what they are, as the
planner divides them as well, and a form is made where it is asked for::

    form = smp.nn.huggingface.distributed_form(GPT2LMHeadModel(config))
    model = smp.DistributedModel(form)
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.compat.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta
from shardwright.compat.nn.huggingface.translation import Translation
from shardwright.compat.nn.language_model import DistributedTransformerLMHead
from shardwright.compat.nn.transformer import ACTIVATIONS, DistributedTransformer
from shardwright.core.errors import MissingCapabilityError, nearest


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models whose distributed form is known.

    Attributes:
        class_name: the class of Hugging Face's models; for an encoder, what their classes begin with.
        arguments: from their configuration to the arguments of SageMaker's module.
        encoder: the paths where their encoder may be, which alone is another one in the form; none: the whole model is.
        refused: values in their configuration that the form does not have, and what to do.
    """

    translation: Translation
    class_name: str
    arguments: Callable[[Any], dict[str, Any]]
    encoder: tuple[str, ...] = ()
    refused: tuple[tuple[str, Any, str], ...] = ()


class CausalLM(DistributedTransformerLMHead):
    """A `DistributedTransformerLMHead` that is called as Hugging Face's models are, and returns their output."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
    ) -> Any:
        from transformers.modeling_outputs import CausalLMOutput

        masked = None if attention_mask is None else 1 - attention_mask.long()
        result = super().forward((input_ids, masked, token_type_ids, position_ids, labels))
        loss, logits = (None, result) if labels is None else result
        return CausalLMOutput(loss=loss, logits=logits)


class Encoder(DistributedTransformer):
    """A `DistributedTransformer` that is called as Hugging Face's encoders are, and returns their output."""

    def forward(  # type: ignore[override]
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **other: Any
    ) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        for name in ("past_key_values", "encoder_hidden_states"):
            if other.get(name) is not None:
                raise MissingCapabilityError(f"a distributed encoder takes no {name}: leave it out")
        if attention_mask is not None and attention_mask.dtype is torch.bool:  # of those that are seen
            least = torch.finfo(hidden_states.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=hidden_states.dtype).masked_fill(
                ~attention_mask, least
            )
        return BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=super().forward((hidden_states, attention_mask))[0]
        )


def _of_gpt(config: Any, *, inner: int | None, activation: str) -> dict[str, Any]:
    """What the families of GPT have in common."""
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": inner or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_positions": 0,
        "activation": activation,
        "causal_mask_size": config.max_position_embeddings,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
        "tie_word_embeddings": config.tie_word_embeddings,
        "pre_layernorm": True,
        "post_layernorm": False,
    }


def _of_gpt2(config: Any) -> dict[str, Any]:
    return _of_gpt(config, inner=config.n_inner, activation=config.activation_function) | {
        "num_positions": config.n_positions,
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "scale_attention_scores": config.scale_attn_weights,
        "scale_attn_by_layer_idx": config.scale_attn_by_inverse_layer_idx,
    }


def _of_gptj(config: Any) -> dict[str, Any]:
    return _of_gpt(config, inner=config.n_inner, activation=config.activation_function) | {
        "attention_dropout_prob": config.attn_pdrop,
        "hidden_dropout_prob": config.resid_pdrop,
        "embedding_dropout_prob": config.embd_pdrop,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_bias": False,
        "lm_head_bias": True,
        "rotary_dim": config.rotary_dim or config.hidden_size // config.num_attention_heads,
        "parallel_residual": True,
        "shared_layernorm": True,
    }


def _of_gptneo(config: Any) -> dict[str, Any]:
    windows = {"global": None, "local": config.window_size}
    return _of_gpt(config, inner=config.intermediate_size, activation=config.activation_function) | {
        "num_positions": config.max_position_embeddings,
        "attention_dropout_prob": float(config.attention_dropout),
        "hidden_dropout_prob": float(config.resid_dropout),
        "embedding_dropout_prob": float(config.embed_dropout),
        "layernorm_epsilon": config.layer_norm_epsilon,
        "attention_bias": False,
        "dense_bias": True,
        "scale_attention_scores": False,
        "attention_windows": tuple(windows[kind] for kind in config.attention_layers),
    }


def _of_gptneox(config: Any) -> dict[str, Any]:
    rope = config.rope_parameters
    head_size = config.hidden_size // config.num_attention_heads
    if rope["rope_type"] != "default":
        raise MissingCapabilityError(
            f"rope_type={rope['rope_type']!r}: the distributed form has the default one. {_INSTEAD}"
        )
    return _of_gpt(config, inner=config.intermediate_size, activation=config.hidden_act) | {
        "attention_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.hidden_dropout,
        "layernorm_epsilon": config.layer_norm_eps,
        "attention_bias": config.attention_bias,
        "fused_qkv": True,
        "rotary_dim": int(head_size * rope.get("partial_rotary_factor", 1.0)),
        "rotary_base": rope["rope_theta"],
        "rotary_pairs": "halves",
        "parallel_residual": config.use_parallel_residual,
    }


def _of_encoder(config: Any) -> dict[str, Any]:
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "attention_head_size": config.hidden_size // config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "attention_dropout_prob": config.attention_probs_dropout_prob,
        "hidden_dropout_prob": config.hidden_dropout_prob,
        "activation": config.hidden_act,
        "layernorm_epsilon": config.layer_norm_eps,
        "initializer_range": config.initializer_range,
        "use_normal_initialization": True,
    }


_DECODER = (("is_decoder", False, "it is an encoder"), ("add_cross_attention", False, "it is an encoder"))
FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        gpt2.TRANSLATION, "GPT2LMHeadModel", _of_gpt2,
        refused=(
            ("add_cross_attention", False, "it is a decoder by itself"),
            ("reorder_and_upcast_attn", False, "its attention is torch's"),
        ),
    ),
    "bert": Family(bert.TRANSLATION, "Bert", _of_encoder, ("bert.encoder", "encoder"), _DECODER),
    "roberta": Family(roberta.TRANSLATION, "Roberta", _of_encoder, ("roberta.encoder", "encoder"), _DECODER),
    "gptj": Family(gptj.TRANSLATION, "GPTJForCausalLM", _of_gptj),
    "gpt_neo": Family(gptneo.TRANSLATION, "GPTNeoForCausalLM", _of_gptneo),
    "gpt_neox": Family(gptneox.TRANSLATION, "GPTNeoXForCausalLM", _of_gptneox),
}  # fmt: skip
"""By the ``model_type`` of their configurations."""


def distributed_form(model: nn.Module) -> nn.Module:
    """The form of a Hugging Face model that is made of SageMaker's modules, with the same weights, for the same calls.

    GPT-2, GPT-J, GPT-Neo and GPT-NeoX become a `DistributedTransformerLMHead`; of BERT and RoBERTa the encoder becomes
    a `DistributedTransformer`. It takes ``input_ids``, ``attention_mask``, ``token_type_ids``, ``position_ids`` and
    ``labels``, and has no cache: generate with the original model.

    Raises MissingCapabilityError for a model of another family, or with a configuration that the form does not have.
    """
    config: Any = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    family = FAMILIES.get(kind)
    if family is None:
        raise MissingCapabilityError(f"there is no distributed form of {kind}: {nearest(kind, FAMILIES)}. {_INSTEAD}")
    if not type(model).__name__.startswith(family.class_name):
        raise MissingCapabilityError(
            f"there is no distributed form of {type(model).__name__}, but of {family.class_name}. {_INSTEAD}"
        )
    for name, wanted, why in family.refused:
        if getattr(config, name, wanted) != wanted:
            raise MissingCapabilityError(
                f"{name}={getattr(config, name)!r}: the distributed form has {name}={wanted!r}, as {why}. {_INSTEAD}"
            )
    given = family.arguments(config)
    if given["activation"] not in ACTIVATIONS:
        raise MissingCapabilityError(
            f"activation {given['activation']!r}: the distributed form has {', '.join(ACTIVATIONS)}. {_INSTEAD}"
        )
    state = family.translation.to_smdistributed(model.state_dict())
    form: nn.Module
    if family.encoder:
        form = copy.deepcopy(model)
        path = next(path for path in family.encoder if any(path == name for name, _ in model.named_modules()))
        parent, _, last = path.rpartition(".")
        setattr(form.get_submodule(parent), last, Encoder(**given))
    else:
        form = CausalLM(**given)
    form.load_state_dict(state)
    first = next(model.parameters())
    return form.to(device=first.device, dtype=first.dtype).train(model.training)


_INSTEAD = "Take the original model, which is divided as it is"
