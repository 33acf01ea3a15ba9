"""Jobs run shard by shard from the host: every weight, buffer and optimizer state of training alone."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.backends.torch.jobs.job_run import JobRun
from shardwright.backends.torch.machine.host_store import is_in_file
from shardwright.backends.torch.program.randomness import Streams, kept_generators
from shardwright.core.errors import LossError, PlanError
from shardwright.core.tables.rank_tables import UNCOUNTED_BYTES
from shardwright.torch import run_jobs
from tests.comparison import Comparison
from tests.torch.job_cases import (
    BATCH,
    CASES,
    CPU,
    MICROBATCH,
    SEED,
    STEPS,
    compare_with_alone,
    made,
    peaks_of_steps,
    tracked_passes,
)

NAMES = ("t5", "resnet")


def planned(model: nn.Module, sample: dict[str, torch.Tensor], given: dict[str, Any]) -> tuple[Any, Any]:
    """The plan of a job in several shards, with activations by turns computed again, on the host, and kept."""
    graph = sw.capture(model, sample)
    job = sw.Job(
        name="a", model=graph, steps=STEPS, batch=BATCH, microbatch=MICROBATCH, precision="fp32", **given
    )  # fmt: skip
    whole = sw.plan_jobs([job], sw.Cluster("cpu", devices_per_node=2))
    budget = whole.jobs[0].device_bytes // 3
    found = sw.plan_jobs([job], sw.Cluster("cpu", devices_per_node=2), budget_bytes=budget).jobs[0]
    labels = ("recompute", "offload", "keep")
    shards = [replace(shard, activations=labels[n % 3]) for n, shard in enumerate(found.shards[:-1])]
    return replace(found, shards=(*shards, found.shards[-1])), graph


@pytest.mark.parametrize("case", NAMES)
def test_a_job_in_shards_trains_as_the_whole_model(case: str) -> None:
    torch.manual_seed(0)
    own_case = CASES[case]
    make, names, optimizer_of, given = own_case.make, own_case.names, own_case.optimizer_of, own_case.options
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
        (recorded,) = run.recordings.known.values()
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


@pytest.mark.parametrize("case", NAMES)
def test_no_pass_holds_more_than_planned_and_the_fullest_little_less(case: str) -> None:
    jobs = made([case], devices=2)
    (job,), peaks = jobs.plan.jobs, peaks_of_steps(jobs, case)
    for own in job.passes:
        assert peaks[case, own.kind, own.shard] <= own.device_bytes, own
    assert job.device_bytes - UNCOUNTED_BYTES <= 1.05 * max(peaks.values())


def test_a_model_of_four_times_its_budget_trains_on_one_device() -> None:
    jobs = made(["t5"], devices=1, share=4)
    with tracked_passes() as peaks:
        found = run_jobs(jobs.plan, jobs.training, seed=SEED)
    planned = {(job.name, own.kind, own.shard): own.device_bytes for job in jobs.plan.jobs for own in job.passes}
    assert all(held <= planned[key] <= jobs.plan.budget_bytes for key, held in peaks.items())
    assert len(peaks) == len(planned)
    compared = Comparison("over its budget")
    compare_with_alone(compared, found, jobs)
    compared.require()
