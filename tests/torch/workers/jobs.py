"""Jobs on two ranks: exact, within the budget, and what ends one job or all."""

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import chosen, run_checks

from shardwright.backends.torch.machine.digests import fingerprint
from shardwright.core.errors import DisagreementError, PeerError, PlanError
from shardwright.torch import JobTraining, run_jobs
from tests.comparison import Comparison
from tests.torch.job_cases import CASES, SEED, compare_with_alone, made, tracked_passes

DEVICES = 2


def _everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def check_jobs_train_as_each_alone_within_the_budget() -> None:
    jobs = made(list(CASES), DEVICES)
    assert all(len(job.shards) >= 3 for job in jobs.plan.jobs), [len(job.shards) for job in jobs.plan.jobs]
    with tracked_passes() as peaks:
        found = run_jobs(jobs.plan, jobs.training, seed=SEED)
    planned = {(job.name, own.kind, own.shard): own.device_bytes for job in jobs.plan.jobs for own in job.passes}
    for key, held in peaks.items():
        assert held <= planned[key] <= jobs.plan.budget_bytes, (key, held, planned[key])
    # Both ranks ran passes of one job, and every pass ran once, one of a job after the other.
    lanes = found.timeline.actions
    ran = [unit for lane in lanes for unit in lane]
    assert sorted((unit.job, unit.number) for unit in ran) == [
        (n, at) for n, job in enumerate(jobs.plan.jobs) for at in range(len(job.passes) * job.steps)
    ]
    assert all({unit.job for unit in lane} for lane in lanes)
    assert {unit.job for unit in lanes[0]} & {unit.job for unit in lanes[1]}
    times: dict[int, list[tuple[float, float, int]]] = {}
    for lane, starts, ends in zip(lanes, found.timeline.start_s, found.timeline.end_s, strict=True):
        for unit, start, end in zip(lane, starts, ends, strict=True):
            times.setdefault(unit.job, []).append((float(start), float(end), unit.number))
    for spans in times.values():
        spans.sort()
        assert [number for *_, number in spans] == list(range(len(spans)))
        assert all(end <= start for (_, end, _), (start, *_) in pairwise(spans))
    # The result is the same on both ranks, and so are models and states.
    prints = {name: _prints(given) for name, given in jobs.training.items()}
    first, second = _everywhere((prints, found.jobs, [list(map(str, lane)) for lane in lanes]))
    odd = [(name, key) for name, of in first[0].items() for key in of if of[key] != second[0][name][key]]
    assert not odd, odd[:5]
    assert first == second
    compared = Comparison("jobs")
    if dist.get_rank() == 0:
        compare_with_alone(compared, found, jobs)
        compared.require()
    # Memory is each rank's own from then on.
    weight = next(iter(jobs.training["bert"].model.parameters()))
    with torch.no_grad():
        weight.add_(dist.get_rank() + 1.0)
    values = _everywhere(float(weight.detach().flatten()[0]))
    assert abs(values[1] - values[0] - 1.0) < 1e-5, values


def _prints(given: JobTraining) -> dict[str, int]:
    """Digests of a trained model's tensors and of its optimizer's states."""
    found = dict(given.model.state_dict())
    for name, parameter in given.model.named_parameters():
        found |= {f"{name}: {state}": held for state, held in given.optimizer.state[parameter].items()}
    return {name: fingerprint(tensor) for name, tensor in found.items()}


def check_a_job_that_fails_ends_alone_on_all_ranks() -> None:
    jobs = made(["bert", "resnet", "gpt2"], DEVICES)
    given = jobs.training
    before = {name: value.clone() for name, value in given["resnet"].model.named_parameters()}
    odd = [[t.clone() for t in batch] for batch in given["resnet"].data]
    odd[0][0][0, 0, 0, 0] = float("nan")
    changed = {
        "resnet": replace(given["resnet"], data=odd),
        "gpt2": replace(given["gpt2"], data=list(given["gpt2"].data)[:2]),
    }
    found = run_jobs(jobs.plan, given | changed, seed=SEED)
    assert found.jobs["bert"].failure == ""
    assert len(found.jobs["bert"].losses) == 3
    said = found.jobs["resnet"].failure
    assert said.startswith("step 0: NonFiniteError: a loss is not finite (nan"), said
    assert found.jobs["gpt2"].failure == "step 2: PlanError: its data have ended, and it takes 3 steps"
    # The loss was seen before anything was updated from it.
    after = dict(given["resnet"].model.named_parameters())
    Comparison("weights").equal({n: after[n].detach() for n in before}, before).require()
    first, second = _everywhere(found.jobs)
    assert first == second


def check_what_differs_between_ranks_is_refused() -> None:
    jobs = made(["bert", "resnet"], DEVICES)
    with pytest.raises(DisagreementError, match="the seed"):
        run_jobs(jobs.plan, jobs.training, seed=SEED + dist.get_rank())
    names = ["bert"] if dist.get_rank() else ["bert", "resnet"]
    with pytest.raises((PlanError, DisagreementError), match="'resnet': expected what each job of the plan trains"):
        run_jobs(jobs.plan, {name: jobs.training[name] for name in names}, seed=SEED)
    shuffled = replace(jobs.training["bert"], data=list(jobs.training["bert"].data)[:: 1 - 2 * dist.get_rank()])
    said = "job 'bert': the data of step 0 are others than in another process"
    with pytest.raises((DisagreementError, PeerError), match=said):
        run_jobs(jobs.plan, jobs.training | {"bert": shuffled}, seed=SEED)
    jobs = made(["bert", "resnet"], DEVICES)
    for group in jobs.training["resnet"].optimizer.param_groups:
        group["weight_decay"] += 0.25 * dist.get_rank()
    said = "job 'resnet': the optimizer's options, or the parameters that they are of, are others than in another"
    with pytest.raises((DisagreementError, PeerError), match=said):
        run_jobs(jobs.plan, jobs.training, seed=SEED)


CHECKS = (
    check_jobs_train_as_each_alone_within_the_budget,
    check_a_job_that_fails_ends_alone_on_all_ranks,
    check_what_differs_between_ranks_is_refused,
)

if __name__ == "__main__":
    torch.manual_seed(0)
    run_checks(chosen(CHECKS))
    sys.exit(0)
