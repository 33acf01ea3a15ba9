"""Nothing that the search leaves out could have been better: every bound is below what it bounds."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from shardwright import Cluster
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.cluster import NodeGroup
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.cluster.hardware.device import MeasuredUnit
from shardwright.core.errors import ScheduleError
from shardwright.core.execution import SYSTEMS
from shardwright.core.model.structure import measured_name
from shardwright.core.plan.decision import placement_of
from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.schedule.peak_memory import StageMemory, peak_below_sum
from shardwright.core.search.best_first import Search
from shardwright.core.search.cut_bounds import Counted
from shardwright.core.search.options import VIRTUAL_STAGES
from shardwright.core.search.request import Request
from shardwright.core.search.search import tables_of
from shardwright.core.search.space import splits_backward
from tests.core.toy import decoder

GRAPH = decoder(layers=3, hidden=256, heads=8, vocabulary=1024, sequence=128)
TIGHT = replace(load_profile("t4").device, memory_bytes=34 * 2**20, reserved_memory_bytes=0)


FROZEN = tuple(replace(p, trainable=p.name.startswith(("h.2.", "ln_f"))) for p in GRAPH.parameters)


def mixed(devices: int, *, crossed: bool = False) -> Cluster:
    """A node of fast devices and a node of slow ones; ``crossed``: these slow to update, but on the fast links."""
    fast, slow = load_profile("h100"), load_profile("t4")
    links = [fast.intra_node, slow.intra_node]
    kinds = [fast.device, slow.device]
    if crossed:
        kinds[1] = replace(slow.device, optimizer_efficiency=0.02)
        links.reverse()
    groups = [NodeGroup(kind, 1, devices, link) for kind, link in zip(kinds, links, strict=True)]
    return Cluster.of_groups(groups, "ethernet-10g")


def lending(share: float) -> Cluster:
    """A node whose devices share their cores: units ran in a pipeline."""
    device = load_profile("cpu").device
    request = Request(batch=8, precision="fp32")
    tables = tables_of(GRAPH, Cluster(device), request)
    name = measured_name(GRAPH.framework, tables.structure.digest)
    units = tuple(
        MeasuredUnit(name, own, "fp32", 1, 1e-3 * (1 + own), 5e-3, in_stages=True, idle_lent=share)
        for own in sorted(set(tables.variants(1)))
    )
    return Cluster(replace(device, measured_units=units), devices_per_node=4)


@pytest.mark.parametrize("slowed_by", ["cpu", "t4"])
def test_no_bound_is_above_what_it_bounds_where_messages_hide(slowed_by: str) -> None:
    """With the messages of a system that hides them: on GPUs beside computing, on CPUs beside idle time alone."""
    traits = MemoryTraits(gradients_when_made=True, gathers_units=True)
    graph = replace(GRAPH, memory_traits=traits, execution=SYSTEMS["torch"])
    cluster, request = Cluster(slowed_by, devices_per_node=4), Request(batch=20, precision="fp32")
    search = Search(tables_of(graph, cluster, request), cluster, request)
    scorer, space = search.scorer, search.space
    simulated, found = 0, set[Counted]()
    for shape in space.shapes():
        pp, dp, tp = shape.degrees
        if tp > 1 or shape.microbatch > 1 or dp == 1:
            continue
        for policy in space.policies(dp):
            if policy.recompute == "full" or not policy.shard:
                continue
            for pipelining in space.pipelinings(pp, shape.microbatches):
                split = splits_backward(pipelining.schedule, pipelining.virtual_stages)
                of_kind = scorer.bounds.bound_s(shape, [policy], pipelining.virtual_stages, split=split)
                for cut in scorer.cuts(shape, [policy], pipelining):
                    finer = [cut]
                    while finer[-1].counted < Counted.ROOM:
                        finer.append(scorer.cut_bounds.finer(finer[-1]))
                    assert finer == sorted(finer, key=lambda one: (one.bound_s, one.counted))
                    found.update(one.counted for one in finer)
                    draft = scorer.draft(finer[-1])
                    if draft is not None:
                        seconds = scorer.timed(draft).predicted.step_time_s
                        assert max(of_kind, cut.bound_s, draft.bound_s) <= seconds * (1 + 1e-9), (cut, seconds)
                        simulated += 1
    assert simulated > 50
    assert found == set(Counted)


@pytest.mark.parametrize(
    ("cluster", "frozen"),
    [
        (lending(0.6), False),
        (lending(1.0), False),
        (Cluster("t4", devices_per_node=4), False),
        (Cluster(TIGHT, devices_per_node=4), False),
        (Cluster(TIGHT, devices_per_node=4), True),
        (mixed(2), True),
    ],
    ids=["lending", "lending all", "roomy", "tight", "tight and frozen", "mixed and frozen"],
)
def test_no_bound_is_above_what_it_bounds(cluster: Cluster, frozen: bool) -> None:
    traits = MemoryTraits(bucket_bytes=2**20, gradients_when_made=True)
    graph = replace(GRAPH, memory_traits=traits, parameters=FROZEN if frozen else GRAPH.parameters)
    request = Request(batch=8, precision="fp32")
    search = Search(tables_of(graph, cluster, request), cluster, request)
    scorer, space = search.scorer, search.space
    simulated = unfit = unlimited = lent = closer = 0
    for shape in space.shapes():
        pp, dp, _ = shape.degrees
        of_shape = scorer.bounds.shape_bound_s(shape)
        every = list(space.policies(dp))
        for mode in {policy.recompute for policy in every}:
            alike = [policy for policy in every if policy.recompute == mode]
            bounds = [scorer.bounds.bound_s(shape, [policy]) for policy in alike]
            assert scorer.bounds.bound_s(shape, alike) == min(bounds)
        for policies in ([policy] for policy in every):
            for pipelining in space.pipelinings(pp, shape.microbatches):
                if not space.go_together(policies[0].recompute, pipelining):
                    continue
                split = splits_backward(pipelining.schedule, pipelining.virtual_stages)
                virtual = pipelining.virtual_stages
                live = (
                    scorer.least_live(pp, shape.microbatches, [pipelining]) if policies[0].recompute == "full" else None
                )
                of_kind = scorer.bounds.bound_s(shape, policies, virtual, split=split, live=live)
                roomy = scorer.bounds.bound_s(shape, policies, virtual, split=split)
                assert of_shape <= roomy <= of_kind * (1 + 1e-9)
                for cut in scorer.cuts(shape, policies, pipelining):
                    with_room = scorer.cut_bounds.with_room(cut)
                    draft = scorer.draft(with_room)
                    if draft is None:
                        unfit += 1
                        continue
                    assert cut.bound_s <= with_room.bound_s <= draft.bound_s * (1 + 1e-9), cut
                    closer += with_room.bound_s > cut.bound_s * (1 + 1e-9)
                    choices = [scorer.timed(one) for one in scorer.by_policy(draft)]
                    for each in choices:
                        assert scorer.finished(each).predicted.step_time_s == each.predicted.step_time_s
                    done = scorer.finished(min(choices, key=lambda each: float(f"{each.predicted.step_time_s:.6g}")))
                    seconds, made = done.predicted.step_time_s, done.decision
                    assert max(of_kind, cut.bound_s) <= draft.bound_s * (1 + 1e-9), cut
                    assert draft.bound_s <= seconds, cut
                    simulated += 1
                    lent += done.tables.idle_lent > 0
                    free = scorer.without_limit(shape, policies[0], pipelining)
                    if free is not None and free.decision == made:
                        assert free.predicted.step_time_s <= seconds * (1 + 1e-9), cut
                        unlimited += 1
    assert simulated > 100
    assert (lent > 50) == bool(cluster.device(0).measured_units)
    assert unlimited > 50
    assert unfit or cluster.memory_bytes(0) > TIGHT.memory_bytes
    assert closer or cluster.memory_bytes(0) > TIGHT.memory_bytes


SMALL = {"batch": 16}
"""For 9 layers with a vocabulary, everything free."""
ONE_STAGE_EACH = {"dp": 1, "virtual_stages": 1, "microbatch": 8}
"""For layers alone, in pipelines of few microbatches, where the way of one microbatch is most of a step."""


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize(
    ("layers", "mib", "options"),
    [
        *((9, mib, SMALL) for mib in (47, 60, 80, 110)),
        (11, 180, ONE_STAGE_EACH | {"pp": 3, "batch": 16}),
        (10, 120, ONE_STAGE_EACH | {"pp": 3, "batch": 24}),
        (9, 250, ONE_STAGE_EACH | {"pp": 2, "batch": 16}),
    ],
)
def test_what_memory_forces_to_be_recomputed_is_never_too_much(
    layers: int, mib: int, options: dict[str, int], gathers: bool
) -> None:
    """Of many alike layers; a draft keeps no more of them, and takes no less. ``gathers``: whether the runtime gathers
    units, and sums their gradients in shards."""
    is_small = options is SMALL
    sizes = {"vocabulary": 1024, "sequence": 128} if is_small else {"vocabulary": 32, "sequence": 256}
    graph = decoder(layers=layers, hidden=256, heads=8, **sizes)
    if gathers:
        graph = replace(graph, memory_traits=MemoryTraits(gradients_when_made=True, gathers_units=True))
    cluster = Cluster(replace(TIGHT, memory_bytes=mib * 2**20), devices_per_node=options.get("pp", 4))
    request = Request(precision="fp32", tp=1, **options)
    search = Search(tables_of(graph, cluster, request), cluster, request)
    scorer, space = search.scorer, search.space
    drafts = forced = near = 0
    for shape in space.shapes():
        pp, dp, _ = shape.degrees
        for policy in (p for p in space.policies(dp) if p.recompute == "full"):
            for pipelining in space.pipelinings(pp, shape.microbatches):
                split = splits_backward(pipelining.schedule, pipelining.virtual_stages)
                if not policy.has_stages(pipelining):
                    continue
                bound = partial(scorer.bounds.bound_s, shape, [policy], pipelining.virtual_stages, split=split)
                least = bound(live=scorer.least_live(pp, shape.microbatches, [pipelining]))
                if not space.go_together("full", pipelining):
                    continue
                for cut in scorer.cuts(shape, [policy], pipelining):
                    if (draft := scorer.draft(cut)) is None:
                        continue
                    timed = scorer.timed(scorer.by_policy(draft)[0])
                    assert least <= timed.predicted.step_time_s * (1 + 1e-9), (cut, draft.kept_units)
                    drafts += 1
                    forced += least > bound() * (1 + 1e-9)
                    near += least > 0.9 * draft.bound_s
    assert drafts > (24 if is_small and not gathers else 1)
    assert forced > drafts / 4
    assert near or not is_small


def test_no_more_than_all_gradients_is_ever_apart() -> None:
    """What the search leaves out without going through a schedule's actions."""
    random = np.random.default_rng(0)
    for name in ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "interleaved-zb", "v-half", "dualpipev"):
        virtual = {"interleaved-1f1b": 3, "interleaved-zb": 2, "v-half": 2, "dualpipev": 2}.get(name, 1)
        schedule = Schedule.build(name, ranks=4, microbatches=8, virtual_stages=virtual)
        for order in schedule.table:
            stages = {
                stage: StageMemory(*(int(size) for size in random.integers(0, 100, 5)))
                for stage in {part.stage for action in order for part in action.flat}
            }
            assert peak_below_sum(order, stages) <= sum(held.gradients for held in stages.values())


@pytest.mark.parametrize("name", schedule_names())
def test_placements_are_those_of_the_schedules(name: str) -> None:
    known = 0
    for ranks in (1, 2, 3, 8):
        for virtual in VIRTUAL_STAGES:
            try:
                schedule = Schedule.build(name, ranks=ranks, microbatches=2 * ranks, virtual_stages=virtual)
            except ScheduleError:
                with pytest.raises(ScheduleError):
                    placement_of(name, ranks, virtual)
                continue
            assert placement_of(name, ranks, virtual) == schedule.placement
            known += 1
    assert known
