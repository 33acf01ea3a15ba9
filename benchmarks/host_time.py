"""The host's time to issue the ops of a model in eager PyTorch, by what they are.

    python benchmarks/host_time.py

Five models, so small that the ops themselves take no time, are trained on one core. Least squares of relative errors
over the models give the time to issue a product (with its module, views and autograd function) and the time of another
op; their ratio is `EAGER_OP_DISPATCH` of the cost model. What the calling thread takes to start an all-reduce in an
autograd function, in a group of one rank, over the time of a product is `COLLECTIVE_DISPATCH`. Seconds are CPU seconds,
so that other work on the machine matters little. Judged: the fitted times give each model's back within 30%, forward
and backward, and the ratios are within a factor of three of the constants.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import numpy as np
import torch
import torch.distributed as dist
from step_models import Mixer, images, tokens
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

import shardwright as sw
from shardwright.core.cost.unit_seconds import COLLECTIVE_DISPATCH, EAGER_OP_DISPATCH
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold

LAYERS, WIDTH, STEPS = 12, 32, 25
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 2 * WIDTH}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def models() -> dict[str, tuple[nn.Module, dict[str, torch.Tensor]]]:
    """Each with a sample of two."""
    text = tokens(2, 8, 64)
    sizes = {"n_layer": LAYERS, "n_embd": WIDTH, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return {
        "gpt2": (GPT2LMHeadModel(GPT2Config(**sizes, **none, use_cache=False)), text),
        "llama": (LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64, use_cache=False)), text),
        "bert": (BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT, vocab_size=64)), text),
        "vit": (
            ViTForImageClassification(ViTConfig(**SIZES, **NO_DROPOUT, image_size=32, num_labels=1000)),
            images(2, 3, 32, 32),
        ),
        "mixer": (Mixer(LAYERS, 16, WIDTH, 1000), images(2, 16, 768, name="patches")),
    }


def counted(model: nn.Module, sample: dict[str, torch.Tensor]) -> tuple[int, int]:
    """The products and the other kernels of a forward pass."""
    graph = sw.capture(model, sample)
    counter = WorkCounter(graph)
    work = [counter.count(unit, 2) for unit in fold(graph).units]
    products = sum(len(each.products) for each in work)
    return products, sum(each.eager_kernels for each in work) - products


def passes_s(model: nn.Module, sample: dict[str, torch.Tensor]) -> tuple[float, float]:
    """CPU seconds of a forward and of a backward pass, the lower quartile of `STEPS`."""
    forward, backward = [], []
    for _ in range(STEPS):
        begun = time.process_time()
        out = model(**sample)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        between = time.process_time()
        loss.backward()
        forward.append(between - begun)
        backward.append(time.process_time() - between)
    return sorted(forward)[STEPS // 4], sorted(backward)[STEPS // 4]


class _Reduced(torch.autograd.Function):
    """The sum over ranks on its way forward, as tensor parallelism has it behind a product."""

    @staticmethod
    def forward(ctx: object, partial: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(partial, async_op=True)
        return partial

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def all_reduce_s(calls: int = 400) -> float:
    """CPU seconds of the calling thread to start an all-reduce, the lower quartile of `STEPS`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    partial = nn.Linear(WIDTH, WIDTH)(torch.ones(8, WIDTH))
    seconds = []
    for _ in range(STEPS):
        begun = time.thread_time()
        for _ in range(calls):
            _Reduced.apply(partial)
        seconds.append((time.thread_time() - begun) / calls)
    dist.destroy_process_group()
    return sorted(seconds)[STEPS // 4]


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    names, counts, seconds = [], [], []
    for name, (model, sample) in models().items():
        model.train()
        names.append(name)
        counts.append(counted(model, sample))
        seconds.append(passes_s(model, {key: value[:1] for key, value in sample.items()}))
    kernels, taken = np.array(counts, dtype=float), np.array(seconds)
    print("| pass | a product, µs | another op, µs | ratio | " + " | ".join(names) + " |")
    print("|---" * (4 + len(names)) + "|")
    errors: dict[str, float] = {}
    ratios: dict[str, float] = {}
    products: list[float] = []
    for column, which in enumerate(("forward", "backward")):
        measured = taken[:, column]
        (product, other), *_ = np.linalg.lstsq(kernels / measured[:, None], np.ones(len(names)), rcond=None)
        found = kernels @ np.array([product, other]) / measured - 1
        ratios[which] = float(other / product)
        products.append(float(product))
        errors |= {f"{name}, {which}": float(error) for name, error in zip(names, found, strict=True)}
        cells = " | ".join(f"{error:+.0%}" for error in found)
        print(f"| {which} | {1e6 * product:.0f} | {1e6 * other:.0f} | {other / product:.2f} | {cells} |")
    issued_s = all_reduce_s()
    share = issued_s / products[0]
    print(f"\nAn all-reduce: {1e6 * issued_s:.0f} µs, {share:.2f} of a product of the forward pass.")
    verdicts = (
        claims.host_time(errors, ratios, EAGER_OP_DISPATCH),
        claims.host_time({}, {"forward, all-reduce": share}, COLLECTIVE_DISPATCH),
    )
    for verdict in verdicts:
        print(verdict.verdict())
    return max(verdict.exit_code for verdict in verdicts)


if __name__ == "__main__":
    sys.exit(main())
