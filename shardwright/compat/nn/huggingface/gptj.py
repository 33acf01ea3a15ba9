"""GPT-J, between Hugging Face's ``GPTJForCausalLM`` and SageMaker's ``DistributedTransformerLMHead``."""

from shardwright.compat.nn.huggingface.translation import Translation, to_hugging_face, to_smdistributed

TRANSLATION = Translation(
    family="GPT-J",
    layers=(("transformer.h.", "transformer.seq_layers."),),
    layer={
        "ln_1": ("pre_layernorm",),
        "attn.q_proj": ("attention.query",),
        "attn.k_proj": ("attention.key",),
        "attn.v_proj": ("attention.value",),
        "attn.out_proj": ("attention.dense",),
        "mlp.fc_in": ("output.dense1",),
        "mlp.fc_out": ("output.dense2",),
    },
    whole={"transformer.wte": "word_embedding", "transformer.ln_f": "layernorm", "lm_head": "lm_head"},
    buffers=(".attn.bias", ".attn.masked_bias", ".attn.embed_positions"),
)

translate_state_dict_to_hf_gptj = to_hugging_face(TRANSLATION)
translate_hf_state_dict_to_smdistributed_gptj = to_smdistributed(TRANSLATION)
translate_hf_gptj_state_dict_to_smdistributed_gptj = translate_hf_state_dict_to_smdistributed_gptj
"""The name on SageMaker's page."""
translate_hf_gptj_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_gptj
"""The name that AWS's script for GPT-J imports."""
