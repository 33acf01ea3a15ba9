"""RoBERTa: Hugging Face's model with its encoder as SageMaker's ``DistributedTransformer``. Names outside of the
encoder stay."""

from shardwright.compat.nn.huggingface.bert import LAYER
from shardwright.compat.nn.huggingface.translation import Translation, to_hugging_face, to_smdistributed

TRANSLATION = Translation(
    family="RoBERTa",
    layers=(("roberta.encoder.layer.", "roberta.encoder.seq_layers."), ("encoder.layer.", "encoder.seq_layers.")),
    layer=LAYER,
    passes_others=True,
)

translate_state_dict_to_hf_roberta = to_hugging_face(TRANSLATION)
translate_hf_state_dict_to_smdistributed_roberta = to_smdistributed(TRANSLATION)
translate_state_dict_to_smdistributed = translate_hf_state_dict_to_smdistributed_roberta
"""The name in the example on SageMaker's page."""
