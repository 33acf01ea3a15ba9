"""Published runs of other systems on many devices, beside what is predicted for each as its own system runs it.

    python benchmarks/large_runs.py [--data FOLDER] [--write benchmarks/results/large_runs.md]

Every row is a plan with all that was published pinned and ``like=`` its system. Where microbatch or virtual stages were
not published, the figure is the range over those that fit into memory.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

from megatron import gpt
from published import DATA

import shardwright as sw
from shardwright.core.errors import ShardwrightError

Row = dict[str, str]
ALLOWED = 0.10
WIDEST = 0.15
"""The most that the range over what was not published may be wide, as a share of its middle."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    started = time.perf_counter()
    with (options.data / "published_large_runs.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if options.only in row["system"]]
    lines = [
        "# Published runs of other systems",
        "",
        "    python benchmarks/large_runs.py",
        "",
        "| system | model | GPUs | published | predicted | error | exposed over dp | hidden | peak memory | plan |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        print(line := _line(row), flush=True)
        lines.append(line)
    lines += ["", f"Whole benchmark: {time.perf_counter() - started:.0f} s."]
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    return 0


def _line(row: Row) -> str:
    plans = list(_plans(row))
    value, unit = float(row["value"]), row["unit"].split(";")[0]
    what = f"| {row['system']} | {row['parameters_billion']}B | {row['gpus']} | {value:g} {unit} |"
    if not plans:
        return f"{what} no plan fits | | | | | |"
    found = sorted((_rate(row, plan), index) for index, plan in enumerate(plans))
    (low, slow), (high, fast) = found[0], found[-1]
    if len(found) == 1:
        said, error = f"{low:.0f}", f"{low / value - 1:+.1%}"
    else:
        inside = low <= value <= high
        said = f"{low:.0f} to {high:.0f}"
        error = "within" if inside else f"{min(low / value - 1, high / value - 1, key=abs):+.1%}"
        error += f", {2 * (high - low) / (high + low):.0%} wide"
    plan = plans[fast]
    p = plan.predicted
    exposed = p.data_parallel_s + p.passes_wait_s
    peak = max(p.peak_memory_bytes) / 2**30
    summary = plan.summary() if len(found) == 1 else f"{plans[slow].summary()} to {plan.summary()}"
    return (
        f"{what} {said} | {error} | {exposed / p.step_time_s:.1%} | {p.data_parallel_hidden_s / p.step_time_s:.1%} "
        f"| {peak:.1f} GiB | {summary} |"
    )


def _plans(row: Row) -> Iterator[sw.Plan]:
    """The plans that a row may have been: one, or those over what it leaves open."""
    cluster, graph = _cluster(row), _graph(row)
    pp, dp, batch, layers = (int(row[name]) for name in ("pp", "dp", "global_batch", "layers"))
    like = {
        "DeepSpeed ZeRO-3": "deepspeed",
        "torchtitan FSDP2 eager": "fsdp2",
        "torchtitan FSDP2 compiled": "fsdp2-compiled",
        "Megatron-Core": "megatron-core",
    }[row["system"]]
    microbatches = [int(row["microbatch"])] if row["microbatch"] else [1, 2, 4]
    for microbatch in microbatches:
        for virtual in _virtual(row, layers, pp):
            if batch % (dp * microbatch):
                continue
            try:
                yield sw.plan(
                    graph,
                    cluster,
                    batch=batch,
                    pp=pp,
                    dp=dp,
                    tp=int(row["tp"]),
                    microbatch=microbatch,
                    virtual_stages=virtual,
                    schedule=None if pp == 1 else "interleaved-1f1b" if virtual > 1 else "1f1b",
                    recompute={"full": "full", "none": "none", "selective by op": "alternate"}[row["recompute"]],
                    shard=int(row["shard"]),
                    gathered_stages=0 if row["shard"] == "3" else None,
                    precision=row["precision"],
                    gradient_precision=None if row["system"].startswith("DeepSpeed") else "fp32",
                    sequence_parallel=True if int(row["tp"]) > 1 else None,
                    like=like,
                )
            except ShardwrightError as error:
                print(f"    microbatch {microbatch}, {virtual} virtual stages: {error}", file=sys.stderr)


def _virtual(row: Row, layers: int, pp: int) -> list[int]:
    if row["microbatch"] or pp == 1:
        return [1]
    return [virtual for virtual in (1, 2, 3, 4, 6) if layers % (pp * virtual) == 0]


def _rate(row: Row, plan: sw.Plan) -> float:
    """What the row gives: TFLOP/s of a device by the formula of arXiv 2104.04473, section 3, or tokens of a device."""
    step_s, gpus, batch, sequence = (
        plan.predicted.step_time_s,
        *(int(row[n]) for n in ("gpus", "global_batch", "sequence")),
    )
    if row["unit"].startswith("tokens"):
        return batch * sequence / step_s / gpus
    hidden, layers, words = (int(row[name]) for name in ("hidden", "layers", "vocabulary"))
    passes = 96 if row["recompute"] == "full" else 72
    head = words / (passes / 6 * layers * hidden)
    return passes * batch * sequence * layers * hidden**2 * (1 + sequence / (6 * hidden) + head) / step_s / gpus / 1e12


def _cluster(row: Row) -> sw.Cluster:
    gpus = int(row["gpus"])
    name = "a100-80gb" if row["device"].startswith("A100") else "h100-500w" if "500 W" in row["device"] else "h100"
    return sw.Cluster(name, nodes=gpus // 8, devices_per_node=8)  # with its usual ports: HDR and NDR, one a device


@lru_cache(maxsize=1)
def _llama() -> sw.Graph:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(2, 8192, dtype=torch.int64)
    return sw.capture(model, {"input_ids": tokens, "labels": tokens})


def _graph(row: Row) -> sw.Graph:
    if row["system"].startswith("torchtitan"):
        return _llama()
    sizes = (int(row[name]) for name in ("layers", "hidden", "heads", "sequence", "vocabulary"))
    return _gpt(*sizes, fused_attention=row["system"] == "Megatron-Core")


_gpt: Callable[..., sw.Graph] = lru_cache(maxsize=4)(gpt)

if __name__ == "__main__":
    sys.exit(main())
