"""GPT-Neo, between Hugging Face's ``GPTNeoForCausalLM`` and SageMaker's ``DistributedTransformerLMHead``."""

from shardwright.compat.nn.huggingface.translation import Translation, to_hugging_face, to_smdistributed

TRANSLATION = Translation(
    family="GPT-Neo",
    layers=(("transformer.h.", "transformer.seq_layers."),),
    layer={
        "ln_1": ("attention.pre_layernorm",),
        "attn.attention.q_proj": ("attention.query",),
        "attn.attention.k_proj": ("attention.key",),
        "attn.attention.v_proj": ("attention.value",),
        "attn.attention.out_proj": ("attention.dense",),
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
    buffers=(".attn.attention.bias", ".attn.attention.masked_bias"),
)

translate_state_dict_to_hf_gptneo = to_hugging_face(TRANSLATION)
translate_hf_state_dict_to_smdistributed_gptneo = to_smdistributed(TRANSLATION)
