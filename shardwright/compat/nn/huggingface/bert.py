"""BERT: Hugging Face's model with its encoder as SageMaker's ``DistributedTransformer``. Names outside of the encoder
stay."""

from shardwright.compat.nn.huggingface.translation import Translation, to_hugging_face, to_smdistributed

LAYER = {
    "attention.self.query": ("attention.query",),
    "attention.self.key": ("attention.key",),
    "attention.self.value": ("attention.value",),
    "attention.output.dense": ("attention.dense",),
    "attention.output.LayerNorm": ("attention.layernorm",),
    "intermediate.dense": ("output.dense1",),
    "output.dense": ("output.dense2",),
    "output.LayerNorm": ("output.layernorm",),
}
TRANSLATION = Translation(
    family="BERT",
    layers=(("bert.encoder.layer.", "bert.encoder.seq_layers."), ("encoder.layer.", "encoder.seq_layers.")),
    layer=LAYER,
    passes_others=True,
)

translate_state_dict_to_hf_bert = to_hugging_face(TRANSLATION)
translate_hf_state_dict_to_smdistributed_bert = to_smdistributed(TRANSLATION)
