"""What has room is planned, and what has none is refused with figures that add up."""

import re
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.hardware import Device, load_profile
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.errors import PlanError
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph, Tensor
from shardwright.core.search.best_first import Search
from shardwright.core.search.request import Request
from shardwright.core.search.search import tables_of
from shardwright.core.search.space import Pipelining, Policy
from shardwright.core.search.study import what_binds
from tests.core.toy import decoder

ONE = {"pp": 1, "dp": 1, "tp": 1, "precision": "fp32", "recompute": "none", "shard": 0}


def device(memory_bytes: int) -> Device:
    return replace(load_profile("a100-80gb").device, memory_bytes=memory_bytes, reserved_memory_bytes=0)


def with_input(graph: Graph, fixed: tuple[int, ...], per_sample: tuple[int, ...]) -> Graph:
    """The same with one more tensor in the batch, which nothing reads, and all of the batch on every rank."""
    tensors = (*graph.tensors, Tensor(fixed, per_sample, "int64", "input", "extra"))
    given = replace(graph.capabilities, single_controller=False)
    return replace(graph, tensors=tensors, inputs=(*graph.inputs, len(tensors) - 1), capabilities=given)


def sharing_layers(layers: int) -> Graph:
    """A decoder whose layers all use the parameters of the first, as ALBERT's do (arXiv 1909.11942)."""
    graph = decoder(layers=layers, hidden=256, heads=4, vocabulary=64, sequence=8)
    first = {p.name: p.tensor for p in graph.parameters}
    used = {p.tensor: first[re.sub(r"^h\.\d+\.", "h.0.", p.name)] for p in graph.parameters}
    return replace(
        graph,
        parameters=tuple(p for p in graph.parameters if used[p.tensor] == p.tensor),
        ops=tuple(replace(op, inputs=tuple(used.get(t, t) for t in op.inputs)) for op in graph.ops),
    )


def test_layers_that_share_their_parameters_hold_them_once() -> None:
    graph, pins = sharing_layers(12), {**ONE, "batch": 4, "microbatch": 4}
    (use,) = sw.plan(graph, sw.Cluster("a100-80gb"), **pins).predicted.memory
    assert use.parameters_bytes == 4 * sum(graph.tensors[p.tensor].elements(1) for p in graph.parameters)
    fits = sw.plan(graph, sw.Cluster(device(use.total_bytes)), **pins)
    assert fits.predicted.memory[0] == use
    with pytest.raises(PlanError, match="does not fit"):
        sw.plan(graph, sw.Cluster(device(use.total_bytes - 1)), **pins)


def test_layers_that_share_their_parameters_are_cut_into_stages_that_fit() -> None:
    graph, pins = sharing_layers(12), {**ONE, "pp": 2, "batch": 4, "microbatch": 2, "schedule": "1f1b", "headroom": 0}
    roomy = sw.plan(graph, sw.Cluster("a100-80gb", devices_per_node=2), **pins)
    most = max(roomy.predicted.peak_memory_bytes)
    fits = sw.plan(graph, sw.Cluster(device(most), devices_per_node=2), **pins)
    assert fits.predicted.memory_by_stage_rank == roomy.predicted.memory_by_stage_rank


def test_a_generated_schedule_has_the_room_that_the_batch_leaves() -> None:
    """Neither more, so that what is generated fits, nor much less, so that it gains by it."""
    graph = with_input(decoder(layers=6, hidden=64, heads=4, vocabulary=64, sequence=64), (0, 800_000), (1, 0))
    pins = {**ONE, "pp": 2, "batch": 16, "microbatch": 1, "virtual_stages": 1}
    pair = sw.Cluster("a100-80gb", devices_per_node=2)
    named = sw.plan(graph, pair, schedule="1f1b", **pins)
    needed = max(named.predicted.peak_memory_bytes)
    assert named.predicted.memory_by_stage_rank[0].batch_bytes > 0.9 * needed
    made = sw.plan(graph, sw.Cluster(device(int(1.02 * needed)), devices_per_node=2), schedule="auto", **pins)
    assert max(made.predicted.peak_memory_bytes) <= int(1.02 * needed)
    assert made.predicted.step_time_s < named.predicted.step_time_s


def test_a_batch_that_does_not_fit_is_named_with_its_size() -> None:
    graph = with_input(decoder(), (0, 1 << 20), (1, 0))
    pins = {**ONE, "batch": 64, "microbatch": 1}
    cluster = sw.Cluster("a100-80gb")
    plan = sw.plan(graph, cluster, **pins)
    binds = what_binds(plan, cluster)
    assert (binds.memory_part, binds.memory_when) == ("batch", "all through the step")
    with pytest.raises(PlanError, match=r"needs 0.50 GiB, 0.25 GiB more than .*most of it, 0.50 GiB, is batch"):
        sw.plan(graph, sw.Cluster(device(2**28)), **pins)


