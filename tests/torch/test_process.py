"""Ranks from the environments of launchers, and the checks of `init` that need no process group."""

import os
import sys

import pytest
import torch
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright
import shardwright.torch as sw
from shardwright.backends.torch.machine import process
from shardwright.backends.torch.machine.mesh import bind
from shardwright.backends.torch.machine.process import Launch, first_node, read_launch
from shardwright.backends.torch.machine.rendezvous import _listen
from shardwright.core.errors import ClusterError, MissingCapabilityError, ShardwrightError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.schedule import Schedule
from shardwright.torch.config import read_config
from tests.torch.launch import WORKERS, run

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "host0", "MASTER_PORT": "1234"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-007,9],cpu1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


def test_torchrun() -> None:
    assert read_launch(TORCHRUN) == Launch("torchrun", 3, 8, 1, "host0", 1234)


def test_slurm_takes_the_first_host_of_the_step() -> None:
    assert read_launch(SLURM) == Launch("srun", 5, 16, 1, "gpu003", 29500)


def test_a_slurm_batch_script_is_one_process() -> None:
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}).world_size == 1


def test_open_mpi_knows_its_own_host_only_on_one_node() -> None:
    assert read_launch(OPEN_MPI) == Launch("mpirun", 2, 4, 0, None)
    assert read_launch(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).master_address == "127.0.0.1"
    assert read_launch(OPEN_MPI | {"MASTER_ADDR": "head"}).master_address == "head"


def test_mpich() -> None:
    assert read_launch(PMI) == Launch("mpirun", 1, 4, 1, "127.0.0.1")


def test_torchrun_comes_before_the_scheduler_that_started_it() -> None:
    assert read_launch(SLURM | TORCHRUN).launcher == "torchrun"
    assert read_launch(SLURM | OPEN_MPI).launcher == "mpirun"


def test_without_a_launcher_the_world_is_one_process() -> None:
    assert read_launch({}) == Launch("none", 0, 1, 0, None)


def test_a_value_that_is_no_number_is_named() -> None:
    with pytest.raises(ClusterError, match="WORLD_SIZE='many'"):
        read_launch(TORCHRUN | {"WORLD_SIZE": "many"})


def test_a_rank_outside_its_world_is_refused() -> None:
    with pytest.raises(ClusterError, match="rank 8 of 8"):
        read_launch(TORCHRUN | {"RANK": "8"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("gpu7", "gpu7"), ("n[01-04]", "n01"), ("a1,b2", "a1"), ("r[2,5]x,q", "r2x")]
)
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


