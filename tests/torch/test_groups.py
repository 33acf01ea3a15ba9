"""Ranks, groups and messages in SageMaker's words."""

from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch

import shardwright.torch as sw
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.messages import as_object
from shardwright.core.errors import ShardwrightError
from shardwright.torch import groups
from shardwright.torch.config import read_config
from tests.torch.launch import Outcome, checks_in, on_ranks

OF_GROUP: dict[str, tuple[str, Callable[[], list[int]], Callable[[], int], Callable[[], int]]] = {
    "pp": ("P", sw.get_pp_group, sw.pp_rank, sw.pp_size),
    "tp": ("T", sw.get_tp_group, sw.tp_rank, sw.tp_size),
    "rdp": ("D", sw.get_rdp_group, sw.rdp_rank, sw.rdp_size),
    "mp": ("PT", sw.get_mp_group, sw.mp_rank, sw.mp_size),
    "dp": ("DT", sw.get_dp_group, sw.dp_rank, sw.dp_size),
    "world": ("DPT", sw.get_world_group, sw.rank, sw.size),
}


def factorisations(ranks: int) -> list[tuple[int, int, int]]:
    return [(p, d, ranks // (p * d)) for p in range(1, ranks + 1) for d in range(1, ranks + 1) if ranks % (p * d) == 0]


def bound_of(monkeypatch: pytest.MonkeyPatch, order: str, degrees: tuple[int, int, int], rank: int) -> None:
    """Let this process be a rank of a run, as far as places go."""
    p, d, t = degrees
    config = read_config(
        {"pipeline_parallel_degree": p, "tensor_parallel_degree": t, "ddp": True, "placement_strategy": order}
    )
    bound = BoundMesh(config.mesh(p * d * t), rank, torch.device("cpu"), {}, {})
    monkeypatch.setattr(groups, "current", lambda: SimpleNamespace(bound=bound))


@pytest.mark.parametrize("order", ["".join(letters) for letters in permutations("DPT")])
def test_groups_follow_the_order_of_the_letters(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """The right-most letter is neighbouring ranks: by mixed radix, for all degrees of 2 to 16 ranks."""
    for ranks in range(2, 17):
        for degrees in factorisations(ranks):
            size_of = dict(zip("PDT", degrees, strict=True))
            places = []
            for rank in range(ranks):
                rest, place = rank, {}
                for letter in reversed(order):
                    rest, place[letter] = divmod(rest, size_of[letter])
                places.append(place)
            for rank, own in enumerate(places):
                bound_of(monkeypatch, order, degrees, rank)
                assert (sw.pp_rank(), sw.rdp_rank(), sw.tp_rank()) == (own["P"], own["D"], own["T"])
                for letters, ranks_of, place_of, group_size in OF_GROUP.values():
                    alike = [
                        other for other, place in enumerate(places)
                        if all(place[letter] == own[letter] for letter in "PDT" if letter not in letters)
                    ]  # fmt: skip
                    assert sorted(ranks_of()) == alike
                    assert ranks_of()[place_of()] == rank
                    assert group_size() == len(alike)
                assert sw.pp_size() * sw.tp_size() * sw.rdp_size() == sw.mp_size() * sw.rdp_size() == sw.size()
                assert sw.pp_size() * sw.dp_size() == sw.size()


@pytest.mark.parametrize("order", ["cluster", "DPT"])
def test_the_documented_groups_of_eight_ranks(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    bound_of(monkeypatch, order, (2, 2, 2), 0)
    assert (sw.get_tp_group(), sw.get_pp_group(), sw.get_rdp_group()) == ([0, 1], [0, 2], [0, 4])
    assert (sw.get_mp_group(), sw.get_dp_group()) == ([0, 1, 2, 3], [0, 1, 4, 5])


@pytest.fixture(scope="module", params=[(2, 2), (2, 1), (1, 2)], ids=["pp2-tp2", "pp2-dp2", "tp2-dp2"])
def run(request: pytest.FixtureRequest) -> Outcome:
    return on_ranks("groups.py", 4, *map(str, request.param), timeout_s=60)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", checks_in("groups.py"))
def test_four_ranks_talk(run: Outcome, check: str) -> None:
    assert f"ok {check}" in run.text, run.text[-4000:]


def test_one_process_is_all_groups() -> None:
    sw.init({})
    try:
        assert sw.allgather({"a": 1}) == [{"a": 1}]
        assert sw.get_mp_group() == sw.get_dp_group() == sw.get_world_group() == [0]
        sw.broadcast("nobody hears this")
        sw.mp_barrier()
        with pytest.raises(ShardwrightError, match="this rank itself"):
            sw.recv_from(0)
    finally:
        sw.shutdown()


def test_nothing_that_arrives_is_run() -> None:
    import pickle

    with pytest.raises(ShardwrightError, match="a message cannot be read"):
        as_object(pickle.dumps(test_one_process_is_all_groups))
