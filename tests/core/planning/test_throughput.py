"""Samples, tokens and FLOPs per second of a plan, against closed forms."""

from dataclasses import replace
from pathlib import Path

import pytest

import shardwright as sw
from shardwright import Cluster
from shardwright.core.model.graph import Graph
from shardwright.core.plan.throughput import StepWork, throughput
from tests.core.toy import decoder

LAYERS, HIDDEN, VOCABULARY, LENGTH, BATCH = 4, 256, 1024, 128, 32
GRAPH = decoder(layers=LAYERS, hidden=HIDDEN, heads=8, vocabulary=VOCABULARY, sequence=LENGTH)
MATRICES = sum(GRAPH.tensors[p.tensor].elements(1) for p in GRAPH.parameters if len(GRAPH.tensors[p.tensor].fixed) == 2)
"""Entries of matrices, the table once: it is the head too, and a lookup multiplies nothing."""
SCORES = 2 * 2 * LAYERS * HIDDEN * LENGTH
"""FLOPs of attention for a token, forward: scores, and their product with the values, over the whole length."""


def plan(graph: Graph = GRAPH, **given: object) -> sw.Plan:
    return sw.plan(graph, Cluster("h100", devices_per_node=4), batch=BATCH, **({"precision": "bf16"} | given))


def test_flops_are_those_of_the_formula() -> None:
    work = plan(recompute="none").work
    tokens = BATCH * LENGTH
    assert (work.tokens, work.tokens_of, work.recomputed_flops, work.unknown) == (tokens, "tokens", 0, ())
    assert dict(work.flops) == {"bf16": tokens * 3 * (2 * MATRICES + SCORES)}


def test_rates_follow_from_the_step() -> None:
    found = plan(recompute="none")
    rates, step_s = found.throughput, found.predicted.step_time_s
    (flops,) = dict(found.work.flops).values()
    assert rates.samples_per_s == pytest.approx(BATCH / step_s)
    assert rates.tokens_per_s == pytest.approx(BATCH * LENGTH / step_s)
    assert rates.flops_per_s == rates.hardware_flops_per_s == pytest.approx(flops / step_s / 4)
    peak = dict(found.provenance.peak_flops_per_s)["bf16"]
    assert rates.mfu == pytest.approx(flops / step_s / 4 / peak)


@pytest.mark.parametrize("split", [{"pp": 4}, {"tp": 4, "pp": 1}, {"dp": 4, "shard": 3, "pp": 1}])
def test_work_does_not_depend_on_the_split(split: dict[str, int]) -> None:
    assert plan(recompute="none", **split).work == plan(recompute="none").work


def test_full_recompute_repeats_the_blocks_and_selective_their_scores() -> None:
    none, full, selective = (plan(recompute=how, pp=1, dp=4) for how in ("none", "full", "selective"))
    assert none.work.flops == full.work.flops == selective.work.flops
    (flops,) = dict(none.work.flops).values()
    head = BATCH * LENGTH * 2 * HIDDEN * VOCABULARY
    assert full.work.recomputed_flops == flops // 3 - head
    assert full.throughput.hardware_flops_per_s > full.throughput.flops_per_s
    assert full.throughput.mfu < none.throughput.mfu
    assert selective.work.recomputed_flops == 0, "the kernel of attention keeps no scores, and so none are repeated"


def test_fp8_products_are_told_apart() -> None:
    graph = replace(GRAPH, capabilities=replace(GRAPH.capabilities, fp8=True))
    work = plan(graph, precision="fp8", recompute="none").work
    assert set(dict(work.flops)) == {"bf16", "fp8"}
    assert sum(dict(work.flops).values()) == sum(dict(plan(recompute="none").work.flops).values())


def test_what_is_not_known_is_not_told() -> None:
    rates = throughput(StepWork(flops=(("bf16", 10),), unknown=("a kernel",)), 8, 2.0, 4, {"bf16": 1.0})
    assert (rates.samples_per_s, rates.tokens_per_s, rates.flops_per_s, rates.mfu) == (4.0, None, None, None)
    rates = throughput(StepWork(flops=(("fp64", 10),)), 8, 2.0, 4, {"bf16": 1.0})
    assert (rates.flops_per_s, rates.mfu) == (1.25, None)


def test_the_file_has_it(tmp_path: Path) -> None:
    found = plan()
    found.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again.work == found.work
    assert again.throughput == found.throughput
    assert replace(again, work=StepWork()).throughput.tokens_per_s is None
