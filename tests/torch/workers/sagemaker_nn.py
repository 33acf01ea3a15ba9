"""Trains models made of SageMaker's distributed modules, and the original models beside them: sagemaker_nn.py PP TP.

Every rank trains the original by itself, on the same microbatches.
"""

import sys
from collections.abc import Callable
from typing import Any

import nn_models
import torch
from launched import run_checks, whole_gradients
from torch import nn

import shardwright.torch as sw
from shardwright.compat.model import DistributedModel as OfSageMaker
from shardwright.compat.nn import (
    DistributedEmbedding,
    DistributedLinear,
    DistributedTransformer,
    DistributedTransformerLMHead,
    FlashAttentionLayer,
)
from shardwright.compat.nn.huggingface.forms import FAMILIES, distributed_form
from tests.comparison import Comparison

PP, TP = int(sys.argv[1]), int(sys.argv[2])
STEPS, MICROBATCHES = 3, 2


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss)
    return loss


@sw.step
def tuple_step(model: Any, *inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs)[0]
    model.backward(loss)
    return loss


def trained_alone(model: nn.Module, losses_of: Callable[[Any], torch.Tensor], batches: list[list[Any]]) -> list[float]:
    """The losses of a model over steps, each of several microbatches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for microbatches in batches:
        optimizer.zero_grad()
        found = [losses_of(one) for one in microbatches]
        for loss in found:
            (loss / len(found)).backward()
        optimizer.step()
        losses.append(float(torch.stack([loss.detach() for loss in found]).mean()))
    return losses


def in_microbatches(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    parts = {name: value.chunk(MICROBATCHES) for name, value in batch.items()}
    return [{name: chunks[one] for name, chunks in parts.items()} for one in range(MICROBATCHES)]


def begin() -> None:
    sw.init({"pipeline_parallel_degree": PP, "tensor_parallel_degree": TP, "ddp": True, "microbatches": MICROBATCHES})


def divided(model: Any) -> None:
    """Every rank of the axes holds a part of the model alone."""
    held = sum(parameter.numel() for parameter in model.local_parameters())
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert PP == 1 or held < whole
    names = {name for name, p in model.named_parameters() if model.is_distributed_parameter(p)}
    assert TP == 1 or {name.rpartition(".layer")[0] for name in names}, names
    for end in ("attention.dense.weight", "output.dense1.weight"):
        assert TP == 1 or any(name.endswith(end) for name in names), (end, sorted(names))


def train(family: str, is_masked: bool) -> None:
    def batch(step: int) -> dict[str, torch.Tensor]:
        made = nn_models.batch(step)
        made["labels"] = made["input_ids"]
        return made if is_masked else {name: made[name] for name in ("input_ids", "labels")}

    original = nn_models.build(family)
    form = distributed_form(original)
    batches = [in_microbatches(batch(step)) for step in range(STEPS)]
    alone = trained_alone(original, lambda one: original(**one).loss, batches)
    begin()
    model = sw.DistributedModel(form)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(train_step(model, batch(step)).reduce_mean()))
        optimizer.step()
    divided(model)
    of_form = model.state_dict()
    state = FAMILIES[original.config.model_type].translation.to_hugging_face(of_form)  # type: ignore[union-attr]
    same = Comparison(f"{family} over pp {PP}, tp {TP}")
    same.losses(losses, alone, moving=0.01)
    same.values(state, dict(original.state_dict()), relative=1e-3, absolute=1e-4, what="weights")
    of_class = OfSageMaker(nn_models.build(family))
    of_class.load_state_dict(of_form)
    same.equal({name: of_class.state_dict()[name] for name in state}, state, what="loaded under SageMaker's names")
    same.require()
    sw.shutdown()


def gpt2_trains_as_the_original() -> None:
    train("gpt2", is_masked=True)


def bert_trains_as_the_original() -> None:
    train("bert", is_masked=True)


def roberta_trains_as_the_original() -> None:
    train("roberta", is_masked=False)


def gptj_trains_as_the_original() -> None:
    train("gptj", is_masked=False)


def gptneo_trains_as_the_original() -> None:
    train("gpt_neo", is_masked=False)


def gptneox_trains_as_the_original() -> None:
    train("gpt_neox", is_masked=True)


class OwnModel(nn.Module):
    """Distributed modules in a model of the user's, with linear biases, and keys and values of other states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = DistributedEmbedding(nn_models.VOCABULARY, 16, initializer_range=0.5)
        how: dict[str, Any] = {
            "num_attention_heads": 4, "attention_head_size": 4, "hidden_size": 16, "intermediate_size": 24,
            "attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "causal_mask_size": nn_models.LENGTH,
        }  # fmt: skip
        self.first = DistributedTransformer(2, use_alibi=True, **how)
        self.qkv = DistributedLinear(16, 48)
        self.flash = FlashAttentionLayer(0.0, 4)
        self.second = DistributedTransformer(2, add_cross_attention=True, pre_layernorm=True, **how)
        self.head = DistributedLinear(16, nn_models.VOCABULARY)

    def forward(self, inputs: Any) -> tuple[torch.Tensor]:
        ids, mask = inputs
        additive = mask[:, None, None].float() * torch.finfo(torch.float32).min
        states, _ = self.first((self.embedding(ids), additive))
        qkv = self.qkv(states).unflatten(-1, (3, 4, 4))
        other = self.flash(qkv, causal=True).transpose(1, 2).flatten(2)
        states = self.second((states, other, additive, additive * 0.5))[0]
        logits = self.head(states)
        return (nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()),)


