"""This process's place among the others: ranks from the launcher's environment, and the process groups."""

import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.compat import HashStore, PrefixStore, Store, default_store, device_types, set_timeout
from shardwright.backends.torch.machine.heartbeat import Pulse
from shardwright.backends.torch.machine.mesh import BoundMesh, bind
from shardwright.backends.torch.machine.rendezvous import LOOPBACK, Meeting, meet
from shardwright.backends.torch.machine.watchdog import LONGEST_WAIT_S, Watchdog
from shardwright.core.errors import ClusterError
from shardwright.core.layout.mesh import Mesh

DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class Launch:
    """The settings that a launcher gives: this process's rank, the number of ranks, its place on its node, and the
    address of rank 0.

    ``master_address`` is None when the launcher does not give one; a world of 1 needs none.
    """

    launcher: str
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_address: str | None = None
    master_port: int = DEFAULT_PORT

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ClusterError(
                f"{self.launcher} says that this is rank {self.rank} of {self.world_size}: expected a rank from 0 to "
                f"{self.world_size - 1}; check the environment variables of the launcher"
            )


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Read torchrun's variables, or else Open MPI's, MPICH's (PMI), or Slurm's; with none of them, a world of 1.

    Slurm's are taken only inside a job step (``srun``): a batch script by itself is one process, whatever the job asks.
    Raises ClusterError for a value that is not a number, and for a rank outside its world.
    """
    given = environment

    def number(name: str, default: int | None = None) -> int:
        text = given.get(name)
        if text is None and default is not None:
            return default
        try:
            return int(text or "")
        except ValueError:
            raise ClusterError(f"the environment has {name}={text!r}: expected a whole number") from None

    address = given.get("MASTER_ADDR")
    port = number("MASTER_PORT", DEFAULT_PORT)
    if "RANK" in given and "WORLD_SIZE" in given:
        return Launch("torchrun", number("RANK"), number("WORLD_SIZE"), number("LOCAL_RANK", 0), address, port)
    if "OMPI_COMM_WORLD_RANK" in given:
        rank, size = number("OMPI_COMM_WORLD_RANK"), number("OMPI_COMM_WORLD_SIZE")
        local = number("OMPI_COMM_WORLD_LOCAL_RANK", 0)
        if address is None and number("OMPI_COMM_WORLD_LOCAL_SIZE", -1) == size:
            address = "127.0.0.1"
        return Launch("mpirun", rank, size, local, address, port)
    if "PMI_RANK" in given and "PMI_SIZE" in given and "SLURM_PROCID" not in given:
        rank, size = number("PMI_RANK"), number("PMI_SIZE")
        local = number("MPI_LOCALRANKID", 0)
        if address is None and number("MPI_LOCALNRANKS", -1) == size:
            address = "127.0.0.1"
        return Launch("mpirun", rank, size, local, address, port)
    if "SLURM_PROCID" in given and "SLURM_STEP_NUM_TASKS" in given:
        if address is None and (nodes := given.get("SLURM_STEP_NODELIST") or given.get("SLURM_JOB_NODELIST")):
            address = first_node(nodes)
        rank, size = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS")
        return Launch("srun", rank, size, number("SLURM_LOCALID", 0), address, port)
    return Launch("none")


def this_launch() -> Launch:
    """The settings in this process's environment."""
    return read_launch(os.environ)


