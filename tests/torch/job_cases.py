"""Jobs of real models, small enough for tests, and what each trains to alone."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
)

import shardwright as sw
from benchmarks.tracked import LiveStorages
from shardwright.backends.torch.jobs.job_run import JobRun
from shardwright.backends.torch.jobs.training import JobTraining
from shardwright.backends.torch.program.randomness import Streams, kept_generators
from shardwright.core.jobs.jobs_plan import JobsPlan, PlannedJob
from shardwright.core.jobs.shard_pass import ShardPass
from tests.comparison import Comparison

SEED, BATCH, MICROBATCH, STEPS = 7, 4, 2, 3
CPU = torch.device("cpu")
Tensors = list[torch.Tensor]
_SIZES = {"vocab_size": 64}


def gpt2() -> tuple[nn.Module, Tensors]:
    config = GPT2Config(n_layer=4, n_embd=32, n_head=2, n_positions=16, use_cache=False, **_SIZES)
    tokens = torch.randint(0, 64, (BATCH, 16))
    return GPT2LMHeadModel(config).train(), [tokens, tokens]


def bert() -> tuple[nn.Module, Tensors]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForMaskedLM(BertConfig(max_position_embeddings=16, **sizes, **_SIZES)).train()
    return model, [torch.randint(0, 64, (BATCH, 16)), torch.randint(0, 64, (BATCH, 16))]


def t5() -> tuple[nn.Module, Tensors]:
    config = T5Config(
        num_layers=2, num_decoder_layers=2, d_model=32, d_ff=64, num_heads=2, d_kv=16, use_cache=False,
        decoder_start_token_id=0, dropout_rate=0.1, **_SIZES,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (BATCH, 16))
    return T5ForConditionalGeneration(config).train(), [tokens, tokens.flip(1)]


def resnet() -> tuple[nn.Module, Tensors]:
    sizes = {"embedding_size": 24, "hidden_sizes": [24, 48], "depths": [2, 2], "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes)).train()
    return model, [torch.randn(BATCH, 3, 32, 32), torch.randint(0, 10, (BATCH,))]


@dataclass(frozen=True)
class Case:
    """A model with its way to train: the names of its inputs, its optimizer, a schedule, the options of its job."""

    make: Callable[[], tuple[nn.Module, Tensors]]
    names: tuple[str, str]
    optimizer_of: Callable[[Any], torch.optim.Optimizer]
    options: dict[str, Any]
    scheduler_of: Callable[[torch.optim.Optimizer], LRScheduler] | None = None

    def loss(self, model: Any, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The loss of a microbatch."""
        found: torch.Tensor = model(**dict(zip(self.names, inputs, strict=True))).loss
        return found

    def body(self, run: JobRun, inputs: Tensors) -> None:
        """The body of a step."""
        run.backward(self.loss(run.model, inputs), reduction="mean")


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


_TEXT = ("input_ids", "labels")
CASES: dict[str, Case] = {
    "gpt2": Case(gpt2, _TEXT, _adamw, {"clip_norm": 0.5}, lambda o: LambdaLR(o, lambda step: 1 / (1 + step))),
    "bert": Case(bert, _TEXT, _adamw, {}),
    "t5": Case(t5, _TEXT, _adamw, {"clip_norm": 0.5}),
    "resnet": Case(
        resnet, ("pixel_values", "labels"), _momentum, {"optimizer": "momentum"}, lambda o: StepLR(o, 1, gamma=0.5)
    ),
}


@dataclass
class Made:
    """Jobs with their plan."""

    plan: JobsPlan
    training: dict[str, JobTraining]
    plain: dict[str, nn.Module]
    """A copy of each model as it was, for training alone."""


def made(names: Sequence[str], devices: int, share: int = 3, budget_bytes: int | None = None) -> Made:
    """Jobs planned for devices, each with a share of what the smallest takes whole, its optimizer's states included."""
    jobs, training, plain = [], {}, {}
    for name in names:
        torch.manual_seed(0)
        case = CASES[name]
        model, first = case.make()
        graph = sw.capture(model, dict(zip(case.names, [tensor[:2] for tensor in first], strict=True)))
        job = sw.Job(
            name=name, model=graph, steps=STEPS, batch=BATCH, microbatch=MICROBATCH, precision="fp32", **case.options
        )
        jobs.append(job)
        data = [first, *(case.make()[1] for _ in range(STEPS - 1))]
        plain[name] = copy.deepcopy(model)
        optimizer = case.optimizer_of(model.parameters())
        schedulers = () if case.scheduler_of is None else (case.scheduler_of(optimizer),)
        training[name] = JobTraining(
            graph=graph, model=model, optimizer=optimizer, step=case.body, data=data, schedulers=schedulers
        )
    cluster = sw.Cluster("cpu", devices_per_node=devices)
    if budget_bytes is None:
        whole = [sw.plan_jobs([job], cluster).jobs[0] for job in jobs]
        budget_bytes = min(own.device_bytes + own.shards[0].optimizer_bytes for own in whole) // share
    return Made(sw.plan_jobs(jobs, cluster, budget_bytes=budget_bytes), training, plain)


