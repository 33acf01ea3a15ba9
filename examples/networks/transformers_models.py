"""Named networks that Hugging Face has, at their published sizes. None takes memory: weights are on the meta device.

    shardwright plan examples/networks/transformers_models.py:gpt3_175b --cluster a100-80gb --nodes 128 \\
        --devices-per-node 8 --batch 1536

Sizes are those of the papers: BERT (arXiv 1810.04805), RoBERTa (1907.11692), T5 (1910.10683), GPT-2 (its report of
2019), GPT-3 (2005.14165, table 2.1), Megatron-LM 8.3B (1909.08053), Turing-NLG (Microsoft's announcement of 2020),
Megatron-Turing 530B (2201.11990), SpeechT5 (2110.07205).
"""

from typing import Any

import torch


def bert_large() -> tuple[Any, Any]:
    """BERT-large: 24 layers of 1024, with the head that predicts masked tokens and the next sentence."""
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return _meta(BertForPreTraining, config), _tokens(512) | {"next_sentence_label": torch.zeros(2, dtype=torch.long)}


def roberta_large() -> tuple[Any, Any]:
    """RoBERTa-large: BERT-large with a vocabulary of 50,265 pieces."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    config = RobertaConfig(
        vocab_size=50265, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        max_position_embeddings=514, type_vocab_size=1,
    )  # fmt: skip
    return _meta(RobertaForMaskedLM, config), _tokens(512)


def t5_11b() -> tuple[Any, Any]:
    """T5-11B: 24 + 24 layers of 1024, 128 heads of 128, an inner width of 65,536."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=65536, num_layers=24, num_heads=128, decoder_start_token_id=0
    )
    return _meta(T5ForConditionalGeneration, config), _tokens(512)


def gpt2_xl() -> tuple[Any, Any]:
    """GPT-2 XL: 48 layers of 1600."""
    return _gpt(48, 1600, 25, 1024)


def gpt3_175b() -> tuple[Any, Any]:
    """GPT-3: 96 layers of 12,288."""
    return _gpt(96, 12288, 96, 2048)


def megatron_8b() -> tuple[Any, Any]:
    """Megatron-LM's GPT-2 of 8.3 billion parameters: 72 layers of 3072."""
    return _gpt(72, 3072, 32, 1024, vocabulary=51200)


def turing_nlg_17b() -> tuple[Any, Any]:
    """Turing-NLG: 78 layers of 4256."""
    return _gpt(78, 4256, 28, 1024)


def megatron_turing_530b() -> tuple[Any, Any]:
    """Megatron-Turing NLG: 105 layers of 20,480."""
    return _gpt(105, 20480, 128, 2048, vocabulary=51200)


def gpt_1t() -> tuple[Any, Any]:
    """The GPT of one trillion parameters of arXiv 2104.04473: 128 layers of 25,600."""
    return _gpt(128, 25600, 160, 2048, vocabulary=51200)


def speech_t5() -> tuple[Any, Any, Any]:
    """SpeechT5 as it speaks: an encoder of text, a decoder of spectrogram frames. In evaluation mode: in training a
    random value decides which layers run."""
    from transformers import SpeechT5Config, SpeechT5ForTextToSpeech

    model = _meta(SpeechT5ForTextToSpeech, SpeechT5Config()).eval()
    sample = {
        "input_ids": torch.zeros(2, 128, dtype=torch.long),
        "decoder_input_values": torch.zeros(2, 256, 80),
        "speaker_embeddings": torch.zeros(2, 512),
    }
    return model, sample, lambda output: output[0].float().mean()


def _gpt(layers: int, hidden: int, heads: int, sequence: int, vocabulary: int = 50257) -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=vocabulary, n_layer=layers, n_embd=hidden, n_head=heads, n_positions=sequence)
    return _meta(GPT2LMHeadModel, config), _tokens(sequence)


def _meta(model: Any, config: Any) -> Any:
    with torch.device("meta"):
        return model(config)


def _tokens(length: int) -> dict[str, Any]:
    """Two samples; their number does not matter, the plan's batch does."""
    tokens = torch.zeros(2, length, dtype=torch.long)
    return {"input_ids": tokens, "labels": tokens}
