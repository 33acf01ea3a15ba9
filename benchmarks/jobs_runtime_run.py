"""What the processes of `jobs_runtime.py` run: a profile of this machine, and six models trained in all ways."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from sliced_models import Sizes, torch_model

import shardwright
import shardwright.torch as sw
from shardwright.backends import registry
from shardwright.measure import measure_units
from shardwright.torch import JobTraining, run_jobs

RANKS = 2
RATES, BATCHES = (1e-3, 3e-4, 1e-4), (8, 16)
LIST = [(f"lr {rate:g}, batch {batch}", rate, batch) for rate in RATES for batch in BATCHES]
PINS: dict[str, Any] = {"pp": RANKS, "tp": 1, "dp": 1, "recompute": "none", "precision": "fp32"}
SHARE = 3
"""Of what a model takes that is trained whole, a device's budget is this part."""


@dataclass(frozen=True)
class Ran:
    """Seconds of every round by form; the simulated makespan, and that by the passes' own measured times; the gain over
    two stages without microbatches by the closed form; shards of the jobs; bytes on a device by form, as predicted."""

    times: Mapping[str, Sequence[float]]
    simulated_s: float
    by_passes_s: float
    closed_form: float
    shards: str
    device_bytes: Mapping[str, int]


def batch_of(sizes: Sizes, batch: int, number: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, sizes.words, (batch, sizes.tokens), generator=torch.Generator().manual_seed(number))
    return {"tokens": tokens, "wanted": tokens}


def profiled(_: str, sizes: Sizes, budget_s: float, file: str) -> None:
    """What `shardwright profile --model` does, with this model on all ranks."""
    torch.set_num_threads(1)
    measured = registry.load("torch").profile(name="measured", budget_s=budget_s)
    cluster = shardwright.Cluster(measured.profile(), devices_per_node=measured.ranks)
    units = measure_units(
        torch_model(sizes), batch_of(sizes, max(BATCHES)), None, microbatches=BATCHES, cluster=cluster
    )
    if measured.rank == 0:
        replace(measured, units=units).save(file)


def timed(_: str, sizes: Sizes, profile: str, steps: int, rounds: int) -> Ran:
    """A round is every form once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sw.init({"pipeline_parallel_degree": RANKS, "microbatches": 1})
    cluster = shardwright.Cluster(profile, devices_per_node=RANKS)
    graph = shardwright.capture(torch_model(sizes), batch_of(sizes, 2))
    jobs = [
        shardwright.Job(name=name, model=graph, steps=steps, batch=batch, precision="fp32") for name, _, batch in LIST
    ]
    whole = [shardwright.plan_jobs([job], cluster).jobs[0] for job in jobs]
    alone = [own.device_bytes + own.shards[0].optimizer_bytes for own in whole]
    plan = shardwright.plan_jobs(jobs, cluster, budget_bytes=min(alone) // SHARE)
    forms: dict[str, Callable[[], float]] = {}
    passes: list[Any] = []
    forms["jobs"] = lambda: _jobs(sizes, graph, plan, steps, passes)
    device_bytes = {"jobs": plan.device_bytes, "a process a model": max(alone)}
    for microbatches in (1, 4, 8):
        name = f"1f1b, {microbatches} microbatches" if microbatches > 1 else "two stages, no microbatches"
        plans = {
            batch: shardwright.plan(
                graph, cluster, batch=batch, microbatch=batch // microbatches, schedule="1f1b", **PINS
            )
            for batch in BATCHES
        }
        forms[name] = _pipelines(sizes, plans, steps)
        device_bytes[name] = max(max(each.predicted.peak_memory_bytes) for each in plans.values())
    forms["a process a model"] = lambda: _processes(sizes, steps)
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, form in forms.items():
            times[name].append(form())
    # By the closed form: b = 2f, and every shard but the last runs its forward twice.
    work = sum(job.batch * steps * 3 for job in plan.jobs)
    again = sum(job.batch * steps * (len(job.shards) - 1) / len(job.shards) for job in plan.jobs)
    return Ran(
        times, plan.predicted.makespan_s, _by_passes(plan, passes), RANKS * work / (work + again),
        ", ".join(str(len(job.shards)) for job in plan.jobs), device_bytes,
    )  # fmt: skip


def _seconds(run: Callable[[], None]) -> float:
    """Seconds from all ranks ready to the last one done."""
    dist.barrier()
    began = time.perf_counter()
    run()
    dist.barrier()
    return time.perf_counter() - began


def _adamw(model: Any, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate)


def _jobs(sizes: Sizes, graph: Any, plan: Any, steps: int, passes: list[Any]) -> float:
    """The makespan of the jobs, without what is recorded before the first step."""

    def body(run: Any, inputs: list[torch.Tensor]) -> None:
        run.backward(run.model(*inputs), reduction="mean")

    training = {}
    for name, rate, batch in LIST:
        model = torch_model(sizes)
        data = [list(batch_of(sizes, batch, step).values()) for step in range(steps)]
        training[name] = JobTraining(graph=graph, model=model, optimizer=_adamw(model, rate), step=body, data=data)
    found = run_jobs(plan, training)
    assert all(not own.failure for own in found.jobs.values()), found.jobs
    passes.append(found.timeline)
    return found.timeline.makespan_s


def _by_passes(plan: Any, timelines: Sequence[Any]) -> float:
    """The makespan simulated from the mean time of each pass as measured, over all steps and rounds."""
    seconds: dict[tuple[int, int], list[float]] = {}
    for timeline in timelines:
        for lane, start, end in zip(timeline.actions, timeline.start_s, timeline.end_s, strict=True):
            for unit, a, b in zip(lane, start, end, strict=True):
                at = unit.number % len(plan.jobs[unit.job].passes)
                seconds.setdefault((unit.job, at), []).append(float(b - a))
    rows = [
        [sum(seconds[job, at]) / len(seconds[job, at]) for at in range(len(own.passes))] * own.steps
        for job, own in enumerate(plan.jobs)
    ]
    return float(shardwright.simulate_jobs(rows, plan.devices, plan.policy).makespan_s)


def _pipelines(sizes: Sizes, plans: Mapping[int, Any], steps: int) -> Callable[[], float]:
    """All models one after another on two stages, each recorded in a step before."""
    runs = []
    for _, rate, batch in LIST:
        model = sw.DistributedModel(torch_model(sizes), plan=plans[batch])
        optimizer = sw.DistributedOptimizer(_adamw(model, rate))
        runs.append((_train_step(), model, optimizer, batch))

    def train(count: int) -> None:
        for step, model, optimizer, batch in runs:
            for number in range(count):
                step(model, **batch_of(sizes, batch, number))
                optimizer.step()
                optimizer.zero_grad()

    train(1)
    return lambda: _seconds(lambda: train(steps))


def _train_step() -> Any:
    @sw.step
    def train_step(model: Any, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens, wanted)
        model.backward(loss, reduction="mean")
        return loss

    return train_step


def _processes(sizes: Sizes, steps: int) -> float:
    """Each rank trains three models whole: 32 samples a step on one, 40 on the other."""
    mine = [own for number, own in enumerate(LIST) if (number // 2 + number) % RANKS == dist.get_rank()]
    models = [(torch_model(sizes), rate, batch) for _, rate, batch in mine]

    def train() -> None:
        for model, rate, batch in models:
            optimizer = _adamw(model, rate)
            for number in range(steps):
                model(**batch_of(sizes, batch, number)).backward()
                optimizer.step()
                optimizer.zero_grad()

    return _seconds(train)
