"""No cut into stages is faster than what is said before there is one, and of one stage each the best is as fast."""

from functools import lru_cache
from itertools import pairwise

import pytest

from shardwright import Cluster
from shardwright.core.partition.cut_search import every_cut
from shardwright.core.search.best_first import Search
from shardwright.core.search.least_pipeline import least_of_any_stages, least_of_one_stage_each
from shardwright.core.search.request import Request
from shardwright.core.search.search import tables_of
from shardwright.core.tables.unit_table import UnitTable
from tests.core.toy import decoder
from tests.core.uneven import chain

WIDTHS = [64, 96, 128, 64, 128, 96, 64, 64, 128]
GRAPHS = {
    "mostly alike": decoder(layers=7, hidden=64, heads=2, vocabulary=4096, sequence=32),
    "unlike": chain(WIDTHS, WIDTHS),
}


@lru_cache
def table_of(name: str) -> UnitTable:
    cluster, request = Cluster("v100", devices_per_node=2), Request(batch=64, precision="fp32", pp=2, dp=1, tp=1)
    search = Search(tables_of(GRAPHS[name], cluster, request), cluster, request)
    return search.scorer.bounds.ranked(search.space.shapes()[0], "none").tables[0]


def slowest_s(table: UnitTable, starts: list[int], ranks: int, microbatches: int, *, split: bool) -> float:
    """The time before which some rank is not done: it waits for the stages before its first one."""
    seconds, forward = table.seconds.tolist(), [unit.forward_s for unit in table.units]
    ends = list(pairwise([*starts, len(seconds)]))
    waited = [sum((forward if split else seconds)[: starts[rank]]) for rank in range(ranks)]
    work = [sum(sum(seconds[a:b]) for a, b in ends[rank::ranks]) for rank in range(ranks)]
    return max(before + microbatches * own for before, own in zip(waited, work, strict=True))


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_no_cut_is_faster(name: str, split: bool) -> None:
    table = table_of(name)
    closer, units = 0, len(table.units)
    for ranks, held, microbatches in ((2, 1, 9), (3, 1, 12), (4, 1, 40), (2, 2, 16), (3, 2, 10), (2, 3, 12)):
        if ranks * held > units:
            continue
        cuts = every_cut(units, ranks * held).tolist()
        least = min(slowest_s(table, cut, ranks, microbatches, split=split) for cut in cuts)
        fluid = float(table.seconds.sum()) * microbatches / ranks
        found = least_of_any_stages(table, ranks, microbatches, fluid, splits_backward=split)
        assert fluid <= found <= least * (1 + 1e-9), (ranks, held)
        closer += found > fluid * 1.001
        if held == 1:
            each = least_of_one_stage_each(table, ranks, microbatches, fluid, splits_backward=split)
            assert least * (1 - 1e-3) <= each <= least * (1 + 1e-9), ranks
    assert closer or name == "unlike"


def test_a_known_bound_is_never_lowered() -> None:
    table = table_of("mostly alike")
    known = 100 * float(table.seconds.sum())
    for find in (least_of_any_stages, least_of_one_stage_each):
        assert find(table, 2, 4, known, splits_backward=True) == known
