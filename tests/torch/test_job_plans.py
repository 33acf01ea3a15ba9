"""Plans of jobs of real models: branches, tied parameters and convolutions cut for a third of what they take."""

import pytest
import torch
from transformers import ResNetConfig, ResNetForImageClassification, T5Config, T5ForConditionalGeneration

import shardwright as sw
from shardwright.core.errors import PlanError
from shardwright.core.jobs.shard_tables import ShardTables
from shardwright.core.model.fold import fold
from shardwright.core.model.graph import Graph

CPUS = sw.Cluster("cpu", devices_per_node=2)


def t5() -> Graph:
    config = T5Config(
        num_layers=3, num_decoder_layers=3, d_model=32, d_ff=128, num_heads=4, d_kv=8, vocab_size=64, use_cache=False,
        decoder_start_token_id=0,
    )  # fmt: skip
    tokens = torch.zeros(2, 16, dtype=torch.long)
    return sw.capture(T5ForConditionalGeneration(config).train(), {"input_ids": tokens, "labels": tokens})


def resnet() -> Graph:
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32], "depths": [3, 3, 3], "num_labels": 10}
    model = ResNetForImageClassification(ResNetConfig(layer_type="basic", **sizes)).train()
    labels = torch.zeros(2, dtype=torch.long)
    return sw.capture(model, {"pixel_values": torch.zeros(2, 3, 32, 32), "labels": labels})


def test_models_are_cut_for_a_third_of_what_they_take() -> None:
    graphs = {"t5": t5(), "resnet": resnet()}
    jobs = [
        sw.Job(name="t5", model=graphs["t5"], steps=3, batch=4, precision="fp32", clip_norm=1.0),
        sw.Job(name="resnet", model=graphs["resnet"], steps=3, batch=4, precision="fp32", optimizer="momentum"),
    ]
    tables = [ShardTables(job, CPUS) for job in jobs]
    steps = [max(own.device_bytes for own in of.passes(0, of.units, "keep")) for of in tables]
    # A model that is trained whole has its optimizer's states beside every step.
    whole = [step + of.optimizer_bytes(0, of.units) for step, of in zip(steps, tables, strict=True)]
    plan = sw.plan_jobs(jobs, CPUS, budget_bytes=min(whole) // 3)
    assert plan.device_bytes <= min(whole) // 3
    for job in plan.jobs:
        graph = graphs[job.name]
        units = fold(graph, job.nesting).units
        assert len(job.shards) > 3
        assert (job.shards[0].first_unit, job.shards[-1].end_unit) == (0, len(units))
        assert job.host.parameters >= 4 * graph.parameter_count()
    first, second = plan.jobs
    assert first.nesting > 0
    # T5's table is used by the encoder, the decoder and the head: it is held by each, and updated once.
    held = sum(shard.parameters_bytes for shard in first.shards)
    assert held >= 4 * (graphs["t5"].parameter_count() + 2 * 64 * 32)
    assert sum(shard.optimizer_bytes for shard in first.shards) == 8 * graphs["t5"].parameter_count()
    assert {own.kind for own in first.passes} == {"forward", "fused", "backward", "update"}
    # The encoder's output is on the host once, however many shards of the decoder read it.
    assert first.host.values > 0
    assert second.waiting.reason == ""
    assert sum(shard.optimizer_bytes for shard in second.shards) == 4 * graphs["resnet"].parameter_count()
    with pytest.raises(PlanError, match=r"operation aten\.batch_norm\S* of resnet\.\S+ has operands"):
        sw.plan_jobs(jobs[1:], CPUS, budget_bytes=min(whole) // 20)


def test_opened_blocks_are_parts_of_whole_ones() -> None:
    graph = resnet()
    before = fold(graph)
    for nesting in (1, 2):
        finer = fold(graph, nesting)
        assert len(finer.units) > len(before.units)
        assert [u.first_op for u in finer.units[1:]] == [u.end_op for u in finer.units[:-1]]
        paths = {unit.calls[0].path for unit in finer.units if unit.calls}
        assert f"resnet.encoder.stages.1.layers.1{'.layer.0' if nesting == 2 else ''}" in paths
        before = finer
