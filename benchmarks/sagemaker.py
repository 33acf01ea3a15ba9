"""SageMaker's published figures beside predictions, and how predictions scale. Their software is not ours: each figure
is theirs, the prediction is of the plan that this library would run on that hardware."""

from typing import Any

from predict import graph_of

import shardwright as sw


def gpt_parameters(hidden: int, layers: int) -> float:
    return 12.0 * layers * hidden**2


def _flops_per_sample(hidden: int, layers: int, sequence: int, vocabulary: int = 51200) -> float:
    """Forward and backward of one sample (arXiv 2104.04473, section 3, without recompute)."""
    return 72.0 * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (12 * layers * hidden))


def _rates(samples_per_s: float, devices: int) -> str:
    each = samples_per_s * _flops_per_sample(12288, 96, 2048) / devices / 1e12
    return f"{samples_per_s:.1f} samples/s, {each:.0f} TFLOP/s each"


def _row(plan: sw.Plan) -> str:
    return f"{_rates(plan.decision.batch / plan.predicted.step_time_s, plan.mesh.size)} | {plan.summary()}"


SHARDED = {"pp": 1, "tp": 1, "shard": 3, "recompute": "full", "precision": "fp16"}
SAMPLES = (4, 8, 16, 32)
"""The samples that each device may have had in the 10B run."""
PUBLISHED_10B, LEAD_10B = 564, 0.139
LEAD_30B = 0.397


def _rate_of_10b(samples: int, **pins: Any) -> float:
    """Samples/s of the 10B model with so many samples on each of 128 devices."""
    cluster = sw.Cluster("a100-40gb", nodes=16, devices_per_node=8, inter_node="efa-400g")
    graph = graph_of(4096, 32, 48, 512)
    plan = sw.plan(graph, cluster, batch=samples * 128, dp=128, microbatch=samples, **SHARDED, **pins)
    return plan.decision.batch / plan.predicted.step_time_s


def _row_of_10b() -> list[str]:
    each = [_rate_of_10b(samples, like="sagemaker", shard_group=8) for samples in SAMPLES]
    low, high = min(each), max(each)
    said = f"{low:.0f} to {high:.0f} samples/s ({low / PUBLISHED_10B - 1:+.1%} to {high / PUBLISHED_10B - 1:+.1%})"
    plan = f"{min(SAMPLES)} to {max(SAMPLES)} samples on each device, which are not published: see below"
    return [f"| 10B, sequence 512, taken as 128 A100 | {PUBLISHED_10B} samples/s | {said} | {plan} |"]


def _by_samples() -> list[str]:
    """The 10B run by what each device has of the batch, with its lead over FSDP."""
    lines = [
        "How many samples each device of the 10B run has is not published. It decides how much traffic is hidden "
        "by computing, and so the lead over FSDP, which is published: 13.9%, so that FSDP has 495 samples/s. Both "
        "with everything recomputed, sharded by 8 on a node as sagemaker runs it and by all 128 as fsdp2 does:",
        "",
        "| samples on each device | samples/s | over published | FSDP | over published | lead |",
        "|---|---|---|---|---|---|",
    ]
    fsdp = PUBLISHED_10B / (1 + LEAD_10B)
    for samples in SAMPLES:
        ours = _rate_of_10b(samples, like="sagemaker", shard_group=8)
        theirs = _rate_of_10b(samples, like="fsdp2")
        lines.append(
            f"| {samples} | {ours:.0f} | {ours / PUBLISHED_10B - 1:+.1%} | {theirs:.0f} | {theirs / fsdp - 1:+.1%} "
            f"| {ours / theirs - 1:+.1%} |"
        )
    return [
        *lines,
        "",
        "A lead like the published one needs traffic that computing does not hide, as there is with about 8 samples on "
        "each device; with 32 there is little. No constant was moved.",
        "",
    ]