def this_node(environment: Mapping[str, str]) -> str:
    """The name of the node that this process runs on: its host, and where launchers stand side by side on one host, as
    agents of torchrun do, the number of the launcher. Of launchers that say how many ranks each has and no number, the
    ranks are taken in their order, if that is how they are counted."""
    host, group = socket.gethostname(), environment.get("GROUP_RANK", "")
    if group:
        return f"{host}/{group}"
    try:
        rank, local, each = (int(environment[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    except (KeyError, ValueError):
        return host
    return f"{host}/{rank // each}" if each > 0 and rank % each == local else host


def nodes_of(store: Store, rank: int, size: int, name: str) -> tuple[int, ...]:
    """The number of the node of each rank, from the names that all ranks give. Every rank calls this."""
    store.set(f"node/{rank}", name)
    names = [bytes(found) for found in store.multi_get([f"node/{other}" for other in range(size)])]
    numbers = {named: number for number, named in enumerate(dict.fromkeys(names))}
    return tuple(numbers[named] for named in names)


def first_node(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-007,9],cpu1`` gives ``gpu003``."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodelist.strip())
    if match is None:
        raise ClusterError(f"the Slurm node list {nodelist!r} cannot be read: set MASTER_ADDR to the first host")
    stem, first, tail = match.groups()
    return f"{stem}{first or ''}{tail or ''}"


def choose_device(launch: Launch) -> torch.device:
    """A CUDA device by local rank when there are any, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", launch.local_rank % torch.cuda.device_count())


Handshake = Callable[[Store, int, int], None]
"""A function that is called with the store of the run, this rank and the number of ranks, before there is a process
group."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A store that all ranks of a run share, and its host: the name in messages, and the rank if it is one."""

    store: Store
    host: str
    host_rank: int | None


def start(
    launch: Launch,
    device: torch.device,
    timeout_s: float,
    backend: str | None = None,
    handshake: Handshake = lambda store, rank, size: None,
) -> Joined | None:
    """Join the default process group: NCCL for CUDA devices, else Gloo. A group that exists is used as it is. Where
    there are several ranks ``handshake`` comes first.

    Sockets are bound to the loopback interface when the master's address is a loopback address, unless
    GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME say otherwise.

    Args:
        timeout_s: the time that a rank that has come waits for the others to come.

    Returns:
        the store over which the ranks tell each other how they are; None in a world of one.

    Raises:
        ClusterError: the master's address is not known; a process group of another size exists; ranks did not come,
            came twice, or were started for another world; the master's port is not free.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if dist.is_initialized():
        if launch.launcher != "none" and dist.get_world_size() != launch.world_size:
            raise ClusterError(
                f"torch.distributed has {dist.get_world_size()} ranks, {launch.launcher} started {launch.world_size}"
            )
        _require_carries(device)
        if dist.get_world_size() == 1:
            return None
        handshake(default_store(), dist.get_rank(), dist.get_world_size())
        return _joined_before()
    timeout = timedelta(seconds=timeout_s)
    name = backend or ("nccl" if device.type == "cuda" else "gloo")
    if launch.world_size == 1:
        if name == "gloo":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = HashStore()
        dist.init_process_group(name, store=store, rank=0, world_size=1, timeout=timeout)
        return None
    if launch.master_address is None:
        raise ClusterError(
            f"{launch.launcher} started {launch.world_size} processes on several nodes and does not say where rank 0 "
            f"is: set MASTER_ADDR (with mpirun: -x MASTER_ADDR=host)"
        )
    if launch.master_address in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = launch.master_address, str(launch.master_port)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(launch.rank), str(launch.world_size)
    meeting = _meeting(launch, launch.master_address, timeout_s)
    common = meet(meeting)
    handshake(PrefixStore("handshake", common), launch.rank, launch.world_size)
    try:
        dist.init_process_group(
            name, store=PrefixStore("group", common), rank=launch.rank, world_size=launch.world_size,
            timeout=timeout,
        )  # fmt: skip
    except RuntimeError as error:
        raise ClusterError(
            f"rank {launch.rank} could not connect with the other {launch.world_size - 1} ranks, all of which had come "
            f"to {meeting.place}: {str(error).splitlines()[0]}. One of them has ended since, or their hosts do not "
            f"reach each other: look at what the others said, and set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the "
            f"interface that connects them"
        ) from error
    wait_longer(dist.group.WORLD)
    return Joined(PrefixStore("pulse", common), meeting.host, None if meeting.by_agent else 0)


def _require_carries(device: torch.device) -> None:
    """Raise ClusterError where the process group that somebody else made carries no tensors of this device."""
    carried = device_types(dist.group.WORLD)
    if carried and device.type not in carried:
        raise ClusterError(
            f"the process group that exists (backend {dist.get_backend()!r}) carries tensors of {', '.join(carried)} "
            f"alone, and this rank computes on {device.type}: make it with backend 'cpu:gloo,cuda:nccl', or let "
            f"sw.init make it"
        )


def _meeting(launch: Launch, address: str, timeout_s: float) -> Meeting:
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Meeting(launch.rank, launch.world_size, address, launch.master_port, timeout_s, by_agent)


def wait_longer(group: ProcessGroup | None) -> None:
    """Let the collectives of a group take LONGEST_WAIT_S, as long as peers that live may take: groups are made with a
    shorter timeout."""
    if group is not None and dist.get_backend(group) in ("gloo", "nccl"):
        set_timeout(group, timedelta(seconds=LONGEST_WAIT_S))


_runs = 0
"""The number of runs that this process has begun over groups that existed: the same on all ranks."""


def _joined_before() -> Joined | None:
    """The store of a process group that somebody else made; None where the store cannot be shared."""
    global _runs
    _runs += 1
    store: Any = default_store()
    try:
        store.clone()
    except (AttributeError, RuntimeError):  # of a kind that has one user
        return None
    host_rank = None if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 0
    named = "the launcher's agent" if host_rank is None else "rank 0"
    return Joined(PrefixStore(f"shardwright/over/{_runs}", store), named, host_rank)


def watch_over(
    joined: Joined | None, mesh: Mesh, device: torch.device, timeout_s: float, reads_peers: bool = True
) -> tuple[BoundMesh, Watchdog]:
    """Lay the mesh over the ranks of the run, and watch over this one and the others. Every rank calls this.

    Args:
        reads_peers: whether CPU ranks of one host may read each other's memory.
    """
    watchdog = Watchdog(f"rank {dist.get_rank()}", timeout_s, device.type == "cuda")
    if joined is None:
        bound = bind(mesh, device)
        watchdog.who = bound.describe()
        return bound, watchdog
    nodes = nodes_of(joined.store, dist.get_rank(), dist.get_world_size(), this_node(os.environ))
    pulse = Pulse(
        joined.store, dist.get_rank(), dist.get_world_size(), watchdog, joined.host, joined.host_rank,
        [group for group in (dist.group.WORLD,) if group is not None],
    )  # fmt: skip
    pulse.start()
    watchdog.pulse = pulse
    try:
        watchdog.doing("making process groups")
        with watchdog.waiting("all ranks"):
            bound = bind(mesh, device, nodes, reads_peers)
    except BaseException as error:
        pulse.stop(watchdog.fault_of(error))
        raise
    watchdog.doing("between steps")
    watchdog.who = bound.describe()
    pulse.groups += [group for group in bound.handles.values() if all(group is not g for g in pulse.groups)]
    return bound, watchdog
