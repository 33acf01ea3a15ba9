"""Published runs of other systems on many devices, beside what is predicted for each as its own system runs it.

    python benchmarks/large_runs.py [--data FOLDER] [--write benchmarks/results/large_runs.md]

Every row is a plan with all that was published pinned and ``like=`` its system. Where microbatch and virtual stages
were not published, all of them are planned that divide batch and layers ("all that fit" into memory). Among them are
some that nobody keeps who tries another, such as one microbatch for two pipeline ranks. So the figure is the range over
those that a tuned run may have had: predicted to take at most 15% longer than the fastest. This number is a choice, not
measured, and limits how wide the range gets. Whether the published figure lies in the range does not follow from it.

Exits with 1 where a row is farther off than 10%, or its range wider than 15%.
"""

import argparse
import csv
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import claims
from megatron import gpt
from published import DATA

import shardwright as sw
from shardwright.core import execution
from shardwright.core.errors import ShardwrightError
from shardwright.core.search import search

Row = dict[str, str]
TUNED = 0.15
"""How much longer than the fastest a setting may take that a tuned run had, as predicted."""
ZERO_3 = "DeepSpeed ZeRO-3"
SYSTEM_OF = {
    ZERO_3: "deepspeed-0.4",
    "torchtitan FSDP2 eager": "fsdp2",
    "torchtitan FSDP2 compiled": "fsdp2-compiled",
    "Megatron-Core": "megatron-core",
}
"""The name by which ``like=`` knows a system of the table."""


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
        "Where microbatch and virtual stages were not published, the prediction is the range over settings that a "
        f"tuned run may have had: predicted to take at most {TUNED:.0%} longer than the fastest. This number is a "
        "choice, and limits the range's width. Beside it is the range over all settings that fit.",
        "",
        "| system | model | GPUs | published | predicted | error | all that fit | exposed over dp | hidden "
        "| peak memory | plan |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    found: dict[str, tuple[float, float]] = {}
    for row in rows:
        line, off, width = _line(row)
        found[f"{row['system']}, {row['parameters_billion']}B on {row['gpus']}"] = off, width
        print(line, flush=True)
        lines.append(line)
    lines += _without_each([row for row in rows if row["system"] == ZERO_3])
    lines += ["", f"Whole benchmark: {time.perf_counter() - started:.0f} s."]
    print(lines[-1])
    if options.write:
        options.write.write_text("\n".join(lines) + "\n")
    judged = claims.large_runs(found)
    print(judged.verdict())
    return judged.exit_code


def _line(row: Row) -> tuple[str, float, float]:
    """The row of the table, its error, and the width of its range as a share of the middle."""
    plans = list(plans_of(row, cluster_of(row)))
    value, unit = float(row["value"]), row["unit"].split(";")[0]
    what = f"| {row['system']} | {row['parameters_billion']}B | {row['gpus']} | {value:g} {unit} |"
    if not plans:
        return f"{what} no plan fits | | | | | | |", math.nan, math.nan
    every = sorted((rate_of(row, plan), index) for index, plan in enumerate(plans))
    found = [each for each in every if each[0] * (1 + TUNED) >= every[-1][0]]
    (low, slow), (high, fast) = found[0], found[-1]
    off, width = max(low / value - 1, min(0.0, high / value - 1)), 2 * (high - low) / (high + low)
    if len(plans) == 1:
        said, error, fitting = f"{low:.0f}", f"{off:+.1%}", ""
    else:
        said = f"{low:.0f} to {high:.0f}"
        error = f"{'in the range' if off == 0 else f'{off:+.1%} of its end'}, {width:.0%} wide"
        fitting = f"{every[0][0]:.0f} to {high:.0f} ({len(every)}; {len(found)} tuned)"
    plan = plans[fast]
    p = plan.predicted
    exposed = p.data_parallel_s + p.passes_wait_s
    peak = max(p.peak_memory_bytes) / 2**30
    summary = plan.summary() if len(found) == 1 else f"{plans[slow].summary()} to {plan.summary()}"
    line = (
        f"{what} {said} | {error} | {fitting} | {exposed / p.step_time_s:.1%} "
        f"| {p.data_parallel_hidden_s / p.step_time_s:.1%} | {peak:.1f} GiB | {summary} |"
    )
    return line, off, width


def _without_each(rows: list[Row]) -> list[str]:
    """The error of each row of ZeRO-3 without one of its mechanisms at a time, and with gathers that hide."""
    if not rows:
        return []
    known, name = execution.SYSTEMS, SYSTEM_OF[ZERO_3]
    lines = [
        "",
        "What each mechanism of DeepSpeed's ZeRO-3 adds (`shardwright/core/execution.py`): errors with all, without "
        "one, and with gathers that travel beside computing one unit ahead, at this rate and at the one that fits the "
        "first row. Only `gathered_bytes_per_s` is fitted on these rows.",
        "",
        f"| | {' | '.join(row['gpus'] + ' GPUs' for row in rows)} |",
        "|---|" + "---|" * len(rows),
    ]
    hides = {"prefetched_units": 1, "gradients": True}
    for said, changes in (
        ("all of them", {}),
        ("without `lists_ranks`: a copy for each rank of a gather", {"lists_ranks": False}),
        ("without `live_entries`: parameters gathered once more", {"live_entries": 0}),
        ("without `whole_entries`: small parameters stay whole", {"whole_entries": 0}),
        ("without `gathered_bytes_per_s`: the rate of gathers", {"gathered_bytes_per_s": 0.0}),
        ("gathers hide", hides),
        ("gathers hide, at 16 GB/s", hides | {"gathered_bytes_per_s": 16e9}),
    ):
        try:
            execution.SYSTEMS = known | {name: replace(known[name], **changes)}  # type: ignore[arg-type]
            search._REMEMBERED.clear()
            plans = [next(plans_of(row, cluster_of(row))) for row in rows]
        finally:
            execution.SYSTEMS = known
            search._REMEMBERED.clear()
        errors = [rate_of(row, plan) / float(row["value"]) - 1 for row, plan in zip(rows, plans, strict=True)]
        lines.append(f"| {said} | {' | '.join(f'{error:+.1%}' for error in errors)} |")
        print(lines[-1], flush=True)
    return lines


def plans_of(row: Row, cluster: sw.Cluster) -> Iterator[sw.Plan]:
    """The plans that a row may have been: one, or those over what it leaves open."""
    graph = _graph(row)
    pp, dp, batch, layers = (int(row[name]) for name in ("pp", "dp", "global_batch", "layers"))
    microbatches = [int(row["microbatch"])] if row["microbatch"] else _divisors(batch // dp)
    for microbatch in microbatches:
        for virtual in _virtual(row, layers, pp):
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
                    like=SYSTEM_OF[row["system"]],
                )
            except ShardwrightError as error:
                print(f"    microbatch {microbatch}, {virtual} virtual stages: {error}", file=sys.stderr)


def _virtual(row: Row, layers: int, pp: int) -> list[int]:
    if row["microbatch"] or pp == 1:
        return [1]
    return _divisors(layers // pp)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def rate_of(row: Row, plan: sw.Plan) -> float:
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


def cluster_of(row: Row) -> sw.Cluster:
    gpus = int(row["gpus"])
    name = "a100-80gb" if row["device"].startswith("A100") else "h100-500w" if "500 W" in row["device"] else "h100"
    return sw.Cluster(name, nodes=gpus // 8, devices_per_node=8)  # with its usual ports: HDR and NDR, one a device


@lru_cache(maxsize=1)
def _llama() -> sw.Graph:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        use_cache=False,  # theirs has no cache of keys and values
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
