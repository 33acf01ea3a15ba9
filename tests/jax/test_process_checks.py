"""What is checked of processes before a run: their shares of the devices, threads, and how arrays go between them."""

import os
import socket
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.backends.jax.machine import ports, process_transfers
from shardwright.backends.jax.machine.mesh import require_equal_shares, require_own_device
from shardwright.backends.jax.machine.process_transfers import (
    across,
    open_socket,
    require_carrier,
    require_threads,
    way_of,
)
from shardwright.core.errors import ClusterError, MissingCapabilityError
from tests.comparison import Comparison


@dataclass(frozen=True)
class Device:
    process_index: int
    id: int = 0
    platform: str = "cpu"


def of(*processes: int) -> list[Any]:
    return [Device(process, number) for number, process in enumerate(processes)]


def test_processes_with_unlike_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    require_equal_shares(of(0, 0, 1, 1))
    with pytest.raises(ClusterError, match=r"process 0 has 3, process 1 has 1; give devices= with 2 of each process"):
        require_equal_shares(of(0, 0, 0, 1))
    with pytest.raises(
        ClusterError, match=r"process 0 has 2, process 1 has 1; plan for a number .* 2 processes divide"
    ):
        require_equal_shares(of(0, 0, 1))


def test_a_process_without_a_device_of_the_plan() -> None:
    require_own_device(of(0, 1))
    with pytest.raises(ClusterError, match=r"none of the plan's 2 devices is of this process, 0 of 1: give devices="):
        require_own_device(of(1, 1))


def test_a_stage_of_several_processes_wants_a_thread_more_than_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    own = len(jax.local_devices())
    monkeypatch.setenv("NPROC", str(own))
    require_threads(0, of(0, 0))
    with pytest.raises(MissingCapabilityError, match=rf"stage 3 lies on CPU .*{own} threads.*NPROC={own + 2}"):
        require_threads(3, of(0, 1))
    monkeypatch.setenv("NPROC", str(own + 1))
    require_threads(3, of(0, 1))
    monkeypatch.delenv("NPROC")
    monkeypatch.setattr(os, "cpu_count", lambda: own)
    with pytest.raises(MissingCapabilityError, match="NPROC"):
        require_threads(3, of(0, 1))


def test_cpus_without_a_socket_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    require_carrier(0, of(1, 1))
    with pytest.raises(MissingCapabilityError, match=r"stage 3 lies on the devices of 2 processes, .*sw.init"):
        require_carrier(3, of(0, 1))
    given: dict[str, str] = {}
    settings = {"jax_platforms": "cpu", "jax_cross_host_transfer_socket_address": ""}
    config = SimpleNamespace(values=settings, update=given.__setitem__)
    monkeypatch.setattr(process_transfers.jax, "config", config)
    with pytest.raises(MissingCapabilityError, match=r"neither a socket .* nor collectives .*sw.init"):
        require_carrier(0, of(1, 1))  # jax_cpu_collectives_implementation is not set here
    open_socket("::1", 7)
    assert given["jax_cross_host_transfer_socket_address"] == "[::1]:7"
    assert set(given["jax_cross_host_transport_addresses"].split(",")) == {"[::1]:0"}  # no other interface
    given.clear()
    settings["jax_cross_host_transfer_socket_address"] = "10.0.0.1:7"  # the user's own
    open_socket("127.0.0.1", 7)
    settings |= {"jax_cross_host_transfer_socket_address": "", "jax_platforms": "cuda"}
    open_socket("127.0.0.1", 7)
    assert not given


def test_ports_lie_beside_those_that_the_system_gives_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_EPHEMERAL", (20_000, 65_535))
    found = [ports.free_port("127.0.0.1") for _ in range(20)]
    assert all(10_000 <= port < 20_000 for port in found)
    monkeypatch.setattr(ports, "_EPHEMERAL", (1_024, 65_535))  # nothing is beside them: any that is free
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", ports.free_port("127.0.0.1")))


# --- ways, on the devices of one process


def at(devices: list[jax.Device], spec: PartitionSpec, shape: tuple[int, ...] = ()) -> NamedSharding:
    grid = np.array(devices).reshape(shape or (len(devices),))
    return NamedSharding(Mesh(grid, ("dp", "tp")[: grid.ndim]), spec)


def test_what_lies_there_stays() -> None:
    devices = jax.devices()
    way = way_of((4, 2), at(devices[:4], PartitionSpec()), at(devices[2:6], PartitionSpec()))
    assert way is not None
    assert set(way.stays) == set(devices[2:4])
    assert {target for _, target in way.near} == set(devices[4:6])
    assert not way.far


def test_parts_that_nobody_holds_have_no_way() -> None:
    devices = jax.devices()
    assert way_of((4, 2), at(devices[:2], PartitionSpec("dp")), at(devices[2:4], PartitionSpec())) is None


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (PartitionSpec("dp"), PartitionSpec("dp")),
        (PartitionSpec("dp", "tp"), PartitionSpec()),
        (PartitionSpec("tp"), PartitionSpec(None, "dp")),
        (PartitionSpec(), PartitionSpec(("dp", "tp"))),
    ],
)
def test_arrays_arrive_as_they_were(source: PartitionSpec, target: PartitionSpec) -> None:
    devices = jax.devices()
    value = np.arange(32.0, dtype=np.float32).reshape(8, 4)
    there = at(devices[4:8], target, (2, 2))
    for given in (value, jax.random.split(jax.random.key(3), (8, 4))):
        array = jax.device_put(given, at(devices[:4], source, (2, 2)))
        (found,) = across([array], [there])
        assert found.sharding.is_equivalent_to(there, found.ndim)
        data = jax.random.key_data(found) if found.dtype != np.float32 else found
        wanted = jax.random.key_data(given) if found.dtype != np.float32 else given  # type: ignore[arg-type]
        Comparison("across").equal(np.asarray(data), np.asarray(wanted)).require()