def test_what_all_microbatches_share_of_a_batch_is_there_once() -> None:
    graph = decoder()
    for microbatches in (1, 16):
        pins = {**ONE, "batch": 4 * microbatches, "microbatch": 4}
        cluster = sw.Cluster("a100-80gb")
        (alone,) = sw.plan(with_input(graph, (), ()), cluster, **pins).predicted.memory
        (mask,) = sw.plan(with_input(graph, (1024, 1024), (0, 0)), cluster, **pins).predicted.memory
        (divided,) = sw.plan(with_input(graph, (0, 1024), (1, 0)), cluster, **pins).predicted.memory
        assert mask.batch_bytes - alone.batch_bytes == 8 * (1024 * 1024 - 1)
        assert divided.batch_bytes - alone.batch_bytes == 8 * (1024 * 4 * microbatches - 1)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_rank_holds_what_its_stages_read_of_the_batch_or_all_of_it(everywhere: bool) -> None:
    graph = decoder()
    tokens, targets = (graph.tensors[t].size_bytes(16) for t in graph.inputs)  # read by the first unit, and by the last
    graph = replace(graph, capabilities=replace(graph.capabilities, single_controller=not everywhere))
    pins = {**ONE, "pp": 2, "dp": 2, "batch": 32, "microbatch": 2, "schedule": "1f1b"}
    plan = sw.plan(graph, sw.Cluster("a100-80gb", devices_per_node=4), **pins)
    expected = [tokens + targets] * 2 if everywhere else [tokens, targets]
    assert [use.batch_bytes for use in plan.predicted.memory_by_stage_rank] == expected


@pytest.mark.parametrize("microbatches", [1, 16])
def test_classes_add_up_to_what_a_rank_holds(microbatches: int) -> None:
    """With gradients that are made in the step, of which some are never there at once."""
    graph = with_input(decoder(layers=8, hidden=128), (0, 512), (1, 0))
    traits = MemoryTraits(gradients_when_made=True, bucket_bytes=2**16)
    pins = {**ONE, "pp": 2, "dp": 2, "batch": 2 * microbatches, "microbatch": 1, "schedule": "1f1b"}
    plan = sw.plan(replace(graph, memory_traits=traits), sw.Cluster("a100-80gb", devices_per_node=4), **pins)
    for use in plan.predicted.memory_by_stage_rank:
        assert sum(use.classes.values()) == use.total_bytes + use.apart_bytes
        assert sorted(size for size in use.classes.values()) == sorted(
            getattr(use, name)
            for name in use.__dataclass_fields__
            if name not in ("apart_bytes", "host_bytes", "update_bytes")
        )
    assert all(use.batch_bytes for use in plan.predicted.memory_by_stage_rank)
    bucket = plan.decision.bucket_bytes or traits.bucket_bytes
    apart = [use.apart_bytes for use in plan.predicted.memory_by_stage_rank]
    assert max(apart) > bucket if microbatches == 1 else set(apart) == {bucket}


def test_a_partitioners_cut_does_not_depend_on_what_was_asked_before() -> None:
    """Sharded states weigh less in the module tree's cut: each memory policy has its own."""
    graph = decoder(layers=8, hidden=128, heads=4, vocabulary=16384, sequence=64)
    cluster = sw.Cluster("a100-80gb", devices_per_node=8)
    request = Request(batch=16, pp=2, tp=1, microbatch=4, recompute="none", precision="fp32", partitioner="tree")
    policies = [Policy("none", 0, None), Policy("none", 3, None)]

    def cuts(order: list[Policy]) -> dict[Policy, set[tuple[int, ...]]]:
        search = Search(tables_of(graph, cluster, request), cluster, request)
        (shape, *_) = search.space.shapes()
        return {
            policy: {cut.starts for cut in search.scorer.cuts(shape, [policy], Pipelining("1f1b", 1))}
            for policy in order
        }

    found = cuts(policies)
    assert found == cuts(policies[::-1])
    assert found[policies[0]] != found[policies[1]], "nothing could go wrong: the case tests nothing"


@pytest.mark.parametrize("runs_modules", [False, True])
def test_a_buffer_lies_where_it_is_read_and_where_modules_run_with_the_module_that_holds_it(runs_modules: bool) -> None:
    graph = decoder()
    graph = replace(
        graph,
        capabilities=replace(graph.capabilities, single_controller=not runs_modules),
        tensors=tuple(
            replace(t, role="buffer", name="h.2.seen") if t.name == "h.1.ln_1.bias" else t for t in graph.tensors
        )
        + tuple(Tensor((4,), (0,), "float32", "buffer", name) for name in ("h.3.counts", "alone")),
        parameters=tuple(p for p in graph.parameters if p.name != "h.1.ln_1.bias"),
    )
    units = fold(graph).units
    of = {layer: next(u.index for u in units for c in u.calls if c.path == f"h.{layer}") for layer in (1, 2, 3)}
    every = tuple(u.index for u in units)
    found = {graph.tensors[tensor].name: users for tensor, users in WorkCounter(graph).buffer_users(units)}
    assert found == {
        "h.2.seen": (of[1], of[2]) if runs_modules else (of[1],),
        "h.3.counts": (of[3],),
        "alone": every if runs_modules else (),
    }