@pytest.mark.parametrize(("address", "interface"), [("127.0.0.1", "lo"), ("localhost", "lo"), ("10.1.2.3", None)])
def test_sockets_of_one_host_are_bound_to_the_loopback_interface(
    monkeypatch: pytest.MonkeyPatch, address: str, interface: str | None
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in (*names, "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")  # so that what the test leaves is taken back
        monkeypatch.delenv(name)
    seen: list[dict[str, str | None]] = []
    monkeypatch.setattr(process, "meet", lambda meeting: torch._C._distributed_c10d.HashStore())
    monkeypatch.setattr(process, "wait_longer", lambda group: None)
    monkeypatch.setattr(
        torch.distributed, "init_process_group",
        lambda *args, **keys: seen.append({name: os.environ.get(name) for name in names}),
    )  # fmt: skip
    process.start(Launch("torchrun", 0, 2, 0, address, 1234), torch.device("cpu"), 1.0)
    assert seen == [dict.fromkeys(names, interface)]


def test_the_store_listens_where_the_ranks_were_told() -> None:
    with _listen("127.0.0.1", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with _listen("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ShardwrightError, match="did you mean 'pipeline_parallel_degree'"):
        read_config({"pipeline_paralel_degree": 2})


def test_an_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ShardwrightError, match="did you mean '1f1b'"):
        read_config({"pipeline": "1f1"})


def test_partitions_is_another_name_of_the_degree() -> None:
    assert read_config({"partitions": 2}).pipeline_parallel_degree == 2
    with pytest.raises(ShardwrightError, match="both given"):
        read_config({"partitions": 2, "pipeline_parallel_degree": 2})


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_degrees_are_whole_numbers(value: object) -> None:
    with pytest.raises(ShardwrightError, match="expected a whole number"):
        read_config({"pipeline_parallel_degree": value})


def test_a_degree_that_does_not_divide_gives_both_numbers() -> None:
    with pytest.raises(ShardwrightError, match=r"pipeline_parallel_degree=3 .* do not divide the 4 ranks"):
        read_config({"pipeline_parallel_degree": 3}).mesh(4)


def test_replicas_are_asked_for() -> None:
    with pytest.raises(ShardwrightError, match="set 'ddp': True"):
        read_config({"pipeline_parallel_degree": 2}).mesh(4)
    assert read_config({"pipeline_parallel_degree": 2, "ddp": True}).mesh(4).sizes == (2, 2, 1)


def test_placement_strategies_order_the_axes() -> None:
    assert read_config({"placement_strategy": "cluster"}).axes == ("dp", "pp", "tp")
    assert read_config({"placement_strategy": "spread"}).axes == ("tp", "pp", "dp")
    with pytest.raises(ShardwrightError, match="expected cluster, spread"):
        read_config({"placement_strategy": "DPX"})


def test_what_this_version_lacks_is_refused_by_name_and_its_neutral_value_taken() -> None:
    read_config({"fp16_params": False, "auto_partition": True})
    with pytest.raises(MissingCapabilityError, match="fp16_params=True"):
        read_config({"fp16_params": True})


def test_what_has_no_effect_is_said() -> None:
    with pytest.warns(UserWarning, match="skip_tracing has no effect"):
        read_config({"skip_tracing": True})
    with pytest.warns(UserWarning, match="default_partition=1 has no effect under auto_partition=True"):
        read_config({"default_partition": 1, "partitions": 2})


def test_a_schedule_may_be_given_and_its_sizes_must_be_those_of_the_configuration() -> None:
    schedule = Schedule.build("zb-h1", ranks=2, microbatches=4)
    sizes = {"pipeline_parallel_degree": 2, "microbatches": 4}
    assert read_config({"pipeline": schedule, **sizes}).schedule(None) is schedule
    with pytest.raises(ShardwrightError, match=r"\(2, 4, 1\), and the configuration asks for \(2, 8, 1\)"):
        read_config({"pipeline": schedule, **sizes, "microbatches": 8})
    assert read_config({"pipeline": "auto", **sizes}).schedule(None).name == "auto"
    with pytest.raises(ShardwrightError, match="is no schedule"):
        read_config({"pipeline": "zb-h7"})


def test_policies_that_are_not_run_are_refused_with_the_fix() -> None:
    import shardwright
    from shardwright.backends.torch.program.stage_map import StageMap

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    graph = shardwright.capture(model, torch.ones(2, 8), loss=lambda y: y.mean())
    cluster = shardwright.Cluster("cpu", devices_per_node=2)
    asked = {"batch": 8, "microbatch": 2, "precision": "fp32"}
    policies = {"pp": 2, "dp": 1, "tp": 1, "shard": 0, "recompute": "selective"}
    plan = shardwright.plan(graph, cluster, **asked, **policies)
    with pytest.raises(MissingCapabilityError, match="recompute='elementwise'"):
        StageMap.of_plan(plan)


def test_names_before_init_are_refused() -> None:
    import shardwright.torch as sw

    with pytest.raises(ShardwrightError, match=r"call sw.init"):
        sw.rank()
    with pytest.raises(ShardwrightError, match=r"call sw.init"):
        sw.DistributedModel(torch.nn.Linear(2, 2))


def test_a_script_without_shutdown_leaves_the_group_before_the_interpreter_ends() -> None:
    """Else a thread of Gloo's may abort a process whose work is done."""
    ended = run([sys.executable, str(WORKERS / "no_shutdown.py")], 120)
    assert ended.code == 0, ended.text
    assert "in a group at the end: False" in ended.text


def test_after_an_uncaught_error_no_peer_is_waited_for() -> None:
    ended = run([sys.executable, str(WORKERS / "no_shutdown.py"), "fail"], 120)
    assert ended.code == 1
    assert "in a group at the end: True" in ended.text


def test_a_step_output_says_how_it_becomes_a_number() -> None:
    from shardwright.torch.output import StepOutput

    output = StepOutput([torch.tensor(1.0), torch.tensor(3.0)])
    assert output.reduce_mean().item() == 2.0
    with pytest.raises(ShardwrightError, match=r"2 values.*reduce_mean\(\)\.item\(\)"):
        output.item()


def test_meshes_share_their_process_groups() -> None:
    """Each group has threads and sockets of its own: models made one after the other must not add to them."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    try:
        first, again = (bind(Mesh.of(pp=2, dp=4)) for _ in range(2))
        assert first.groups == {"pp": (1, 5), "dp": (4, 5, 6, 7)}
        assert all(first.handles[axis] is again.handles[axis] for axis in ("pp", "dp"))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"virtual_stages": 2}, "one rank alone has nobody to take turns with"),
        ({"ddp": "yes"}, "ddp='yes': expected True or False"),
        ({"prescaled_batch": 0}, "prescaled_batch=0: expected True or False"),
        ({"seed": "7"}, "seed='7': expected a whole number"),
        ({"wait_timeout_s": "60"}, "wait_timeout_s='60': expected a number of seconds above 0"),
        ({"wait_timeout_s": float("nan")}, "wait_timeout_s=nan: expected a number of seconds above 0"),
        ({"active_microbatches": 2.5}, "active_microbatches=2.5: expected a whole number"),
        ({"pipeline": ["1f1b"]}, "is no schedule"),
        ({"placement_strategy": 7}, "placement_strategy=7: expected text"),
        ({"cluster": 7}, "cluster=7: expected the name of a hardware profile"),
        (
            {"recompute": ["full"]},
            "expected 'none', 'elementwise', 'alternate', 'products', 'products:MODULE,…' or 'full'",
        ),
        ({"recompute": "products:a, b"}, "recompute='products:a, b': expected"),
        ({"compile": 7}, "expected True, False or a backend"),
        ({"layouts": [(".*", sw.Layout.of({"tp": sw.Split(0)}))]}, "tensor_parallel_degree=1 has no axis for layouts"),
        ({7: 1}, "init knows no key 7"),
    ],
)
def test_settings_of_other_kinds_are_named(given: dict[str, object], said: str) -> None:
    with pytest.raises(ShardwrightError) as refused:
        read_config(given)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("virtual_stages", 2), ("placement_strategy", "cluster"), ("layouts", "auto"), ("cluster", "h100")],
)
def test_what_a_plan_decides_is_not_asked_beside_it(key: str, value: object) -> None:
    with pytest.raises(ShardwrightError, match=f"init was given a plan and {key}: the plan decides that"):
        sw.init({key: value}, plan="plan.json")


def test_a_limit_on_what_is_whole_is_not_asked_beside_a_plan_that_gathers_stages() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    graph = shardwright.capture(model, torch.ones(2, 4), lambda out: out.square().mean())
    plan = shardwright.plan(
        graph, shardwright.Cluster("cpu", devices_per_node=4), batch=8, pp=2, dp=2, microbatch=1, shard=3,
        virtual_stages=2, schedule="interleaved-1f1b", gathered_stages=1,
    )  # fmt: skip
    with pytest.raises(ShardwrightError, match=r"sdp_max_live_parameters=5 and a plan with gathered_stages=1"):
        sw.init({"ddp": True, "sdp_max_live_parameters": 5}, plan=plan)
