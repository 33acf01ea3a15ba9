"""Slices searched together with degrees, microbatches and recompute, and what memory has to do with it."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError

TOKENS, DEVICES, BATCH = 512, 4, 2


@pytest.fixture(scope="module")
def graph() -> Any:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=6, n_embd=256, n_head=4, n_positions=TOKENS, vocab_size=512, use_cache=False, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0,
            )
        )  # fmt: skip
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    return sw.capture(model, {"input_ids": ids, "labels": ids})


def cluster_of(memory_bytes: int | None = None) -> sw.Cluster:
    device = load_profile("cpu").device
    if memory_bytes is not None:
        device = replace(device, memory_bytes=memory_bytes, reserved_memory_bytes=0)
    return sw.Cluster(device, devices_per_node=DEVICES)


PINS: dict[str, Any] = {"batch": BATCH, "tp": 1, "schedule": "1f1b", "shard": 0, "headroom": 0.0, "precision": "fp32"}


def judged_s(plan: sw.Plan) -> float:
    """The step of a plan, with its pipeline simulated from what the plan holds."""
    pipeline = sw.simulate(plan).makespan_s
    return pipeline + plan.predicted.data_parallel_s + plan.predicted.optimizer_s


def every(graph: Any, cluster: sw.Cluster) -> Iterator[sw.Plan]:
    """Every pp × microbatch × recompute × equal slices that fits."""
    for pp in (1, 2, 4):
        each = BATCH * pp // DEVICES
        for microbatch in (size for size in (1, 2) if each and each % size == 0):
            for recompute in ("none", "full"):
                for slices in (1, 2, 4, 8):
                    lengths = {"slice_lengths": [TOKENS // slices] * slices} if slices > 1 else {}
                    pinned = {"pp": pp, "dp": DEVICES // pp, "microbatch": microbatch, "recompute": recompute}
                    with suppress(PlanError):  # too little memory
                        yield sw.plan(graph, cluster, **PINS, **pinned, **lengths)


def pipelined(graph: Any, **more: Any) -> dict[str, Any]:
    own = {"batch": 4, "pp": DEVICES, "dp": 1, "microbatch": 1, "recompute": "none"}
    return {"graph": graph, **PINS} | own | more


@pytest.mark.slow
@pytest.mark.parametrize("room", [None, 0.75, 0.5])
def test_no_worse_than_every_plan_of_a_small_space(graph: Any, room: float | None) -> None:
    """Within 0.5% of the best, at several limits of memory; ``room``: of what the fastest plan without one takes."""
    memory = None
    if room is not None:
        free = sw.plan(graph, cluster_of(), **PINS, slices="auto", answer="fastest")
        memory = int(max(free.predicted.peak_memory_bytes) * room)
    cluster = cluster_of(memory)
    found = list(every(graph, cluster))
    assert len(found) > 2
    best = min(map(judged_s, found))
    plan = sw.plan(graph, cluster, **PINS, slices="auto", answer="fastest")
    assert judged_s(plan) <= best * 1.005
    assert plan.predicted.step_time_s == pytest.approx(judged_s(plan), rel=1e-3)


def test_memory_may_be_what_makes_it_slice(graph: Any) -> None:
    """1F1B over slices holds one microbatch and some slices where whole sequences take one for each later rank."""
    starts = {"stage_starts": [0, 2, 4, 6]}  # else memory would move them
    whole = sw.plan(cluster=cluster_of(), **pipelined(graph, **starts))
    sliced = sw.plan(cluster=cluster_of(), **pipelined(graph, slice_lengths=[TOKENS // 8] * 8, **starts))
    most, less = (max(plan.predicted.peak_memory_bytes) for plan in (whole, sliced))
    assert less < 0.9 * most
    tight = cluster_of((most + less) // 2)
    with pytest.raises(PlanError, match="does not fit"):
        sw.plan(cluster=tight, **pipelined(graph, **starts))
    found = sw.plan(cluster=tight, **pipelined(graph, slices="auto", **starts))
    assert found.decision.slice_count > 1
    assert max(found.predicted.peak_memory_bytes) <= (most + less) // 2
    assert found.provenance.slices.startswith("memory: no plan of whole sequences fits")
    assert found.provenance.slices in sw.explain(found)
    # Where computing again makes room, whole sequences fit, and slices are faster than that.
    searched: dict[str, Any] = starts | {"recompute": "auto", "answer": "fastest"}
    either = sw.plan(cluster=tight, **pipelined(graph, slices="auto", **searched))
    again = sw.plan(cluster=tight, **pipelined(graph, **searched))
    assert either.predicted.step_time_s <= again.predicted.step_time_s
    assert either.provenance.slices.startswith("memory: whole, this plan lacks")


def test_a_plan_says_why_it_slices_or_not(graph: Any) -> None:
    sliced = sw.plan(cluster=cluster_of(), **pipelined(graph, batch=1, slices="auto"))
    assert sliced.provenance.slices.startswith("time: the pipeline idles")
    many = sw.plan(cluster=cluster_of(), **pipelined(graph, batch=256, slices="auto"))
    assert many.decision.slice_lengths == ()
    assert many.provenance.slices.startswith("slices do not pay")
    assert sw.plan(cluster=cluster_of(), **pipelined(graph)).provenance.slices == ""


def test_what_is_found_can_be_pinned_and_counted_anew(graph: Any) -> None:
    found = sw.plan(cluster=cluster_of(), **PINS, graph=graph, slices="auto", answer="fastest")
    again = sw.rescore(found)
    assert again.decision == found.decision
    assert again.predicted == found.predicted
    assert again.provenance.slices == found.provenance.slices


def test_slices_that_lack_memory_are_refused_by_name(graph: Any) -> None:
    whole = sw.plan(cluster=cluster_of(), **pipelined(graph))
    least = min(whole.predicted.peak_memory_bytes) // 2
    with pytest.raises(PlanError, match=r"lack|does not fit"):
        sw.plan(cluster=cluster_of(least), **pipelined(graph, slices=8))