def own_models_train_as_alone() -> None:
    check_tuples(OwnModel, lambda step: (nn_models.batch(step)["input_ids"], _masked(step)))


def _masked(step: int) -> torch.Tensor:
    return 1 - nn_models.batch(step)["attention_mask"]


def language_models_train_as_alone() -> None:
    def build() -> nn.Module:
        return DistributedTransformerLMHead(
            2, 4, 4, 16, 24, nn_models.VOCABULARY, nn_models.LENGTH, 0.0, 0.0, num_token_types=2,
            causal_mask_size=nn_models.LENGTH, initializer_range=0.5, pre_layernorm=True,
        )  # fmt: skip

    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        ids = nn_models.batch(step)["input_ids"]
        return ids, _masked(step), ids % 2, torch.arange(nn_models.LENGTH).expand_as(ids).flip(-1), ids

    check_tuples(build, inputs)


def check_tuples(build: Callable[[], nn.Module], inputs: Callable[[int], tuple[torch.Tensor, ...]]) -> None:
    torch.manual_seed(1)
    plain = build()
    torch.manual_seed(1)
    form = build()
    batches = [list(zip(*(one.chunk(MICROBATCHES) for one in inputs(step)), strict=True)) for step in range(STEPS)]
    alone = trained_alone(plain, lambda one: plain(one)[0], batches)
    begin()
    model = sw.DistributedModel(form)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(tuple_step(model, *inputs(step)).reduce_mean()))
        if step == STEPS - 1:
            found = whole_gradients(model)
        optimizer.step()
    divided(model)
    same = Comparison(f"over pp {PP}, tp {TP}")
    same.losses(losses, alone, moving=0.01)
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    same.gradients(found, {name: gradients[name] for name in found})
    same.require()
    sw.shutdown()


CHECKS = (
    gpt2_trains_as_the_original,
    bert_trains_as_the_original,
    roberta_trains_as_the_original,
    gptj_trains_as_the_original,
    gptneo_trains_as_the_original,
    gptneox_trains_as_the_original,
    own_models_train_as_alone,
    language_models_train_as_alone,
)

if __name__ == "__main__":
    run_checks(check for check in CHECKS if len(sys.argv) <= 3 or check.__name__ in sys.argv[3:])
