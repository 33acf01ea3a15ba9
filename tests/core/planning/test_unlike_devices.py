"""Unlike devices in one plan: tables speak of the device that they are about, and groups wait for their slowest."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import shardwright as sw
from shardwright import Cluster
from shardwright.core.cluster.hardware import load_link, load_profile
from shardwright.core.cluster.node_group import NodeGroup
from shardwright.core.errors import PlanError, PlanFileError
from shardwright.core.plan.file import to_text
from shardwright.core.values.amounts import bytes_text
from shardwright.report.tables import plan_view
from tests.core.toy import decoder

PINS = {"schedule": "1f1b", "virtual_stages": 1, "recompute": "none", "shard": 0, "precision": "fp16"}


def mixed(*names: str, intra_node: tuple[str, ...] = (), between: str = "ethernet-100g") -> Cluster:
    links = [load_link(name) for name in intra_node] or [load_profile(name).intra_node for name in names]
    groups = [NodeGroup(load_profile(n).device, 1, 4, link) for n, link in zip(names, links, strict=True)]
    return Cluster.of_groups(groups, between)


def text_of(plan: sw.Plan) -> str:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan_view(plan))
    return console.export_text()


@pytest.mark.parametrize("names", [("h100", "t4"), ("t4", "h100")])
def test_each_rank_is_a_share_of_its_own_device(names: tuple[str, str]) -> None:
    """The fast rank holds more than the slow device has, which was shown as more than all of it."""
    graph = decoder(layers=8, hidden=4096, heads=32, vocabulary=8192, sequence=512)
    cut = (0, 8) if names[0] == "h100" else (0, 2)
    plan = sw.plan(graph, mixed(*names), batch=8, pp=2, dp=4, tp=1, microbatch=1, stage_starts=cut, **PINS)
    limits = plan.provenance.device_memory_bytes
    assert limits == tuple(load_profile(name).device.usable_memory_bytes for name in names)
    uses = [use.total_bytes for use in plan.predicted.memory_by_stage_rank]
    assert max(uses) > min(limits), "both fit the smaller device: the case tests nothing"
    shown = text_of(plan)[text_of(plan).index("Memory per rank") :]
    rows = shown[shown.index("margin") :]  # the title speaks of shares too
    shares = [float(share) for share in re.findall(r"(\d+\.\d)%", rows)[:2]]
    assert shares == [pytest.approx(100 * use / limit, abs=0.06) for use, limit in zip(uses, limits, strict=True)]
    assert max(shares) <= 100
    fullest, limit = max(zip(uses, limits, strict=True), key=lambda pair: pair[0] / pair[1])
    assert f"at most {bytes_text(fullest)} of a device's {bytes_text(limit)}" in repr(plan)
    assert sw.Plan.from_text(to_text(plan)) == plan


def test_a_plan_file_with_the_memory_of_too_few_ranks_is_refused() -> None:
    graph = decoder(layers=2, hidden=256, heads=4, vocabulary=512, sequence=64)
    plan = sw.plan(graph, mixed("h100", "v100"), batch=16, pp=2, dp=4, tp=1, **PINS)
    first, second = plan.provenance.device_memory_bytes
    text = to_text(plan)
    edited = re.sub(rf"({first}),\s*{second}", r"\1", text, count=1)
    assert edited != text
    with pytest.raises(PlanFileError, match=r"provenance\.device_memory_bytes: 1 entries, expected one per"):
        sw.Plan.from_text(edited)


def test_a_refusal_names_the_device_that_is_too_small() -> None:
    graph = decoder(layers=5, hidden=4096, heads=32, vocabulary=8192, sequence=128)
    groups = [NodeGroup(load_profile(name).device, 1, 1, load_profile(name).intra_node) for name in ("h100", "t4")]
    cluster = Cluster.of_groups(groups, "ethernet-100g")
    with pytest.raises(PlanError, match=r"more than the 14\.25 GiB that t4 has"):
        sw.plan(graph, cluster, batch=2, pp=1, dp=2, tp=1, microbatch=1, devices="all", **PINS)


LINKS = st.sampled_from(["nvlink2", "nvlink4", "pcie3", "pcie5"])


@settings(max_examples=60)
@given(links=st.tuples(LINKS, LINKS), size=st.integers(0, 1 << 32), between=st.sampled_from(["ib-hdr200", "efa-400g"]))
def test_a_group_is_no_faster_than_any_of_its_nodes_alone(links: tuple[str, str], size: int, between: str) -> None:
    """Whichever node comes first."""
    unlike = mixed("a100-80gb", "v100", intra_node=links, between=between).group(range(8))
    for link in links:
        alone = mixed("a100-80gb", "v100", intra_node=(link, link), between=between)
        assert unlike.all_gather_s(size) >= alone.group(range(4)).all_gather_s(size) * (1 - 1e-9)
    turned = mixed("a100-80gb", "v100", intra_node=links[::-1], between=between).group(range(8))
    assert unlike.all_reduce_s(size) == turned.all_reduce_s(size)


def test_a_runtime_that_asks_for_equal_hosts_is_planned_for_such_hosts_alone() -> None:
    """JAX: every process of a run has as many of the plan's devices."""
    graph = decoder(layers=4, hidden=256, heads=4, vocabulary=512, sequence=64)
    choosy = replace(graph, capabilities=replace(graph.capabilities, hosts_are_alike=True))
    groups = [NodeGroup(load_profile("h100").device, 1, size, load_link("nvlink4")) for size in (8, 4)]
    cluster = Cluster.of_groups(groups, "ethernet-100g")
    assert sw.plan(graph, cluster, batch=24, devices="all").decision.mesh.size == 12
    assert sw.plan(choosy, cluster, batch=24).decision.mesh.size == 8
    with pytest.raises(PlanError, match=r"hosts with 4 and 8 devices: plan for hosts of one size"):
        sw.plan(choosy, cluster, batch=24, devices="all")
    pair = Cluster.of_groups([groups[1], groups[1]], "ethernet-100g")
    assert sw.plan(choosy, pair, batch=24, devices="all").decision.mesh.size == 8
