"""Jobs run shard by shard from the host: every weight, buffer and optimizer state of training alone."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import ResNetConfig, ResNetForImageClassification, T5Config, T5ForConditionalGeneration

import shardwright as sw
from benchmarks.tracked import LiveStorages
from shardwright.backends.torch.jobs.job_run import JobRun
from shardwright.backends.torch.machine.host_store import is_in_file
from shardwright.backends.torch.program.randomness import Streams, kept_generators
from shardwright.core.errors import LossError, PlanError
from shardwright.core.tables.rank_tables import UNCOUNTED_BYTES
from tests.comparison import Comparison

SEED, BATCH, MICROBATCH, STEPS = 7, 4, 2, 3
CPU = torch.device("cpu")


def t5() -> tuple[nn.Module, list[torch.Tensor]]:
    config = T5Config(
        num_layers=2, num_decoder_layers=2, d_model=32, d_ff=64, num_heads=2, d_kv=16, vocab_size=64, use_cache=False,
        decoder_start_token_id=0, dropout_rate=0.1,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (BATCH, 16))
    return T5ForConditionalGeneration(config).train(), [tokens, tokens.flip(1)]


def resnet() -> tuple[nn.Module, list[torch.Tensor]]:
    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes)).train()
    return model, [torch.randn(BATCH, 3, 16, 16), torch.randint(0, 10, (BATCH,))]


CASES: dict[str, tuple[Callable[[], Any], tuple[str, str], Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "t5": (t5, ("input_ids", "labels"), lambda p: torch.optim.AdamW(p, lr=1e-3), {"clip_norm": 0.5}),
    "resnet": (
        resnet,
        ("pixel_values", "labels"),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
        {"optimizer": "momentum"},
    ),
}


def planned(
    model: nn.Module, sample: dict[str, torch.Tensor], given: dict[str, Any], *, by_turns: bool = True
) -> tuple[Any, Any]:
    """The plan of a job in several shards; ``by_turns``: with activations by turns computed again, on the host, and
    kept."""
    graph = sw.capture(model, sample)
    job = sw.Job(
        name="a", model=graph, steps=STEPS, batch=BATCH, microbatch=MICROBATCH, precision="fp32", **given
    )  # fmt: skip
    whole = sw.plan_jobs([job], sw.Cluster("cpu", devices_per_node=2))
    budget = whole.jobs[0].device_bytes // 3
    found = sw.plan_jobs([job], sw.Cluster("cpu", devices_per_node=2), budget_bytes=budget).jobs[0]
    if not by_turns:
        return found, graph
    labels = ("recompute", "offload", "keep")
    shards = [replace(shard, activations=labels[n % 3]) for n, shard in enumerate(found.shards[:-1])]
    return replace(found, shards=(*shards, found.shards[-1])), graph


@pytest.mark.parametrize("case", CASES)
def test_a_job_in_shards_trains_as_the_whole_model(case: str) -> None:
    torch.manual_seed(0)
    make, names, optimizer_of, given = CASES[case]
    model, batch = make()
    plain, sample = copy.deepcopy(model), dict(zip(names, [tensor[:2] for tensor in batch], strict=True))
    job, graph = planned(model, sample, given)
    assert len(job.shards) >= 4
    said: list[str | None] = [None, "mean"]

    def body(run: JobRun, inputs: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = run.model(**dict(zip(names, inputs, strict=True))).loss
        run.backward(loss, reduction=said[0])
        return loss

    optimizer, other = optimizer_of(model.parameters()), optimizer_of(plain.parameters())
    run = JobRun(job, graph, model, optimizer, body, seed=SEED)
    compared = Comparison(case)
    with pytest.raises(LossError, match="whether its loss is a mean over samples is not said"):
        run.begin(batch)
    with pytest.raises(PlanError, match="planned for batches of 4 samples"):
        run.begin([tensor[:3] for tensor in batch])
    with pytest.raises(PlanError, match="planned for another model"):
        JobRun(replace(job, model_digest="0"), graph, plain, other, body)
    del said[0]
    streams = None
    for step in range(STEPS):
        losses = run.step(batch)
        (recorded,) = run._programs.values()
        modules = dict(plain.named_modules(remove_duplicate=False))
        streams = streams or Streams([recorded.division.program], modules, SEED, CPU)
        streams.enabled = streams.active
        expected = []
        with kept_generators(streams.active, CPU):
            for number in range(BATCH // MICROBATCH):
                streams.begin(step, number)
                streams._counts = {}
                part = [tensor[number * MICROBATCH : (number + 1) * MICROBATCH] for tensor in batch]
                loss = plain(**dict(zip(names, part, strict=True))).loss
                (loss * MICROBATCH / BATCH).backward()
                expected.append(loss.item())
        if "clip_norm" in given:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), given["clip_norm"])
        other.step()
        other.zero_grad()
        compared.where = f"step {step}"
        compared.losses(losses, expected)
    compared.where = ""
    tensors = (*model.parameters(), *model.buffers())
    assert all(is_in_file(tensor.untyped_storage()) for tensor in tensors if tensor.numel())
    compared.values(model.state_dict(), plain.state_dict(), relative=1e-4, absolute=1e-5, what="weights")
    held = dict(model.named_parameters())
    found = {name: optimizer.state[held[name]] for name, _ in plain.named_parameters()}
    wanted = {name: other.state[parameter] for name, parameter in plain.named_parameters()}
    compared.values(found, wanted, relative=1e-4, absolute=1e-6, what="states")
    compared.require()


@pytest.mark.parametrize("case", CASES)
def test_no_pass_holds_more_than_planned_and_the_fullest_little_less(case: str) -> None:
    torch.manual_seed(0)
    make, names, optimizer_of, given = CASES[case]
    model, batch = make()
    sample = dict(zip(names, [tensor[:2] for tensor in batch], strict=True))
    job, graph = planned(model, sample, given, by_turns=False)

    def body(run: JobRun, inputs: list[torch.Tensor]) -> None:
        run.backward(run.model(**dict(zip(names, inputs, strict=True))).loss, reduction="mean")

    run = JobRun(job, graph, model, optimizer_of(model.parameters()), body, seed=SEED)
    run.step(batch)
    run.begin(batch)
    peaks = []
    for own in job.passes:
        with LiveStorages() as live:
            run.run(own)
        peaks.append(live.peak_bytes(without="meta"))
        assert peaks[-1] <= own.device_bytes, own
    assert job.device_bytes - UNCOUNTED_BYTES <= 1.15 * max(peaks)
