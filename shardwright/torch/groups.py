"""This process's places among the ranks, the groups that they form, and messages within these, in SageMaker's words.

A model lies on ``pp × tp`` ranks, a model-parallel group (mp); ``rdp`` such groups hold replicas of it, the plan's dp
axis. Ranks that take different batches form a data-parallel group (dp): ``rdp × tp``. So ``pp · tp · rdp``,
``mp · rdp`` and ``pp · dp`` are the number of all ranks.
"""

import os
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.backends.torch.machine.mesh import process_group
from shardwright.backends.torch.machine.process import this_launch, wait_longer
from shardwright.core.errors import ShardwrightError
from shardwright.torch.session import current


class CommGroup(Enum):
    """The groups that a rank is in."""

    WORLD = "world"
    MP_GROUP = "mp"
    DP_GROUP = "dp"
    PP_GROUP = "pp"
    TP_GROUP = "tp"
    RDP_GROUP = "rdp"


class RankType(Enum):
    """The groups among whose ranks a number counts."""

    WORLD_RANK = "world"
    MP_RANK = "mp"
    DP_RANK = "dp"
    PP_RANK = "pp"
    TP_RANK = "tp"
    RDP_RANK = "rdp"


WORLD, MP_GROUP, DP_GROUP = CommGroup.WORLD, CommGroup.MP_GROUP, CommGroup.DP_GROUP
PP_GROUP, TP_GROUP, RDP_GROUP = CommGroup.PP_GROUP, CommGroup.TP_GROUP, CommGroup.RDP_GROUP
WORLD_RANK, MP_RANK, DP_RANK = RankType.WORLD_RANK, RankType.MP_RANK, RankType.DP_RANK
PP_RANK, TP_RANK, RDP_RANK = RankType.PP_RANK, RankType.TP_RANK, RankType.RDP_RANK

_AXES: dict[str, tuple[str, ...]] = {
    "world": (), "mp": ("pp", "tp"), "dp": ("dp", "tp"), "pp": ("pp",), "tp": ("tp",), "rdp": ("dp",),
}  # fmt: skip
"""The axes along which a group lies, the slowest first; the world is along all."""


# Places --------------------------------------------------------------------------------------------------------------


def rank() -> int:
    """This process's rank among all."""
    return current().bound.rank


def size() -> int:
    """The number of processes."""
    return current().bound.mesh.size


def local_rank() -> int:
    """This process's place on its node."""
    return this_launch().local_rank


def local_size() -> int:
    """The number of processes on this node."""
    bound = current().bound
    if bound.nodes:
        return bound.nodes.count(bound.nodes[bound.rank])
    return int(os.environ.get("LOCAL_WORLD_SIZE", bound.mesh.size))


def pp_rank() -> int:
    """The coordinate on the pipeline axis."""
    return current().bound.coordinate("pp")


def pp_size() -> int:
    """The pipeline-parallel degree."""
    return current().bound.size("pp")


def tp_rank() -> int:
    """The coordinate on the tensor axis."""
    return current().bound.coordinate("tp")


def tp_size() -> int:
    """The tensor-parallel degree."""
    return current().bound.size("tp")


def rdp_rank() -> int:
    """The coordinate among replicas (the plan's dp axis)."""
    return current().bound.coordinate("dp")


def rdp_size() -> int:
    """The number of replicas (the plan's dp axis)."""
    return current().bound.size("dp")


def mp_rank() -> int:
    """The place among the ranks that hold one replica: pp_rank · tp_size + tp_rank."""
    return pp_rank() * tp_size() + tp_rank()


def mp_size() -> int:
    """The number of ranks that hold one replica: pp_size · tp_size."""
    return pp_size() * tp_size()


def dp_rank() -> int:
    """The place among the ranks that take different batches: rdp_rank · tp_size + tp_rank."""
    return rdp_rank() * tp_size() + tp_rank()


def dp_size() -> int:
    """The number of ranks that take different batches: rdp_size · tp_size."""
    return rdp_size() * tp_size()


# Groups --------------------------------------------------------------------------------------------------------------


def get_world_group() -> list[int]:
    """All ranks."""
    return list(_ranks("world"))


def get_mp_group() -> list[int]:
    """The ranks that hold this rank's replica; ``get_mp_group()[mp_rank()]`` is this rank, and so in every group."""
    return list(_ranks("mp"))


def get_dp_group() -> list[int]:
    """The ranks that take different batches, at this rank's place in the pipeline."""
    return list(_ranks("dp"))


def get_pp_group() -> list[int]:
    """The ranks of this rank's pipeline."""
    return list(_ranks("pp"))


def get_tp_group() -> list[int]:
    """This rank's tensor-parallel peers."""
    return list(_ranks("tp"))


def get_rdp_group() -> list[int]:
    """The ranks that hold the same parameters as this one."""
    return list(_ranks("rdp"))


def get_world_process_group() -> ProcessGroup:
    """The group of all ranks."""
    current()
    group = dist.group.WORLD
    assert group is not None
    return group


def get_pp_process_group() -> ProcessGroup:
    """The group of the ranks of this rank's pipeline."""
    return current().bound.handles["pp"]


def get_rdp_process_group() -> ProcessGroup:
    """The group of the ranks that hold the same parameters as this one."""
    return current().bound.handles["dp"]


def get_tp_process_group() -> ProcessGroup:
    """The group of this rank's tensor-parallel peers."""
    return current().bound.handles["tp"]


