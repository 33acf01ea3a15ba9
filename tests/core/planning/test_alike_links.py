"""What differs in its links alone is counted once: with the same bytes, and left out only where it costs the same."""

from dataclasses import replace

import pytest

from shardwright import Cluster
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.cluster.cluster import Cluster as AnyCluster
from shardwright.core.plan.decision import placement_of
from shardwright.core.search.best_first import Search
from shardwright.core.search.request import Request
from shardwright.core.search.search import tables_of
from shardwright.core.search.space import Shape
from shardwright.core.search.unit_labels import kept_units
from shardwright.core.tables.memory import live_microbatches
from shardwright.core.tables.rank_tables import RankTables
from tests.core.toy import decoder

TRAITS = MemoryTraits(bucket_bytes=2**20, gradients_when_made=True, gathers_units=True)
GRAPH = replace(decoder(layers=4, hidden=256, heads=8, vocabulary=1024, sequence=128), memory_traits=TRAITS)


def search_on(cluster: AnyCluster) -> Search:
    request = Request(batch=16, precision="fp32")
    return Search(tables_of(GRAPH, cluster, request), cluster, request)


def apart(ranked: RankTables) -> RankTables:
    """The same ranks with tables that share nothing found."""
    made = {id(table): replace(table, unlinked=None) for table in ranked.tables}
    return replace(ranked, tables=tuple(made[id(table)] for table in ranked.tables), unlinked=None)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_ranks_that_differ_in_their_links_alone_count_the_same_bytes(recompute: str) -> None:
    search = search_on(Cluster("t4", nodes=2, devices_per_node=2))
    bounds, counted, shared = search.scorer.bounds, 0, set[int]()
    for shape in search.space.shapes():
        pp, dp, _ = shape.degrees
        if pp == 1 or shape.microbatch > 1:
            continue
        ranked = bounds.ranked(shape, recompute)
        alone = apart(ranked)
        shared.add(id(ranked.of_bytes))
        for policy in search.space.policies(dp):
            for pipelining in search.space.pipelinings(pp, shape.microbatches):
                if policy.recompute != recompute or not policy.has_stages(pipelining):
                    continue
                placement = placement_of(pipelining.schedule, pp, pipelining.virtual_stages)
                live = live_microbatches(pipelining.schedule, pp, shape.microbatches, pipelining.virtual_stages)
                decision = bounds.decision(shape, policy, pipelining, ranked.free_cut(placement))
                assert replace(decision) == decision  # which checks it
                request = search.scorer.request_of(decision)
                given = decision.stage_starts, placement, live, request
                assert ranked.memory(*given) == alone.memory(*given)
                assert kept_units(ranked, *given) == kept_units(alone, *given)
                assert ranked.cut(placement, live, request) == alone.cut(placement, live, request)
                costs = ranked.stage_costs(decision.stage_starts, placement)
                assert costs == alone.stage_costs(decision.stage_starts, placement)
                counted += 1
    assert counted > 100
    ranked = {id(bounds.ranked(s, recompute)) for s in search.space.shapes() if s.degrees[0] > 1 and s.microbatch == 1}
    assert len(shared) < len(ranked)


def test_shapes_are_left_out_only_for_others_whose_steps_take_the_same() -> None:
    search = search_on(Cluster("t4", nodes=2, devices_per_node=8))
    scorer, compared = search.scorer, 0
    every = [shape for shape in search.space.shapes() if shape.microbatch == 1]
    kept = search.unlike(every)
    assert len(kept) < len(every)
    assert {shape.degrees for shape in kept} == {shape.degrees for shape in every}

    def steps_s(shape: Shape) -> list[float]:
        found = []
        pp, dp, _ = shape.degrees
        pipelining = next(search.space.pipelinings(pp, shape.microbatches))
        for policy in search.space.policies(dp):
            if policy.recompute == "none" and policy.has_stages(pipelining):
                for cut in scorer.cuts(shape, [policy], pipelining):
                    scored = scorer.scored(cut)
                    found.append(scored.predicted.step_time_s if scored else 0.0)
        return found

    for shape in every:
        if shape not in kept:
            alike = [steps_s(other) for other in kept if other.degrees == shape.degrees]
            assert steps_s(shape) in alike, shape
            compared += 1
    assert compared > 3