def train_alone(name: str, planned: PlannedJob, given: JobTraining, plain: nn.Module) -> tuple[list[list[float]], Any]:
    """Train an unsplit model as a job trains it: the losses of every step, and its optimizer."""
    case = CASES[name]
    optimizer = case.optimizer_of(plain.parameters())
    schedulers = [] if case.scheduler_of is None else [case.scheduler_of(optimizer)]
    other = copy.deepcopy(plain)
    recording = JobRun(planned, given.graph, other, case.optimizer_of(other.parameters()), case.body, seed=SEED)
    recording.prepare(next(iter(given.data)))  # which modules draw random numbers, as the job finds out too
    (recorded,) = recording.recordings.known.values()
    streams = Streams([recorded.division.program], dict(plain.named_modules(remove_duplicate=False)), SEED, CPU)
    streams.enabled = streams.active
    losses = []
    for step, batch in enumerate(given.data):
        rows = []
        with kept_generators(streams.active, CPU):
            for number in range(BATCH // MICROBATCH):
                streams.begin(step, number)
                streams._counts = {}
                part = [tensor[number * MICROBATCH : (number + 1) * MICROBATCH] for tensor in batch]
                loss = case.loss(plain, part)
                (loss * MICROBATCH / BATCH).backward()
                rows.append(loss.item())
        if (clip_norm := case.options.get("clip_norm")) is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(rows)
    streams.close()
    return losses, optimizer


def compare_with_alone(compared: Comparison, found: Any, jobs: Made) -> None:
    """Compare the losses, weights, buffers, states and options of trained jobs with those of training alone."""
    for planned in jobs.plan.jobs:
        name = planned.name
        given, plain = jobs.training[name], jobs.plain[name]
        compared.where = name
        losses, other = train_alone(name, planned, given, plain)
        compared.equal({"failure": len(found.jobs[name].failure)}, {"failure": 0}, what="failures")
        compared.losses([list(row) for row in found.jobs[name].losses], losses, moving=1e-4)
        compared.values(given.model.state_dict(), plain.state_dict(), relative=1e-4, absolute=1e-5, what="weights")
        held = dict(given.model.named_parameters())
        states = {own: given.optimizer.state[held[own]] for own, _ in plain.named_parameters()}
        wanted = {own: other.state[parameter] for own, parameter in plain.named_parameters()}
        compared.values(states, wanted, relative=1e-4, absolute=1e-6, what="states")
        rates = [[group["lr"] for group in of.param_groups] for of in (given.optimizer, other)]
        compared.equal(rates[0], rates[1], what="learning rates")


@contextmanager
def tracked_passes() -> Iterator[dict[tuple[str, str, int], int]]:
    """The most bytes that each pass holds on this process's device, by job, kind and shard, filled as passes run."""
    peaks: dict[tuple[str, str, int], int] = {}
    plain_run = JobRun.run

    def tracked(self: JobRun, own: ShardPass) -> None:
        with LiveStorages() as live:
            plain_run(self, own)
        key = self.planned.name, own.kind, own.shard
        peaks[key] = max(peaks.get(key, 0), live.peak_bytes(without="meta"))

    JobRun.run = tracked  # type: ignore[method-assign]
    try:
        yield peaks
    finally:
        JobRun.run = plain_run  # type: ignore[method-assign]


def peaks_of_steps(jobs: Made, name: str) -> dict[tuple[str, str, int], int]:
    """The most bytes that each pass of a job holds in its first two steps, by (job, kind, shard)."""
    given, (job,) = jobs.training[name], jobs.plan.jobs
    run = JobRun(job, given.graph, given.model, given.optimizer, given.step, seed=SEED)
    with tracked_passes() as peaks:
        for batch in list(given.data)[:2]:
            run.step(batch)
    return peaks
