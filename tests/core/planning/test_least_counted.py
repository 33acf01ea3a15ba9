"""The least bytes of units that are alike are never above what is counted for any cut."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright import Cluster
from shardwright.core.capabilities import MemoryTraits
from shardwright.core.execution import SYSTEMS
from shardwright.core.plan.decision import placement_of
from shardwright.core.search.kept_products import SEARCHED
from shardwright.core.search.request import Request
from shardwright.core.search.scoring import Scorer
from shardwright.core.search.search import tables_of
from shardwright.core.search.space import Space
from shardwright.core.tables.least_counted import least_counted_bytes, may_fit_as_counted
from shardwright.core.tables.memory import live_microbatches
from tests.core.toy import decoder

GRAPH = decoder(layers=6, hidden=256, heads=8, vocabulary=1024, sequence=128)
TRAITS = {
    "gathering": MemoryTraits(gradients_when_made=True, gathers_units=True),
    "gathering, in fp32": MemoryTraits(gradients_when_made=True, gathers_units=True, gradients_in_fp32=True),
    "plain": MemoryTraits(),
}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("hardware", ["cpu", "a100-40gb"])
@pytest.mark.parametrize("traits", TRAITS)
def test_no_least_is_above_what_is_counted(traits: str, hardware: str, precision: str) -> None:
    graph = replace(GRAPH, memory_traits=TRAITS[traits], execution=SYSTEMS["torch"])
    cluster, request = Cluster(hardware, devices_per_node=4), Request(batch=16, precision=precision, tp=1)
    scorer = Scorer(tables_of(graph, cluster, request), cluster, request)
    space, chance = Space(request, cluster, 8, (graph.capabilities,), SEARCHED, limited=False), np.random.default_rng(0)
    counted = gathered = near = 0
    for shape in space.shapes():
        pp, dp, _ = shape.degrees
        for policy in space.policies(dp):
            ranked, table = scorer.bounds.ranked(shape, policy.recompute), None
            for pipelining in space.pipelinings(pp, shape.microbatches):
                if not policy.has_stages(pipelining) or chance.random() < 0.7:
                    continue
                virtual = pipelining.virtual_stages
                stages, placement = pp * virtual, placement_of(pipelining.schedule, pp, virtual)
                inner = chance.choice(np.arange(1, ranked.units), stages - 1, replace=False)
                starts = (0, *sorted(inner.tolist()))
                decision = scorer.bounds.decision(shape, policy, pipelining, starts)
                asked = scorer.bounds.memory_request(
                    policy, stages, dp, shape.microbatches, decision.whole_below_bytes, decision.bucket_bytes
                )
                live = live_microbatches(pipelining.schedule, pp, shape.microbatches, virtual)
                use = ranked.memory(starts, placement, live, asked)
                totals = [each.total_bytes for each in use]
                hosts = [each.host_bytes for each in use]
                assert ranked.total_bytes(starts, placement, live, asked) == [*zip(totals, hosts, strict=True)]
                stages_of = starts, tuple(placement)
                assert ranked._staying(*stages_of, asked.of_staying) == ranked._staying(*stages_of, asked)
                table, alive = ranked.tables[0], np.array(live, dtype=float)[None, :, None]
                for units, added in ranked.kinds:
                    held = np.full((1, 1, 1), float(virtual))
                    least = least_counted_bytes(table, units, added, alive, held, asked)[0]
                    assert (np.diff(least, axis=1) >= 0).all()
                    for rank, total in enumerate(totals):
                        ends = [at for stage, at in enumerate(ranked.ends(starts)) if placement[stage] == rank]
                        count = sum(a <= unit < b for unit in units for a, b in ends)
                        if count:
                            assert least[rank, count - 1] <= total, (decision, rank)
                            near += least[rank, count - 1] > 0.7 * total
                            gathered += asked.shares_sums
                            counted += 1
                assert may_fit_as_counted(table, ranked.kinds, totals, live, virtual, asked)
                few = [total // 8 for total in totals]
                assert not may_fit_as_counted(table, ranked.kinds, few, live, virtual, asked)
    assert counted > 200
    assert near > counted / 10
    assert (gathered > 100) == TRAITS[traits].gathers_units
