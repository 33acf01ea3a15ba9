"""Groups, messages and barriers between ranks: groups.py PP TP."""

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launched import run_checks

import shardwright.torch as sw
from shardwright.backends.torch.machine.messages import as_bytes
from shardwright.core.errors import ShardwrightError

PP, TP = int(sys.argv[1]), int(sys.argv[2])
GROUPS = {
    sw.CommGroup.WORLD: (sw.get_world_group, sw.rank, sw.size, sw.get_world_process_group),
    sw.CommGroup.MP_GROUP: (sw.get_mp_group, sw.mp_rank, sw.mp_size, sw.get_mp_process_group),
    sw.CommGroup.DP_GROUP: (sw.get_dp_group, sw.dp_rank, sw.dp_size, sw.get_dp_process_group),
    sw.CommGroup.PP_GROUP: (sw.get_pp_group, sw.pp_rank, sw.pp_size, sw.get_pp_process_group),
    sw.CommGroup.TP_GROUP: (sw.get_tp_group, sw.tp_rank, sw.tp_size, sw.get_tp_process_group),
    sw.CommGroup.RDP_GROUP: (sw.get_rdp_group, sw.rdp_rank, sw.rdp_size, sw.get_rdp_process_group),
}


def groups_and_places_belong_together() -> None:
    for ranks_of, place_of, size_of, group_of in GROUPS.values():
        ranks, place = ranks_of(), place_of()
        assert ranks[place] == sw.rank()
        assert len(ranks) == size_of()
        for _ in range(2):  # the second time it is there
            assert sorted(dist.get_process_group_ranks(group_of())) == sorted(ranks)
        ones = torch.ones(1)
        dist.all_reduce(ones, group=group_of())
        assert int(ones) == len(ranks)
    assert sw.local_size() == sw.size() == sw.pp_size() * sw.tp_size() * sw.rdp_size()


def objects_are_gathered_in_the_order_of_places() -> None:
    for number in range(3):
        for group, (ranks_of, place_of, *_) in GROUPS.items():
            given = {"rank": sw.rank(), "number": number, "tensor": torch.full((2,), place_of()), "set": {1, (2, None)}}
            found = sw.allgather(given, group)
            assert [one["rank"] for one in found] == ranks_of()
            assert [one["tensor"].tolist() for one in found] == [[place] * 2 for place in range(len(ranks_of()))]
            assert all(one["number"] == number and one["set"] == {1, (2, None)} for one in found)


def messages_arrive_in_order() -> None:
    after, before = (sw.rank() + 1) % sw.size(), (sw.rank() - 1) % sw.size()
    for number in range(4):
        sw.send(("ring", number, float("nan")), after)
    assert [sw.recv_from(before)[1] for _ in range(4)] == list(range(4))
    if sw.pp_size() > 1:
        if sw.pp_rank() == 0:
            sw.send(sw.rank(), 1, sw.RankType.PP_RANK)
        if sw.pp_rank() == 1:
            assert sw.recv_from(0, sw.RankType.PP_RANK) == sw.get_pp_group()[0]


def large_objects_and_rare_ones_arrive() -> None:
    large = torch.arange(3_000_000, dtype=torch.float32)
    for found in sw.allgather({"large": large + sw.rank(), "a view": large[:1], "rare": frozenset({np.float64(0.5)})}):
        assert found["rare"] == {0.5}
        assert isinstance(found["rare"], frozenset)
        assert found["large"].numel() == large.numel()
    assert [float(one[5]) for one in sw.allgather(large + sw.rank())] == [5.0 + rank for rank in range(sw.size())]
    assert len(as_bytes(large[:1])) < 10_000


def after_a_refusal_messages_go_on() -> None:
    last = sw.size() - 1
    with pytest.raises(ShardwrightError, match="only a pickle" if sw.rank() == last else f"rank {last} gave allgather"):
        sw.allgather(object() if sw.rank() == last else 1)
    assert sw.allgather(sw.rank()) == list(range(sw.size()))
    if sw.rank() == 0:
        with pytest.raises(ShardwrightError, match="only a pickle"):
            sw.send(object(), 1)
        sw.send("after it", 1)
    if sw.rank() == 1:
        assert sw.recv_from(0) == "after it"


def one_rank_tells_its_group() -> None:
    for group, (ranks_of, place_of, *_) in GROUPS.items():
        kind = sw.RankType(group.value)
        last = len(ranks_of()) - 1
        if place_of() == last:
            sw.broadcast([group.value, sw.rank()], group)
        else:
            assert sw.recv_from(last, kind) == [group.value, ranks_of()[last]]


def barriers_wait() -> None:
    for wait, group in ((sw.mp_barrier, sw.MP_GROUP), (sw.dp_barrier, sw.DP_GROUP), (sw.barrier, sw.WORLD)):
        ranks_of, place_of, *_ = GROUPS[group]
        if len(ranks_of()) == 1:
            continue
        begun = time.monotonic()
        if place_of() == 0:
            time.sleep(0.3)
        wait()
        assert time.monotonic() - begun > 0.25
    sw.barrier(sw.get_pp_process_group())
    sw.barrier(sw.CommGroup.PP_GROUP)


def refused(said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(ShardwrightError, match=said):
        call()


def what_cannot_be_sent_is_refused() -> None:
    other = (sw.rank() + 1) % sw.size()
    refused(r"the object/f is of class builtins.function", lambda: sw.send({"f": refused}, other))
    refused(r"the object is of class builtins.object", lambda: sw.allgather(object()))  # on every rank
    refused(f"dest_rank={sw.size()}: expected a place", lambda: sw.send(1, sw.size()))
    refused("src_rank=-1: expected a place among", lambda: sw.recv_from(-1, sw.TP_RANK))
    refused("is this rank itself", lambda: sw.send(1, sw.rank()))
    refused("is this rank itself", lambda: sw.recv_from(sw.mp_rank(), sw.MP_RANK))
    refused("rank_type=<CommGroup.PP_GROUP", lambda: sw.send(1, 0, sw.PP_GROUP))  # type: ignore[arg-type]
    refused("group=<RankType.PP_RANK", lambda: sw.broadcast(1, sw.PP_RANK))  # type: ignore[arg-type]
    sw.barrier()


def the_run_begins() -> None:
    sw.init({"pipeline_parallel_degree": PP, "tensor_parallel_degree": TP, "ddp": True})


CHECKS = (
    the_run_begins,
    groups_and_places_belong_together,
    objects_are_gathered_in_the_order_of_places,
    messages_arrive_in_order,
    large_objects_and_rare_ones_arrive,
    after_a_refusal_messages_go_on,
    one_rank_tells_its_group,
    barriers_wait,
    what_cannot_be_sent_is_refused,
)

run_checks(CHECKS)
