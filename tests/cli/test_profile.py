"""`shardwright profile`: measures here, and writes what a cluster takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwright import Cluster
from shardwright.core.cluster.hardware import load_profile
from tests.cli.conftest import run


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_it_writes_a_profile_that_a_cluster_takes(tmp_path: Path, framework: str) -> None:
    path = tmp_path / "here.toml"
    ran = run("profile", path, "--framework", framework, "--budget", 1, "--name", "here", "--json")
    assert ran.code == 0
    assert ran.document["saved"] == str(path)
    device = Cluster(path).device(0)
    assert device.name == "here"
    assert device.kind in ("cpu", "gpu")
    assert 1e8 < device.flops_per_s("fp32") < 1e15
    assert 1e8 < device.memory_bandwidth_bytes_per_s < 1e14
    assert 0 < device.kernel_launch_s < 1e-2


MODEL = """
import torch


def net():
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    return layers, torch.randn(4, 16), lambda out: out.square().mean()
"""


def test_under_torchrun_the_group_and_a_models_units_are_measured_and_rank_0_writes(tmp_path: Path) -> None:
    path, file = tmp_path / "two.toml", tmp_path / "model.py"
    file.write_text(MODEL)
    given = [
        "shardwright",
        "profile",
        str(path),
        "--budget",
        "1",
        "--model",
        f"{file}:net",
        "--microbatch",
        "2",
        "--json",
    ]
    code = f"import sys; sys.argv = {given!r}; from shardwright.cli import main; main()"
    shared = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20000 + os.getpid() % 20000),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    assert json.loads(said[0][0])["saved"] == str(path)
    assert said[1][0] == ""
    units = load_profile(path).device.measured_units
    assert {unit.microbatch for unit in units} == {2}
    assert all(unit.forward_s > 0 for unit in units)
    assert {(unit.tensor_degree, unit.in_stages) for unit in units} == {(1, False), (1, True), (2, False)}
    assert "2 ranks of 1 thread at work" in load_profile(path).device.summary
    link = load_profile(path).intra_node
    assert link.name == "measured-link"
    assert link.effective_bandwidth_bytes_per_s > 1e6
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "send")
    assert {(each.kind, each.ranks) for each in link.measured} == {(kind, 2) for kind in kinds}
    pair = Cluster(path, devices_per_node=2).group(range(2))
    for each in link.measured:
        if each.kind != "send":
            assert getattr(pair, f"{each.kind}_s")(each.size_bytes) <= each.seconds


def test_another_ending_is_refused(tmp_path: Path) -> None:
    ran = run("profile", tmp_path / "here.json")
    assert ran.code == 2
    assert "name it" in ran.flat_err
