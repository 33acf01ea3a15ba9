"""Models and data for training loops of other libraries: small, without dropout, with labels that are left out."""

from typing import Any

import torch
import transformers

WORDS = 96


def model(kind: str) -> Any:
    """GPT-2 or BERT with values that depend on a seed alone."""
    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=2, n_embd=32, n_head=4, vocab_size=WORDS, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=64, vocab_size=WORDS,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens; of the labels as many are left out as ``is_masked`` draws."""

    def __init__(self, count: int, seed: int, is_masked: bool = True) -> None:
        self.count, self.seed, self.is_masked = count, seed, is_masked

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= self.count:
            raise IndexError(number)
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        tokens = torch.randint(0, WORDS, (12,), generator=generator)
        labels = tokens.clone()
        if self.is_masked:
            labels[: int(torch.randint(0, 9, (), generator=generator))] = -100
        return {"input_ids": tokens, "labels": labels}
