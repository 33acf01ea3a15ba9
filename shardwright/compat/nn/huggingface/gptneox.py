"""GPT-NeoX, between Hugging Face's ``GPTNeoXForCausalLM`` and SageMaker's ``DistributedTransformerLMHead``.

Queries, keys and values stay in one weight, head by head, so that a state dict is enough to translate it."""

from shardwright.compat.nn.huggingface.translation import Translation, to_hugging_face, to_smdistributed

TRANSLATION = Translation(
    family="GPT-NeoX",
    layers=(("gpt_neox.layers.", "transformer.seq_layers."),),
    layer={
        "input_layernorm": ("attention.pre_layernorm",),
        "attention.query_key_value": ("attention.query_key_value",),
        "attention.dense": ("attention.dense",),
        "post_attention_layernorm": ("output.pre_layernorm",),
        "mlp.dense_h_to_4h": ("output.dense1",),
        "mlp.dense_4h_to_h": ("output.dense2",),
    },
    whole={
        "gpt_neox.embed_in": "word_embedding",
        "gpt_neox.final_layer_norm": "layernorm",
        "lm_head": "lm_head",
    },
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)

translate_state_dict_to_hf_gptneox = to_hugging_face(TRANSLATION)
translate_hf_state_dict_to_smdistributed_gptneox = to_smdistributed(TRANSLATION)