def get_mp_process_group() -> ProcessGroup:
    """The group of the ranks that hold this rank's replica. torch makes it at the first call, which every rank of the
    run makes at the same time."""
    return _over("mp")


def get_dp_process_group() -> ProcessGroup:
    """The group of the ranks that take different batches. torch makes it at the first call, which every rank of the run
    makes at the same time."""
    return _over("dp")


def _over(group: str) -> ProcessGroup:
    """The process group along two axes; that of one where the other has one rank."""
    session, axes = current(), _AXES[group]
    single = [axis for axis in axes if session.bound.size(axis) > 1]
    if len(single) < 2:
        return session.bound.handles[single[0] if single else axes[0]]
    if group not in session.groups:
        session.agreement.meet(f"sw.get_{group}_process_group")
        for ranks in session.bound.mesh.groups(*axes):
            made = process_group(tuple(sorted(ranks)))
            if made is not None:
                wait_longer(made)
                session.groups[group] = made
                if session.watchdog.pulse is not None:
                    session.watchdog.pulse.groups.append(made)
    return session.groups[group]


def _ranks(group: str) -> tuple[int, ...]:
    """The ranks of a group of this rank's, in the order of their places."""
    bound, axes = current().bound, _AXES[group]
    mesh = bound.mesh
    if not axes:
        return tuple(range(mesh.size))
    return tuple(sorted(mesh.group(bound.rank, *axes), key=lambda one: [mesh.coordinates(one)[axis] for axis in axes]))


# Messages ------------------------------------------------------------------------------------------------------------


def send(obj: Any, dest_rank: int, rank_type: RankType = WORLD_RANK) -> None:
    """Send an object to a rank, which calls `recv_from`. Nothing is waited for.

    Args:
        obj: tensors, numbers, texts, and lists, tuples, sets and dicts of them: nothing is pickled.
        dest_rank: the place of the other rank in a group of this rank's.
        rank_type: the group, as ``RankType.PP_RANK``.

    Raises:
        ShardwrightError: no such rank, or an object that is no data.
    """
    session = current()
    target = _member(dest_rank, rank_type, "dest_rank")
    if target == session.bound.rank:
        raise ShardwrightError(f"dest_rank={dest_rank} of {rank_type.name} is this rank itself")
    session.messages.send(obj, target)


def recv_from(src_rank: int, rank_type: RankType = WORLD_RANK) -> Any:
    """The next object that a rank has sent to this one, by `send` or `broadcast`. Its tensors are on the CPU.

    Args:
        src_rank: the place of the other rank in a group of this rank's.
        rank_type: the group, as ``RankType.PP_RANK``.

    Raises:
        ShardwrightError: no such rank, or a message that is no data.
        PeerError: the other rank has failed, or is gone.
    """
    session = current()
    source = _member(src_rank, rank_type, "src_rank")
    if source == session.bound.rank:
        raise ShardwrightError(f"src_rank={src_rank} of {rank_type.name} is this rank itself")
    return session.messages.receive(source)


def broadcast(obj: Any, group: CommGroup = WORLD) -> None:
    """Send an object to all other ranks of a group, which call `recv_from`. Raises as `send` does."""
    session = current()
    for other in _ranks(_group(group).value):
        if other != session.bound.rank:
            session.messages.send(obj, other)


def allgather(obj: Any, group: CommGroup = WORLD) -> list[Any]:
    """The objects of all ranks of a group, in the order of their places. All of them call this. Raises as `send` and
    `recv_from` do."""
    return current().messages.gather(obj, _ranks(_group(group).value))


def barrier(group: "CommGroup | ProcessGroup | None" = None) -> None:
    """Wait until every rank of the group, by default of the world, has come here."""
    session = current()
    if group is not None and not isinstance(group, ProcessGroup) and _group(group) is not WORLD:
        session.messages.gather(None, _ranks(group.value))
        return
    handle = group if isinstance(group, ProcessGroup) else dist.group.WORLD
    session.watchdog.doing("barrier")
    if handle is dist.group.WORLD:
        session.agreement.meet("sw.barrier")
    others: Sequence[int] = () if handle is dist.group.WORLD else dist.get_process_group_ranks(handle)
    with session.watchdog.waiting("the other ranks", others):
        dist.barrier(handle)
    session.watchdog.doing("between steps")


def mp_barrier() -> None:
    """Wait until every rank that holds this rank's replica has come here."""
    barrier(MP_GROUP)


def dp_barrier() -> None:
    """Wait until every rank of this rank's data-parallel group has come here."""
    barrier(DP_GROUP)


def _group(group: object) -> CommGroup:
    if isinstance(group, CommGroup):
        return group
    raise ShardwrightError(f"group={group!r}: expected one of CommGroup: {', '.join(one.name for one in CommGroup)}")


def _member(place: object, rank_type: object, name: str) -> int:
    """The rank at a place of a group of this rank's."""
    if not isinstance(rank_type, RankType):
        known = ", ".join(one.name for one in RankType)
        raise ShardwrightError(f"rank_type={rank_type!r}: expected one of RankType: {known}")
    ranks = _ranks(rank_type.value)
    if type(place) is not int or not 0 <= place < len(ranks):
        raise ShardwrightError(
            f"{name}={place!r}: expected a place among the {len(ranks)} ranks of {rank_type.name}, from 0 to "
            f"{len(ranks) - 1}"
        )
    return ranks[place]
