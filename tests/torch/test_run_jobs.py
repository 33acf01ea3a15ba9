"""A list of jobs on one device: the order of the policy, the weights of training alone, and failures of one job."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.core.errors import ClusterError, MissingCapabilityError, PlanError
from shardwright.torch import JobTraining, run_jobs
from tests.comparison import Comparison

BATCH, STEPS = 8, 3


class Blocks(nn.Module):
    """A stack of residual blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(5))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def step(run: Any, inputs: list[torch.Tensor]) -> None:
    run.backward(run.model(*inputs), reduction="mean")


Optimizer = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, tuple[int, Optimizer, dict[str, Any]]] = {
    "clipped": (24, lambda p: torch.optim.AdamW(p, lr=1e-2), {"clip_norm": 0.1}),
    "momentum": (32, lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9), {"optimizer": "momentum"}),
    "plain": (16, lambda p: torch.optim.AdamW(p, lr=1e-2), {}),
}


def made(devices: int = 1, steps: int = STEPS) -> tuple[sw.JobsPlan, dict[str, JobTraining]]:
    torch.manual_seed(0)
    cluster = sw.Cluster("cpu", devices_per_node=devices)
    jobs, given = [], {}
    for name, (width, optimizer_of, options) in KINDS.items():
        model = Blocks(width)
        graph = sw.capture(model, torch.zeros(2, width), loss=lambda out: out)
        jobs.append(sw.Job(name=name, model=graph, steps=steps, batch=BATCH, microbatch=4, precision="fp32", **options))
        data = [torch.randn(BATCH, width) for _ in range(steps)]
        given[name] = JobTraining(
            graph=graph, model=model, optimizer=optimizer_of(model.parameters()), step=step, data=data
        )
    whole = sw.plan_jobs(jobs, cluster)
    return sw.plan_jobs(jobs, cluster, budget_bytes=whole.device_bytes * 2 // 3), given


def test_jobs_train_in_the_order_of_the_policy_to_the_weights_of_training_alone() -> None:
    plan, given = made()
    plain = {name: copy.deepcopy(own.model) for name, own in given.items()}
    assert max(len(job.shards) for job in plan.jobs) > 1
    found = run_jobs(plan, given)
    simulated = sw.simulate_jobs(
        [[own.seconds(beside=False) for own in job.passes] * job.steps for job in plan.jobs], 1, plan.policy
    )
    assert list(found.timeline.actions[0]) == list(simulated.actions[0])
    compared = Comparison("jobs")
    for name, (_, optimizer_of, options) in KINDS.items():
        model, other = plain[name], optimizer_of(plain[name].parameters())
        assert found.jobs[name].failure == ""
        compared.where = name
        for batch, losses in zip(given[name].data, found.jobs[name].losses, strict=True):
            expected = []
            for part in batch.split(4):
                loss = model(part)
                (loss / 2).backward()
                expected.append(loss.item())
            if "clip_norm" in options:
                nn.utils.clip_grad_norm_(model.parameters(), options["clip_norm"])
            other.step()
            other.zero_grad()
            compared.losses(losses, expected)
        compared.values(given[name].model.state_dict(), model.state_dict(), relative=1e-4, absolute=1e-6, what=name)
    compared.require()


def test_a_job_that_fails_ends_alone() -> None:
    plan, given = made()
    short, odd = list(given["clipped"].data)[:2], list(given["momentum"].data)
    odd[1] = odd[1] * float("nan")
    found = run_jobs(
        plan,
        given | {"clipped": replace(given["clipped"], data=short), "momentum": replace(given["momentum"], data=odd)},
    ).jobs
    assert found["clipped"].failure == "step 2: PlanError: its data have ended, and it takes 3 steps"
    assert "step 1: NonFiniteError: a loss is not finite" in found["momentum"].failure
    assert [len(found[name].losses) for name in KINDS] == [2, 1, 3]
    assert found["plain"].failure == ""


def test_what_is_not_run_is_refused() -> None:
    plan, given = made()
    with pytest.raises(PlanError, match="'plain': expected what each job of the plan trains"):
        run_jobs(plan, {name: given[name] for name in ("clipped", "momentum")})
    with pytest.raises(PlanError, match="jobs 'clipped' and 'plain' train one model"):
        run_jobs(plan, given | {"plain": replace(given["plain"], model=given["clipped"].model)})
    with pytest.raises(PlanError, match=r"job 'plain' cannot be saved at .*: Not a directory"):
        run_jobs(replace(plan, jobs=(*plan.jobs[:2], replace(plan.jobs[2], output=f"{__file__}/out"))), given)
    with pytest.raises(MissingCapabilityError, match="policy='optimum' is for simulations"):
        run_jobs(replace(plan, policy="optimum"), given)
    with pytest.raises(ClusterError, match="planned for 2 devices, and this is one process: start one for each device"):
        run_jobs(replace(plan, cluster=sw.Cluster("cpu", devices_per_node=2)), given)


MODELS = """
import torch
from tests.torch.test_run_jobs import Blocks

def model():
    torch.manual_seed(0)
    return Blocks(24), torch.zeros(2, 24), lambda out: out

def batches():
    torch.manual_seed(1)
    return [torch.randn(8, 24) for _ in range(3)]

def training(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
"""
JOBS = """
[[jobs]]
name = "a"
model = "models.py:model"
steps = 3
batch = 8
microbatch = 4
clip_norm = 0.1
learning_rate = 1e-2
reduction = "mean"
data = "models.py:batches"
output = "{0}/runs/a"

[[jobs]]
name = "b"
model = "models.py:model"
steps = 3
batch = 8
optimizer = "sgd"
training = "models.py:training"
data = "models.py:batches"
output = "{0}/runs/b"

[[jobs]]
name = "short"
model = "models.py:model"
steps = 3
batch = 8
data = "models.py:batches"
"""


def test_a_file_of_jobs_is_trained_and_saved(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    (tmp_path / "jobs.toml").write_text(JOBS.format(tmp_path), encoding="utf-8")
    ran = CliRunner().invoke(app, ["jobs", "run", str(tmp_path / "jobs.toml"), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)["jobs"]
    assert [own["failure"] for own in found.values()] == ["", "", ""]
    torch.manual_seed(1)
    data = [torch.randn(8, 24) for _ in range(3)]
    compared = Comparison("jobs run")
    for name, rate, decay, parts in (("a", 1e-2, 1.0, 4), ("b", 0.1, 0.5, 8)):
        torch.manual_seed(0)
        model = Blocks(24)
        kind = torch.optim.AdamW if name == "a" else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=rate)
        for batch in data:
            for part in batch.split(parts):
                (model(part) * parts / 8).backward()
            if name == "a":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= decay
        compared.where = name
        saved = load_file(tmp_path / "runs" / name / "model.safetensors")
        compared.values(saved, dict(model.state_dict()), relative=1e-4, absolute=1e-6, what="weights")
        state = torch.load(tmp_path / "runs" / name / "optimizer.pt", weights_only=True)
        compared.values(state["state"], optimizer.state_dict()["state"], relative=1e-4, absolute=1e-6, what="states")
        compared.equal(state["param_groups"][0]["lr"], optimizer.param_groups[0]["lr"], what="learning rates")
        assert json.loads((tmp_path / "runs" / name / "losses.json").read_text()) == found[name]["losses"]
    compared.require()
    text = (tmp_path / "jobs.toml").read_text(encoding="utf-8")
    for before, after, said in (
        ('data = "models.py:batches"\noutput', "output", "job 'a' has no data"),
        ('reduction = "mean"\n', "", "whether its loss is a mean over samples is not said"),
        ('"sgd"\ntraining = "models.py:training"', '"lion"', "PyTorch has no optimizer 'lion'"),
        ("models.py:training", "models.py:batches", "its training function failed"),
    ):
        (tmp_path / "jobs.toml").write_text(text.replace(before, after, 1), encoding="utf-8")
        ran = CliRunner().invoke(app, ["jobs", "run", str(tmp_path / "jobs.toml")])
        assert ran.exit_code != 0, said
        assert said in " ".join(f"{ran.output} {ran.exception}".split()), ran.output
