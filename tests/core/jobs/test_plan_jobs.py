"""Plans of jobs: their parts, their file, what is refused, and the command line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError, PlanFileError
from shardwright.core.jobs.finish import simulated
from shardwright.core.jobs.shard_pass import ShardPass, alone
from tests.cli.conftest import TORCH_MODELS, run
from tests.core.toy import Builder, decoder

GRAPH = replace(decoder(layers=6, hidden=64, vocabulary=256), memory_traits=MemoryTraits(gradients_when_made=True))
WHOLE = 4 * 4 * GRAPH.parameter_count()
"""Bytes of parameters, gradients and AdamW's states."""


def v100(devices: int = 2, **changes: object) -> sw.Cluster:
    return sw.Cluster(replace(load_profile("v100").device, **changes), devices_per_node=devices)


def jobs(count: int = 3, **given: object) -> list[sw.Job]:
    usual: dict[str, object] = {"model": GRAPH, "steps": 5, "batch": 4, "precision": "fp32"}
    return [sw.Job(name=f"job {n}", **(usual | given)) for n in range(count)]  # type: ignore[arg-type]


@pytest.fixture
def plan() -> sw.JobsPlan:
    clipped = [replace(job, clip_norm=1, output=f"runs/{job.name}") for job in jobs(1)]
    return sw.plan_jobs([*clipped, *jobs(3)[1:]], v100(), budget_bytes=WHOLE // 2)


def test_a_plan_of_jobs(plan: sw.JobsPlan) -> None:
    for job in plan.jobs:
        shards = len(job.shards)
        assert shards > 2
        assert [shard.end_unit for shard in job.shards[:-1]] == [shard.first_unit for shard in job.shards[1:]]
        passes = [own for own in job.passes if own.kind != "update"]
        assert len(passes) == 2 * shards - 1
        assert job.device_bytes + plan.buffer_bytes <= plan.device_bytes <= plan.budget_bytes
        assert job.host.parameters == 4 * GRAPH.parameter_count()
        assert job.host.optimizer == 8 * GRAPH.parameter_count()
        assert max(own.buffer_bytes for own in job.passes) <= plan.buffer_bytes
    clipped, plain, _ = plan.jobs
    assert len(clipped.passes) == 3 * len(clipped.shards) - 1
    assert clipped.waiting.host_bytes == clipped.host.gradients == 4 * GRAPH.parameter_count()
    assert clipped.waiting.step_s > 0 < clipped.waiting.copied_bytes
    assert "norm of 1 " in clipped.waiting.reason
    assert plain.waiting.reason == ""
    assert plain.host.gradients == 4 * 256 * 64
    ends = dict(plan.predicted.finish_s)
    assert plan.predicted.makespan_s >= max(ends.values())
    work = [job.run_s * job.steps for job in plan.jobs]
    assert plan.predicted.makespan_s >= max(sum(work) / 2, *work)
    assert ends["job 0"] >= work[0]


def test_one_device_keeps_activations_where_there_is_room() -> None:
    kept: dict[int, int] = {1: 0, 2: 0}
    steps = {}
    for sixteenths in range(7, 13):
        for devices in kept:
            cluster = v100(devices, host_link_bandwidth_bytes_per_s=4e8)
            plan = sw.plan_jobs(jobs(1), cluster, budget_bytes=WHOLE * sixteenths // 16)
            assert plan.device_bytes <= plan.budget_bytes
            kept[devices] += plan.jobs[0].kept_bytes
            steps[devices] = sum(own.seconds(beside=True) for own in plan.jobs[0].passes)
        assert steps[1] <= steps[2]
    assert kept[2] == 0
    assert kept[1] > 0


def test_activations_are_computed_again_where_the_host_has_no_room_for_them() -> None:
    roomy = sw.plan_jobs(jobs(1), v100(1), budget_bytes=WHOLE // 2)
    host = roomy.jobs[0].host
    assert host.activations > 0
    tight = sw.plan_jobs(jobs(1), v100(1), budget_bytes=WHOLE // 2, host_memory_bytes=host.total - 1)
    assert tight.jobs[0].host.activations == 0
    assert tight.host_bytes < host.total
    assert tight.jobs[0].run_s > roomy.jobs[0].run_s


@pytest.mark.parametrize("budget", [WHOLE // 2, WHOLE])
def test_of_several_devices_every_backward_may_run_on_another_than_its_forward(budget: int) -> None:
    alone, several = (sw.plan_jobs(jobs(1), v100(devices), budget_bytes=budget) for devices in (1, 2))
    assert {shard.activations for shard in alone.jobs[0].shards[:-1]} & {"offload", "keep"}
    assert {shard.activations for shard in several.jobs[0].shards[:-1]} == {"recompute"}
    assert several.jobs[0].host.activations == several.jobs[0].kept_bytes == 0


@pytest.mark.parametrize("policy", ["sharded-lrtf", "shortest", "fifo"])
def test_ends_of_long_lists_are_those_of_all_their_passes(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of jobs with fewer steps than a simulated pass stands for."""
    given = [*jobs(2, steps=400), sw.Job(name="short", model=GRAPH, steps=1, batch=4, precision="fp32")]
    whole = sw.plan_jobs(given, v100(1), budget_bytes=WHOLE // 2, policy=policy)
    monkeypatch.setattr("shardwright.core.jobs.finish.MOST_SIMULATED", 400)
    coarse = whole.simulated().predicted
    for (name, end_s), (_, exact_s) in zip(coarse.finish_s, whole.predicted.finish_s, strict=True):
        assert end_s == pytest.approx(exact_s, abs=0.03 * whole.predicted.makespan_s), name


def test_a_job_ends_when_its_last_pass_is_copied_out() -> None:
    found = simulated(
        [([a_pass(2.0, 1.0, 0.5)], 1)], 1, "sharded-lrtf", double_buffering=True, copies_beside=True,
    )  # fmt: skip
    assert found.finish_s == (3.5,)
    assert found.makespan_s == 3.5


def test_steps_in_fp16_wait_for_all_gradients() -> None:
    found = sw.plan_jobs(jobs(1, precision="fp16"), v100(), budget_bytes=WHOLE // 2).jobs[0]
    assert "overflowed" in found.waiting.reason
    assert {own.kind for own in found.passes} >= {"backward", "update"}


def test_plan_files_come_back_as_they_were(plan: sw.JobsPlan, tmp_path: Path) -> None:
    path = tmp_path / "jobs.json"
    plan.save(path)
    assert sw.JobsPlan.load(path) == plan
    document = json.loads(path.read_text())
    for where, edited in (("makespan_s", 1.0), ("finish_s", {**document["predicted"]["finish_s"], "job 1": 1e-3})):
        wrong = document | {"predicted": document["predicted"] | {where: edited}}
        path.write_text(json.dumps(wrong))
        assert sw.JobsPlan.load(path).is_stale
        assert "not simulated since an edit" in sw.JobsPlan.load(path).summary()
        assert sw.JobsPlan.load(path).simulated() == plan
    document["policy"], document["jobs"][1]["steps"] = "fifo", 50
    path.write_text(json.dumps(document))
    edited = sw.JobsPlan.load(path)
    assert edited.is_stale
    again = edited.simulated()
    assert not again.is_stale
    assert dict(again.predicted.finish_s)["job 1"] > 5 * dict(plan.predicted.finish_s)["job 1"]
    shown = run("jobs", "show", path)
    assert shown.code == 0, shown.err
    assert "simulated anew" in shown.out
    assert "Shards of job 2" in shown.out
    assert run("jobs", "show", path, "--json").document["predicted"]["counted_for"] == again.predicted.counted_for


EDITS = {
    "version": (lambda d: d.update(version=2), "version is 2"),
    "format": (lambda d: d.update(format="shardwright-plan"), "a plan of one model"),
    "budget above the device": (lambda d: d.update(budget_bytes=1 << 40), "may use"),
    "budget below the shards": (lambda d: d.update(budget_bytes=1000), "the shards take"),
    "host": (lambda d: d.update(host_memory_bytes=10), "0 of them fit"),
    "policy": (lambda d: d.update(policy="sharded"), "did you mean 'sharded-lrtf'"),
    "buffer": (lambda d: d.update(buffer_bytes=d["buffer_bytes"] - 1), "digest"),
    "no jobs": (lambda d: d.update(jobs=[]), "there are no jobs"),
    "names": (lambda d: d["jobs"][0].update(name="job 1"), "several jobs have this name"),
    "outputs": (lambda d: d["jobs"][1].update(output="runs/./job 0"), "would overwrite the other"),
    "data": (lambda d: d["jobs"][1].update(batches=4), "have 4 batches, and it takes 5 steps"),
    "steps": (lambda d: d["jobs"][1].update(steps=0), "greater than or equal to 1"),
    "microbatch": (lambda d: d["jobs"][1].update(microbatch=3), "not a multiple"),
    "a gap": (
        lambda d: d["jobs"][0]["shards"][1].update(first_unit=d["jobs"][0]["shards"][1]["first_unit"] + 1),
        "jobs.0.shards",
    ),
    "a pass less": (lambda d: d["jobs"][2]["passes"].pop(), "jobs.2.passes"),
    "bytes": (lambda d: d["jobs"][0]["passes"][0].update(device_bytes=1), "digest"),
    "seconds": (lambda d: d["jobs"][0]["passes"][0].update(run_s=float("nan")), "passes"),
    "unknown key": (lambda d: d["jobs"][0].update(stpes=3), "stpes"),
    "ends": (lambda d: d["predicted"]["finish_s"].update({"job 1": -1.0}), "predicted.finish_s"),
    "a policy without copies": (lambda d: d.update(policy="optimum"), "knows no copies"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_wrong_edits_are_refused(plan: sw.JobsPlan, tmp_path: Path, edit: str) -> None:
    change, said = EDITS[edit]
    document = plan.to_document()
    document = json.loads(json.dumps(document))
    change(document)
    path = tmp_path / "jobs.json"
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match=said) as refused:
        sw.JobsPlan.load(path)
    assert str(path) in str(refused.value)


class Sized:
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("given", "asked", "said"),
    [
        ([], {}, "there are no jobs"),
        (jobs(1) * 2, {}, "'job 0': several jobs have this name"),
        (jobs(2, output="out"), {}, "'job 0' and 'job 1' are both saved at out"),
        (jobs(1, data=Sized()), {}, "its data have 4 batches, and it takes 5 steps: give steps=4"),
        (jobs(1), {"budget_bytes": 1 << 40}, "a model may use 33285996544 bytes of a v100"),
        (jobs(1), {"budget_bytes": 0}, "expected a whole number of at least 1"),
        (jobs(3), {"host_memory_bytes": WHOLE * 3 // 2}, "2 of them fit, the smallest: 'job 0', 'job 1'"),
        (jobs(1), {"budget_bytes": 100_000}, r"operation \S+ of \S+ has operands and results of .* more than a device"),
        (jobs(1), {"budget_bytes": WHOLE // 7}, r"unit \d+ \(.*\) takes .* too many"),
        (jobs(1), {"policy": "best"}, "known: "),
        (jobs(1), {"policy": "optimum"}, "'optimum' knows no copies that run beside passes: take one of sharded-lrtf"),
        (jobs(1), {"host_memory_bytes": "3"}, "host_memory_bytes='3': expected a whole number"),
        (jobs(1), {"double_buffering": "no"}, "double_buffering='no'"),
        (GRAPH, {}, "takes a list of jobs"),
        ([GRAPH], {}, "Graph is none"),
    ],
)
def test_what_cannot_be_planned_is_refused(given: object, asked: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        sw.plan_jobs(given, v100(), **asked)  # type: ignore[arg-type]


def test_a_model_of_one_unit_is_not_cut() -> None:
    b = Builder()
    x = b.input("x", -1, 16, 256, dtype="float32")
    from shardwright.core.rules import op_rules as L

    y = b.linear(x, b.parameter("w", 256, 256), None, 256)
    graph = b.build(b.op("reduction", "mean", [y], (), L.reduction(b.shape(y), [0, 1, 2])), name="One")
    with pytest.raises(PlanError, match="One is one unit, which no cut divides"):
        sw.plan_jobs(jobs(1, model=graph), v100(), budget_bytes=600_000)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": " "}, "name=' '"),
        ({"steps": 0}, "steps=0"),
        ({"batch": 4, "microbatch": 3}, "batch=4 is not a multiple of microbatch=3"),
        ({"optimizer": "adam-w"}, "did you mean 'adamw'"),
        ({"clip_norm": 0.0}, "clip_norm=0.0"),
        ({"model": "gpt2"}, "expected a captured graph"),
        ({"output": ""}, "output=''"),
    ],
)
def test_a_job_is_checked_when_it_is_made(given: dict[str, object], said: str) -> None:
    usual: dict[str, object] = {"name": "a", "model": GRAPH, "steps": 5, "batch": 4}
    with pytest.raises(PlanError, match=said):
        sw.Job(**(usual | given))  # type: ignore[arg-type]


def test_devices_that_differ_are_refused() -> None:
    from shardwright.core.cluster.node_group import NodeGroup

    groups = [NodeGroup(load_profile(name).device, 1, 1, load_profile(name).intra_node) for name in ("v100", "t4")]
    with pytest.raises(PlanError, match="v100, t4"):
        sw.plan_jobs(jobs(1), sw.Cluster.of_groups(groups, "ethernet-100g"))
    with pytest.raises(PlanError, match="memory of one host, and these devices are in 2 nodes"):
        sw.plan_jobs(jobs(1), sw.Cluster("v100", nodes=2))


def a_pass(run_s: float, in_s: float, out_s: float) -> ShardPass:
    return ShardPass("backward", 0, run_s, in_s, out_s, 1, 1, 1, 1)


def test_copies_beside_longer_passes_are_hidden() -> None:
    """Of equal passes and copies half as long, all but the first and last are hidden; of longer copies what is left."""
    for times in (2, 10):
        half = alone([a_pass(2.0, 1.0, 0.5)] * 4, times)
        assert half.makespan_s == pytest.approx(2.0 * 4 * times + 1.5)
    long = alone([a_pass(1.0, 3.0, 0.0)], 10)
    assert long.makespan_s == pytest.approx(3.0 * 10 + 1.0)
    # A buffer is filled only after it was emptied: the copies of two passes take turns with its contents.
    both = alone([a_pass(1.0, 1.0, 2.0)], 100)
    assert 2.0 <= both.makespan_s / 100 <= 3.1


def test_a_file_of_jobs_is_planned(tmp_path: Path) -> None:
    (tmp_path / "torch_models.py").write_text(TORCH_MODELS)
    listed = tmp_path / "jobs.toml"
    listed.write_text(
        '[[jobs]]\nname = "a"\nmodel = "torch_models.py:with_loss"\nsteps = 3\nbatch = 4\ndata = "data.py:three"\n'
        '[[jobs]]\nname = "b"\nmodel = "torch_models.py:with_loss"\nsteps = 9\nbatch = 8\nclip_norm = 1\n'
        'data = "data.py:unknown"\nprecision = "fp32"\noutput = "b"\n'
    )
    (tmp_path / "data.py").write_text("def three():\n    return [1, 2, 3]\n\ndef unknown():\n    yield 1\n")
    saved = tmp_path / "plan.json"
    command = ("jobs", "plan", listed, "--cluster", "cpu", "--devices-per-node", 2)
    ran = run(*command, "--budget-bytes", 100_000, "-o", saved)
    assert ran.code == 0, ran.err
    plan = sw.JobsPlan.load(saved)
    assert [job.batches for job in plan.jobs] == [3, None]
    assert [job.clip_norm for job in plan.jobs] == [None, 1.0]
    assert "updates wait" in ran.out
    assert "Jobs" in ran.out
    assert run(*command, "--json").document["format"] == "shardwright-jobs"
    (tmp_path / "data.py").write_text("def three():\n    return [1, 2]\n\ndef unknown():\n    return 3\n")
    assert "job 'b': " in run(*command).flat_err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no jobs"),
        ("[[jobs]]\nname = 1", "jobs.0"),
        ('[[jobs]]\nname = "a"\nmodel = "m.py:f"\nsteps = 1\nbatch = 1\nstep = 3', "did you mean 'steps'"),
        ("job = 3", "did you mean 'jobs'"),
        ("[[jobs]", "not a TOML"),
        ('[[jobs]]\nname = "a"\nmodel = "none.py:f"\nsteps = 1\nbatch = 1', "there is no file"),
    ],
)
def test_files_of_no_jobs_are_refused(tmp_path: Path, text: str, said: str) -> None:
    listed = tmp_path / "jobs.toml"
    listed.write_text(text)
    ran = run("jobs", "plan", listed, "--cluster", "cpu")
    assert ran.code == 2
    assert said in ran.flat_err
