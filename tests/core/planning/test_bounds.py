"""Nothing that the search leaves out could have been better: every bound is below what it bounds."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright import Cluster
from shardwright.core.apart import StageBytes, apart_bytes
from shardwright.core.decision import placement_of
from shardwright.core.errors import ScheduleError
from shardwright.core.hardware import load_profile
from shardwright.core.request import VIRTUAL_STAGES, Request
from shardwright.core.schedule import Schedule, schedule_names
from shardwright.core.search.best_first import Search
from shardwright.core.search.find import tables_of
from shardwright.core.search.space import Policy, splits_backward
from tests.core.toy import decoder

GRAPH = decoder(layers=3, hidden=256, heads=8, vocabulary=1024, sequence=128)
TIGHT = replace(load_profile("t4").device, memory_bytes=34 * 2**20, reserved_memory_bytes=0)


@pytest.mark.parametrize("device", ["t4", TIGHT], ids=["roomy", "tight"])
def test_no_bound_is_above_what_it_bounds(device: object) -> None:
    capabilities = replace(GRAPH.capabilities, bucket_bytes=2**20, gradients_when_made=True)
    graph = replace(GRAPH, capabilities=capabilities)
    cluster = Cluster(device, devices_per_node=4)
    request = Request(batch=8)
    search = Search(tables_of(graph, cluster, request), cluster, request)
    scorer, space = search.scorer, search.space
    simulated = unfit = 0
    for shape in space.shapes():
        pp, dp, _ = shape.degrees
        of_shape = scorer.bounds.shape_bound_s(shape)
        alike: dict[object, list[Policy]] = {}
        for policy in space.policies(dp):
            alike.setdefault(policy if policy.recompute == "full" else policy.recompute, []).append(policy)
        for policies in alike.values():
            for pipelining in space.pipelinings(pp, shape.microbatches):
                if not space.go_together(policies[0].recompute, pipelining):
                    continue
                split = splits_backward(pipelining.schedule, pipelining.virtual_stages)
                of_kind = scorer.bounds.bound_s(shape, policies, pipelining.virtual_stages, split=split)
                assert of_shape <= of_kind
                for cut in scorer.cuts(shape, policies, pipelining):
                    draft = scorer.draft(cut)
                    if draft is None:
                        unfit += 1
                        continue
                    seconds = scorer.finished(draft).predicted.step_time_s
                    assert max(of_kind, cut.bound_s) <= draft.bound_s * (1 + 1e-9), cut
                    assert draft.bound_s <= seconds, cut
                    simulated += 1
    assert simulated > 100
    assert unfit or device == "t4"


def test_no_more_than_all_gradients_is_ever_apart() -> None:
    """What the search leaves out without going through a schedule's actions."""
    random = np.random.default_rng(0)
    for name in ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "interleaved-zb", "v-half", "dualpipev"):
        virtual = {"interleaved-1f1b": 3, "interleaved-zb": 2, "v-half": 2, "dualpipev": 2}.get(name, 1)
        schedule = Schedule.build(name, ranks=4, microbatches=8, virtual_stages=virtual)
        for order in schedule.table:
            stages = {
                stage: StageBytes(*(int(size) for size in random.integers(0, 100, 7)))
                for stage in {part.stage for action in order for part in action.flat}
            }
            for bucket_bytes in (0, 50, 1000):
                gradients = sum(held.gradients for held in stages.values())
                assert apart_bytes(order, stages, bucket_bytes) <= gradients


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
