"""Token slices against TeraPipe's published steps.

    python benchmarks/token_slices.py [--write benchmarks/results/token_slices.md]

Published (arXiv 2102.07988, and the settings in github.com/zhuohan123/terapipe): GPT-3 of 175, 13 and 1 billion
parameters, sequences of 2,048 tokens, p3.16xlarge nodes of eight V100 with 25 Gbit/s. Nothing is fitted on them. As in
its code (``mpu/initialize.py``) the stages of one replica lie on neighbouring ranks, so that of eight replicas a node
sends one message at a time to the next; models are their layers alone, without embeddings and heads; sequences are
whole on the tensor axis; a stage waits for what it sends (``like="terapipe"``). The step of 1B on 24 stages is the one
that its code names for both ways (``flop_model.py``). Rows that the paper does not make stand beside: whole sequences
under the best schedule and microbatch of ours, slices searched together with them, and the best slices of equal
lengths.
"""

import argparse
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import torch
import transformers

import shardwright as sw
from shardwright.core.errors import PlanError
from shardwright.core.plan.plan import Plan

TOKENS, WORDS = 2048, 8
HEADER = ("| model | form | slices | step, s | published, s | error | bubble |", "|---|---|---|---|---|---|---|")


@dataclass(frozen=True)
class Setting:
    """A published setting: the model's sizes, the degrees, and the batch; seconds where they were published."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    dp: int
    pp: int
    tp: int
    whole_s: float | None
    sliced_s: float | None


SETTINGS = (
    Setting("175B", 96, 12288, 96, 2, 1, 48, 8, 5.822, 1.160),
    Setting("13B", 40, 5120, 40, 32, 1, 40, 8, 1.863, 1.328),
    Setting("1B", 24, 2048, 16, 72, 1, 24, 8, 0.913, 0.913),
    Setting("1B, 8 replicas", 24, 2048, 16, 128, 8, 24, 1, None, None),
)


class Layers(torch.nn.Module):
    """The layers of a GPT, as the paper's code runs them: without a head, and with next to no words. The loss is the
    mean of what the last layer makes."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.layers = transformers.GPT2Model(
            transformers.GPT2Config(
                n_layer=setting.layers, n_embd=setting.width, n_head=setting.heads, n_positions=TOKENS,
                vocab_size=WORDS, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
                eos_token_id=0,
            )
        )  # fmt: skip

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.layers(input_ids=input_ids).last_hidden_state.float().mean()


def captured(setting: Setting) -> Any:
    with torch.device("meta"):
        model = Layers(setting)
    return sw.capture(model, {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)})


def row(setting: Setting, form: str, plan: Plan, published: float | None) -> str:
    said, lengths = plan.predicted, plan.decision.slice_lengths
    text = "1" if len(lengths) < 2 else f"{len(lengths)} of {min(lengths)} to {max(lengths)}"
    error = "" if published is None else f"{said.step_time_s / published - 1:+.0%}"
    shown = "" if published is None else f"{published:.3f}"
    seconds, bubble = said.step_time_s, said.bubble_fraction
    return f"| {setting.name} | {form} | {text} | {seconds:.3f} | {shown} | {error} | {bubble:.0%} |"


def published(setting: Setting, lines: list[str]) -> dict[str, Plan]:
    graph = captured(setting)
    nodes = setting.dp * setting.pp * setting.tp // 8
    cluster = sw.Cluster("v100", nodes=nodes, devices_per_node=8, inter_node="ethernet-25g")
    degrees: dict[str, Any] = {
        "batch": setting.batch, "pp": setting.pp, "tp": setting.tp, "dp": setting.dp, "precision": "fp16",
        "headroom": 0.0, "shard": 0, "virtual_stages": 1, "placement_order": "DPT",
        "sequence_parallel": False if setting.tp > 1 else None, "like": "terapipe",
    }  # fmt: skip
    theirs = degrees | {"schedule": "gpipe", "microbatch": 1, "recompute": "none"}
    found = {"whole": sw.plan(graph, cluster, **theirs), "sliced": sw.plan(graph, cluster, **theirs, slices="auto")}
    lines.append(row(setting, "whole sequences, as theirs", found["whole"], setting.whole_s))
    lines.append(row(setting, "slices, ours to choose", found["sliced"], setting.sliced_s))
    found["best whole"] = sw.plan(graph, cluster, **degrees, answer="fastest")
    best = found["best whole"].decision
    lines.append(row(setting, f"whole, {best.schedule}, microbatch {best.microbatch}", found["best whole"], None))
    found["joint"] = sw.plan(graph, cluster, **degrees, slices="auto", answer="fastest")
    best = found["joint"].decision
    form = f"slices, {best.schedule}, microbatch {best.microbatch}, recompute {best.recompute}"
    lines.append(row(setting, form, found["joint"], None))
    equal = []
    for count in (2, 4, 8, 16, 32, 64, 128):
        with suppress(PlanError):  # so many that their keys and values take more memory than there is
            equal.append(sw.plan(graph, cluster, **theirs, slice_lengths=[TOKENS // count] * count))
    found["equal"] = min(equal, key=lambda plan: plan.predicted.step_time_s)
    lines.append(row(setting, "best equal slices", found["equal"], None))
    print("\n".join(lines[-5:]), flush=True)
    print(f"<!-- {setting.name}: {found['sliced'].provenance.slices} -->", flush=True)
    return found


def all_published(names: Collection[str]) -> tuple[list[str], dict[str, float]]:
    lines, ratios = list(HEADER), {}
    for setting in SETTINGS:
        if setting.name not in names:
            continue
        found = published(setting, lines)
        ratios[setting.name] = found["whole"].predicted.step_time_s / found["sliced"].predicted.step_time_s
        lines.append(f"| {setting.name} | whole over sliced | | {ratios[setting.name]:.2f} | | | |")
    return lines, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="append the table to this file")
    names = [setting.name for setting in SETTINGS]
    parser.add_argument("--settings", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    lines, ratios = all_published(options.settings)
    if options.write is not None:
        with options.write.open("a") as file:
            file.write("\n".join(lines) + "\n")
    judged = claims.token_slices(ratios)
    print(judged.verdict())
    sys.exit(judged.exit_code)


if __name__ == "__main__":
    main()