def sagemaker_lines() -> list[str]:
    lines = [
        "## SageMaker's published figures (arXiv 2111.05972 and its documentation), and what is predicted there",
        "",
        "| case | published | predicted | plan |",
        "|---|---|---|---|",
    ]
    cluster = sw.Cluster("a100-40gb", nodes=120, devices_per_node=8, inter_node="efa-400g")
    gpt3 = graph_of(12288, 96, 96, 2048)
    plan = sw.plan(gpt3, cluster, batch=1920, tp=8, dp=20, pp=6, precision="fp16")
    lines.append(f"| GPT-3 175B, 120 × 8 A100 (p4d), the best plan | {_rates(32, 960)} | {_row(plan)} |")
    usual = {"schedule": "1f1b", "virtual_stages": 1, "recompute": "full", "sequence_parallel": False}
    plan = sw.plan(gpt3, cluster, batch=1920, tp=8, dp=20, pp=6, precision="fp16", shard=1, microbatch=1, **usual)  # type: ignore[arg-type]
    lines.append(f"| the same, 1F1B with everything recomputed | {_rates(32, 960)} | {_row(plan)} |")
    cluster = sw.Cluster("a100-40gb", nodes=32, devices_per_node=8, inter_node="efa-400g")
    gpt30 = graph_of(7168, 56, 48, 2048)
    rates: list[float] = []
    flops = 6 * gpt30.parameter_count() * 2048 * 1024 * (1 + 2048 / (6 * 7168))
    for what, published, pins in (
        ("GPT-2 30B, sequence 2048, 256 A100", 141, {"like": "sagemaker", "shard_group": 64}),
        ("the same by DeepSpeed's ZeRO-3", 101, {"like": "deepspeed"}),
        ("the same by its code of 2021", 101, {"like": "deepspeed-0.4"}),
    ):
        plan = sw.plan(gpt30, cluster, batch=1024, dp=256, **SHARDED, **pins)  # type: ignore[arg-type]
        rate = flops / plan.predicted.step_time_s / 256 / 1e12
        rates.append(rate)
        off = f"{rate / published - 1:+.1%}"
        lines.append(f"| {what} | {published} TFLOP/s | {rate:.0f} TFLOP/s ({off}) | {plan.summary()} |")
    lead = rates[0] / rates[1]
    off = f"{lead / (1 + LEAD_30B) - 1:+.1%} of the ratio"
    lines.append(f"| its lead over ZeRO-3 | {LEAD_30B:.1%} | {lead - 1:.1%} ({off}) | |")
    lines += _row_of_10b()
    lines += [
        "",
        "Batches and degrees are not published for all of these; those in the table are ours. The number of devices of "
        "the 10B figure is assumed, so that its error is that of this number too. TFLOP/s are those of the model, "
        "without what is computed again. The version of DeepSpeed is not published: until 2021 its gathers copied one "
        "tensor for each rank, which 256 ranks feel. No number is fitted on this row; of the mechanisms of ZeRO-3 one "
        "has a fitted constant, a rate that this port does not reach ([table](large_runs.md)).",
        "",
        *_by_samples(),
        "Why 175B differs: 32 samples/s are 73 TFLOP/s on each A100, 23% of its peak. That library pipelines whole "
        "backwards and gathers and scatters the samples of a tensor group around every distributed module; the batch, "
        "the degrees and what was computed again are not published. The second row is as much of that as a plan of "
        "this library can say; what is left, published over predicted, is what that runtime adds. No constant was "
        "moved towards the figure.",
        "",
        "## Scaling",
        "",
        "GPT 22B (6144 × 48, sequence 2048), A100-80GB over HDR InfiniBand, tp 8, full recompute, optimizer states "
        "shared by the replicas.",
        "",
        "| devices | weak: batch | samples/s per device | efficiency | strong: batch 1024, samples/s | efficiency |",
        "|---|---|---|---|---|---|",
    ]
    graph = graph_of(6144, 64, 48, 2048)
    base_weak = base_strong = 0.0
    for nodes in (1, 4, 16, 64):
        cluster = sw.Cluster("a100-80gb", nodes=nodes, devices_per_node=8)
        pins = {"pp": 1, "tp": 8, "dp": nodes, "recompute": "full", "precision": "fp16", "microbatch": 4, "shard": 1}
        weak = sw.plan(graph, cluster, batch=16 * nodes, **pins).predicted.step_time_s  # type: ignore[arg-type]
        strong = sw.plan(graph, cluster, batch=1024, **pins).predicted.step_time_s  # type: ignore[arg-type]
        each, whole = 16 / weak / 8, 1024 / strong
        base_weak, base_strong = base_weak or each, base_strong or whole
        lines.append(
            f"| {8 * nodes} | {16 * nodes} | {each:.3f} | {each / base_weak:.0%} | {whole:.1f} "
            f"| {whole / base_strong / nodes:.0%} |"
        )
    return lines
