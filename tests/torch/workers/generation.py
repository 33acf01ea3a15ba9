"""Tokens that a split model generates, and its evaluation, beside the plain model's, on two ranks."""

import copy
from typing import Any

import pytest
import torch
from launched import run_checks
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import shardwright.torch as sw
from shardwright.core.errors import MissingCapabilityError
from tests.comparison import Comparison

NEW = 9
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"num_beams": 3, "do_sample": False},
    {"do_sample": True, "top_k": 5},
)


@sw.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    model.backward(loss)
    return loss


@sw.step
def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids).logits
    return found


def built() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=24, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.2,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def prompts(replica: int = 0) -> dict[str, torch.Tensor]:
    """Of two lengths, the shorter filled up on the left."""
    ids = torch.randint(2, 32, (2, 7), generator=torch.Generator().manual_seed(3 + replica))
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 1
    return {"input_ids": ids, "attention_mask": mask}


def under(**config: Any) -> None:
    sw.init({"microbatches": 2, "log_every": 0, **config})
    plain = built()
    model, optimizer = sw.DistributedModel(copy.deepcopy(plain)), torch.optim.SGD(plain.parameters(), lr=0.5)
    of_split = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    replica, replicas = sw.rdp_rank(), sw.rdp_size()
    batch = torch.randint(2, 32, (4, 12), generator=torch.Generator().manual_seed(1))
    plain(input_ids=batch, labels=batch).loss.backward()
    train_step(model, batch.chunk(replicas)[replica])
    optimizer.step()
    of_split.step()
    plain.eval()
    model.eval()
    with torch.no_grad():
        found = Comparison(f"evaluation under {config}")
        wanted = plain(input_ids=batch).logits
        found.values(logits_of(model, batch).concat(), wanted, relative=1e-4, absolute=1e-5).require()
    given = prompts(replica)
    for way in WAYS:
        torch.manual_seed(7)
        wanted = plain.generate(**given, **way, max_new_tokens=NEW)
        torch.manual_seed(7)
        of_module = way is WAYS[0]  # as scripts for DistributedDataParallel call it
        tokens = (model.module if of_module else model).generate(**given, **way, max_new_tokens=NEW)
        wanted = torch.nn.functional.pad(wanted, (0, tokens.shape[1] - wanted.shape[1]), value=1)
        Comparison(f"tokens under {config}, {way}").equal(tokens, wanted).require()
    train_step(model, batch.chunk(replicas)[replica])  # and training goes on
    sw.shutdown()


def stages() -> None:
    under(pipeline_parallel_degree=2)


def tensor_axis() -> None:
    under(tensor_parallel_degree=2)


def sharded_parameters() -> None:
    """Replicas have prompts of their own, and go on until the last is done."""
    under(ddp=True, shard=3)


def what_is_refused() -> None:
    sw.init({"pipeline_parallel_degree": 2, "log_every": 0})
    size = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    encoder = sw.DistributedModel(
        T5ForConditionalGeneration(T5Config(**size, dropout_rate=0.0, decoder_start_token_id=0))
    )
    model, ids = sw.DistributedModel(built()), torch.ones(2, 4, dtype=torch.long)
    train_step(encoder, ids)
    train_step(model, ids)
    with pytest.raises(MissingCapabilityError, match=r"generate encodes first.*plain\.load_state_dict"):
        encoder.generate(ids)
    for given, said in (
        ({"output_attentions": True, "return_dict_in_generate": True}, "asks for output_attentions"),
        ({"past_key_values": object()}, "keeps no cache"),
    ):
        with pytest.raises(MissingCapabilityError, match=said):
            model.generate(ids, max_new_tokens=2, **given)
    sw.shutdown()


if __name__ == "__main__":
    run_checks((stages, tensor_axis, sharded_parameters, what_is_refused))
