"""GPT-2, between Hugging Face's ``GPT2LMHeadModel`` and SageMaker's ``DistributedTransformerLMHead``."""

from shardwright.compat.nn.huggingface.translation import Translation, to_hugging_face, to_smdistributed

TRANSLATION = Translation(
    family="GPT-2",
    layers=(("transformer.h.", "transformer.seq_layers."),),
    layer={
        "ln_1": ("attention.pre_layernorm",),
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.dense",),
        "ln_2": ("output.pre_layernorm",),
        "mlp.c_fc": ("output.dense1",),
        "mlp.c_proj": ("output.dense2",),
    },
    whole={
        "transformer.wte": "word_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "layernorm",
        "lm_head": "lm_head",
    },
    transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
    buffers=(".attn.bias", ".attn.masked_bias"),
)

translate_state_dict_to_hf_gpt2 = to_hugging_face(TRANSLATION)
translate_hf_state_dict_to_smdistributed_gpt2 = to_smdistributed(TRANSLATION)
translate_hf_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gpt2
"""The name that older scripts have."""
