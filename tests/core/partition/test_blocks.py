"""RaNNC's atoms, blocks and stages: convex, within memory, near the exact cut; and all partitioners on one model."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

import shardwright as sw
from shardwright.core.errors import PlanError
from shardwright.core.layout.mesh import Mesh
from shardwright.core.model.graph import Graph
from shardwright.core.partition.blocks import MEMORY_SHARE, block_cut, blocks_of
from shardwright.core.partition.partitioners import PARTITIONERS, judge
from shardwright.core.partition.tasks import Tasks
from shardwright.core.search.partition_input import partition_input
from shardwright.core.tables.cost_tables import CostTables
from shardwright.core.tables.memory_request import MemoryRequest
from shardwright.core.tables.mesh_links import Links
from tests.core.toy import Builder, decoder

ROOMY = 1 << 62


def random_tasks(seed: int) -> Tasks:
    """A random graph with branches and constants."""
    random = np.random.default_rng(seed)
    count = int(random.integers(6, 30))
    edges = []
    constant = [bool(random.random() < 0.15) and task > 0 for task in range(count)]
    for task in range(1, count):
        if not constant[task]:
            sources = [s for s in range(task) if not constant[s]] if task > 1 else [0]
            near = sources[-4:]
            edges += [(int(s), task, int(random.integers(1, 50))) for s in random.choice(near, 2)]
            edges += [(c, task, 0) for c in range(task) if constant[c] and random.random() < 0.3]
    unique = {(a, b): size for a, b, size in edges}
    return Tasks(
        tuple(random.exponential(1.0, count)),
        tuple(random.exponential(2.0, count)),
        tuple(random.exponential(1.0, count)),
        tuple(random.exponential(1.0, count)),
        tuple((a, b, size) for (a, b), size in unique.items()),
        tuple(constant),
    )


def reaches(tasks: Tasks) -> np.ndarray:
    count = len(tasks)
    found = np.zeros((count, count), dtype=bool)
    for task in reversed(range(count)):
        for made, used, _ in tasks.edges:
            if made == task:
                found[task, used] = True
                found[task] |= found[used]
    return found


def assert_convex(tasks: Tasks, groups: list[tuple[int, ...]]) -> None:
    """Between two tasks of a group lies no task of another, but for constants, which are made where they are used."""
    reach = reaches(tasks)
    for held in groups:
        inside = [t for t in held if not tasks.constant[t]]
        for a, b in product(inside, inside):
            between = np.flatnonzero(reach[a] & reach[:, b])
            outside = [t for t in between if t not in held and not tasks.constant[t]]
            assert not outside, f"{a} … {b} goes through {outside}"


@pytest.mark.parametrize("seed", range(60))
def test_blocks_and_stages_are_convex_whole_and_within_memory(seed: int) -> None:
    tasks = random_tasks(seed)
    limit = 0.4 * (sum(tasks.state_bytes) + sum(tasks.kept_bytes))
    blocks = blocks_of(tasks, 5, limit)
    assert sorted(t for held in blocks for t in held) == list(range(len(tasks)))
    assert_convex(tasks, blocks)
    for held in blocks:
        assert (
            len(held) == 1
            or sum(tasks.state_bytes[t] + tasks.kept_bytes[t] for t in held) <= limit
            or any(tasks.constant[t] for t in held)
        )
    cut = block_cut(tasks, 3, send_s_per_byte=1e-3, limit_bytes=limit, most_blocks=8)
    if cut is None:
        return
    stages = [tuple(t for t, s in enumerate(cut.stage_of) if s == stage) for stage in range(3)]
    assert_convex(tasks, stages)
    for held in stages:
        assert held
        assert sum(tasks.state_bytes[t] + tasks.kept_bytes[t] for t in held) <= limit * MEMORY_SHARE * (1 + 1e-9)
    position = {task: index for index, held in enumerate(cut.blocks) for task in held}
    for made, used, _ in tasks.edges:
        assert tasks.constant[made] or position[made] <= position[used]


def test_more_stages_than_blocks_is_refused() -> None:
    tasks = Tasks((1.0,), (1.0,), (1.0,), (1.0,), (), (False,))
    with pytest.raises(PlanError, match="the model has 1"):
        block_cut(tasks, 2, send_s_per_byte=0.0, limit_bytes=ROOMY)


def two_towers(layers: int = 6, width: int = 512) -> Graph:
    """Two encoders of unlike width that meet in one product: a graph with branches."""
    b = Builder(framework="toy")
    ends = []
    for name, wide in (("query", width), ("document", 2 * width)):
        x = b.input(name, -1, 16, wide, dtype="float32")
        for layer in range(layers):
            back = b.enter(f"{name}.layers.{layer}")
            y = b.linear(x, b.parameter(f"{name}.layers.{layer}.up", wide, 4 * wide), None, 4 * wide)
            y = b.linear(
                b.elementwise("gelu", y), b.parameter(f"{name}.layers.{layer}.down", 4 * wide, wide), None, wide
            )
            x = b.elementwise("add", x, y)
            b.leave(back)
        back = b.enter(f"{name}_head")
        ends.append(b.linear(x, b.parameter(f"{name}_head.weight", wide, 256), None, 256))
        b.leave(back)
    back = b.enter("meet")
    out = b.elementwise("mul", *ends)
    b.leave(back)
    return b.build(out, name="TwoTowers")


@pytest.mark.parametrize("everywhere", [False, True])
def test_stages_have_the_room_that_the_batch_leaves(everywhere: bool) -> None:
    """Tokens come to the first unit and targets to the last, or all of it to every rank."""
    graph = decoder(layers=2)
    graph = replace(graph, capabilities=replace(graph.capabilities, single_controller=not everywhere))
    cluster = sw.Cluster("a100-80gb", devices_per_node=2)
    tables = CostTables(graph, cluster, "fp32", "adamw")
    table = tables.table(1, 2, "none", Links(cluster).places(Mesh.of(pp=2, dp=1, tp=1))[0][0])
    asked = MemoryRequest(10**9, "fp32", "adamw", 0, 1, microbatches=8)
    units, _ = partition_input(tables.folded, tables.counter, table, tables.device, 2, asked)
    tokens, targets = (graph.tensors[t].size_bytes(16) for t in graph.inputs)
    for a, b in ((0, 1), (0, len(units)), (1, 3), (len(units) - 1, len(units))):
        batch = tokens + targets if everywhere else tokens * (a == 0) + targets * (b == len(units))
        needed = batch + sum(units.kept_bytes[a:b]) + sum(16 * u.parameter_elements for u in table.units[a:b])
        for short in (0, 1):
            given = replace(asked, limit_bytes=int(needed) - short)
            held, _ = partition_input(tables.folded, tables.counter, table, tables.device, 2, given)
            assert held.fits([1])[0, a, b] == (not short)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    "graph", [decoder(layers=12, hidden=1024, heads=16, vocabulary=32000, sequence=256), two_towers()],
    ids=["decoder", "two towers"],
)  # fmt: skip
def test_every_partitioner_cuts_and_exact_is_never_beaten(graph: Graph, stages: int) -> None:
    cluster = sw.Cluster("a100-80gb", devices_per_node=stages)
    tables = CostTables(graph, cluster, "bf16", "adamw")
    mesh = Mesh.of(pp=stages, dp=1, tp=1)
    table = tables.table(1, 4, "none", Links(cluster).places(mesh)[1][0])
    request = MemoryRequest(cluster.memory_bytes(0), "bf16", "adamw", 0, 1)
    units, tasks = partition_input(tables.folded, tables.counter, table, tables.device, 4, request)
    live = list(range(stages, 0, -1))
    judged = {name: judge(name, units, tasks, live) for name in PARTITIONERS}
    for name, found in judged.items():
        assert found is not None, name
        assert len(found.starts) == stages
        assert found.imbalance >= 1 - 1e-9
    exact, pareto = judged["exact"], judged["pareto"]
    assert exact is not None
    assert pareto is not None
    for found in judged.values():
        assert found is not None
        assert found.objective_s >= pareto.objective_s * (1 - 1e-9)
    assert judged["blocks"].objective_s <= 1.3 * pareto.objective_s  # rounded to whole units, of which there are few
    assert abs(sum(tasks().forward_s) - sum(units.forward_s)) < 1e-9 * sum(units.forward_s)
