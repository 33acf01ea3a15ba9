"""Four ranks on two nodes that share state: gathers and sums go between the nodes and then within each, send between
them what the closed form says, and train as the unsplit run does."""

import json
from pathlib import Path
from typing import Any

import pytest

from shardwright.backends.torch.machine.node_stages import NodeGrid
from shardwright.backends.torch.machine.process import this_node
from shardwright.torch.config import read_config
from tests.comparison import Comparison
from tests.torch.launch import on_ranks

PAIRS = (0, 0, 1, 1)
EXACT = (
    "messages", "shuffled", "complex", "unequal", "collectives", "unequal collectives", "after a failure"
)  # fmt: skip
TRAINED = ("level 3", "flat")
SLOW = ("level 1", "level 2", "asked", "groups", "level 3, bf16")
OTHER_NODES = {(0, 0, 0, 1): True, (0, 1, 0, 1): True, (0, 0, 0, 0): False, (0, 1, 2, 3): False}
"""Nodes on which ranks do not lie as stages need it, and whether that is said."""


def results(folder: Path, nodes: tuple[int, ...], *cases: str) -> dict[str, list[dict[str, Any]]]:
    out = folder / "out.json"
    outcome = on_ranks("node_stages.py", len(nodes), str(out), *cases, timeout_s=100, nodes=nodes)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def on_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return results(tmp_path_factory.mktemp("nodes"), PAIRS, *EXACT, *TRAINED)


@pytest.mark.parametrize("case", EXACT)
def test_what_is_gathered_and_summed_is_exact(on_pairs: dict[str, list[dict[str, Any]]], case: str) -> None:
    """In any order of gathers among sums, with pauses, for complex numbers and unequal shards, by messages and by
    collectives, and in the step after one that failed on some rank."""
    for found in on_pairs[case]:
        assert found["staged"]
        assert found["wrong"] == ""


def require_trained(
    found: list[dict[str, Any]], nodes: tuple[int, ...], staged: bool, group: int | None = None
) -> None:
    """The unsplit run's losses, gradients and weights, the same bits on all replicas, and the bytes of the closed form:
    nodes − 1 shards between nodes for every gather and sum, or one to every rank elsewhere."""
    same = Comparison.of_ranks([result["same"] for result in found])
    same.require("losses", "gradients", "weights")
    assert all(result["digest"] == found[0]["digest"] for result in found)
    for rank, result in enumerate(found):
        first = 0 if group is None else rank - rank % group
        members = nodes[first : first + (group or len(nodes))]
        here = members.count(nodes[rank])
        between = len(set(members)) - 1 if staged else len(members) - here
        sent = result["sent"]
        assert result["staged"] is staged
        assert sent["shards"] > 0
        assert sent.get("between", 0) == between * sent["shards"]
        assert sent.get("within", 0) == (len(members) - 1 - between) * sent["shards"]


@pytest.mark.parametrize("case", TRAINED)
def test_training_on_two_nodes_is_the_unsplit_run(on_pairs: dict[str, list[dict[str, Any]]], case: str) -> None:
    require_trained(on_pairs[case], PAIRS, case.startswith("level"))
    assert not any(result["said"] for result in on_pairs[case])


@pytest.mark.slow
def test_other_levels_groups_and_16_bits(tmp_path: Path) -> None:
    trained = results(tmp_path, PAIRS, *SLOW)
    halves = trained.pop("level 3, bf16")
    for found in halves:  # shards of 16-bit copies are gathered, and sums of float32 scattered
        assert found["staged"]
        assert found["digest"] == halves[0]["digest"]
        assert 0 < found["sent"]["between"] < found["sent"]["within"]
    for case, found in trained.items():
        require_trained(found, PAIRS, case != "groups", 2 if case == "groups" else None)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", list(OTHER_NODES))
def test_other_nodes_gather_from_all_at_once(tmp_path: Path, nodes: tuple[int, ...]) -> None:
    for found in results(tmp_path, nodes, "level 1", "asked").values():
        require_trained(found, nodes, staged=False)
        assert [bool(result["said"]) for result in found] == [OTHER_NODES[nodes], False, False, False]
        if OTHER_NODES[nodes]:
            assert f"ranks [0, 1, 2, 3] share state and lie on nodes {list(nodes)}" in found[0]["said"][0]


@pytest.mark.parametrize(
    ("nodes", "found"),
    [
        ((0, 0, 1, 1), NodeGrid(2, 2, 3)), ((5, 5, 5, 2, 2, 2), NodeGrid(2, 3, 3)), ((0, 0, 0, 0), None),
        ((0, 1, 2, 3), None), ((0, 0, 0, 1), None), ((0, 1, 0, 1), None), ((0, 0, 1, 1, 2), None),
    ],
)  # fmt: skip
def test_ranks_form_a_grid_of_nodes_and_places(nodes: tuple[int, ...], found: NodeGrid | None) -> None:
    grid = NodeGrid.of(nodes, 3)
    assert grid == found
    if grid is not None:
        assert {nodes[rank] for rank in grid.beside} == {nodes[3]}
        assert sorted(nodes[rank] for rank in grid.across) == sorted(set(nodes))


@pytest.mark.parametrize(
    ("environment", "node"),
    [
        ({}, ""), ({"GROUP_RANK": "1", "RANK": "5"}, "/1"),
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "/2"),
        ({"RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, ""),  # counted in another order
        ({"RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "none"}, ""),
    ],
)  # fmt: skip
def test_a_node_is_a_launcher_on_a_host(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], node: str
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host")
    assert this_node(environment) == f"host{node}"


def test_sagemakers_key_says_whether_there_are_stages() -> None:
    assert read_config({}).hierarchical_gathers is None
    for given in (True, False):
        assert read_config({"sdp_hierarchical_allgather": given}).hierarchical_gathers is given
