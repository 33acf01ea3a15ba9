"""Do action times that were measured under one schedule predict the makespan of others?

    python benchmarks/pipeline_fidelity.py                       # five models on two processes
    python benchmarks/pipeline_fidelity.py --models gpt2 vit --repetitions 5

Each model runs under one schedule while a timeline is recorded: 1F1B, where the backward of every other microbatch is
split, with one action between its halves, which tells what each kind costs. `sw.measured_costs` takes the costs of the
stages from it, and the simulator predicts the makespan of other schedules, of either kind. Then these run, with
timelines recorded, and the median of their makespans is compared. Repetitions of all schedules are interleaved, so that
a change of the machine's speed meets all of them.
"""

import argparse
import os
import statistics
import sys
from collections import defaultdict
from typing import Any

import claims
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import shardwright.torch as sw

RANKS, MICROBATCHES, WIDTH, LAYERS, TOKENS = 2, 8, 192, 8, 48
OTHERS = ("1f1b", "eager-1f1b", "gpipe", "zb-h1", "zb-h2", "auto")


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    attention = {"num_hidden_layers": LAYERS, "hidden_size": WIDTH, "num_attention_heads": 4}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=4, vocab_size=1024, n_positions=64))
    if name == "bert":
        return BertForMaskedLM(BertConfig(**attention, intermediate_size=4 * WIDTH, vocab_size=1024))
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**attention, intermediate_size=3 * WIDTH, vocab_size=1024))
    if name == "t5":
        return T5ForConditionalGeneration(
            T5Config(
                num_layers=LAYERS // 2,
                d_model=WIDTH,
                num_heads=4,
                d_kv=48,
                d_ff=4 * WIDTH,
                vocab_size=1024,
                decoder_start_token_id=0,
                pad_token_id=0,
            )
        )
    return ViTForImageClassification(ViTConfig(**attention, intermediate_size=4 * WIDTH, image_size=64, patch_size=8))


def batch(name: str, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        labels = torch.randint(0, 2, (samples,), generator=generator)
        return {"pixel_values": torch.randn(samples, 3, 64, 64, generator=generator), "labels": labels}
    ids = torch.randint(2, 1024, (samples, TOKENS), generator=generator)
    return {"input_ids": ids, "labels": ids}


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def measure(name: str, repetitions: int) -> list[tuple[str, float, list[float]]]:
    """(schedule, predicted makespan, the measured ones), in seconds."""
    sw.init({"pipeline_parallel_degree": RANKS, "microbatches": MICROBATCHES, "pipeline": "1f1b"})
    model, given = sw.DistributedModel(build(name)), batch(name, 2 * MICROBATCHES)
    train_step(model, given)

    def run(schedule: sw.Schedule) -> sw.Timeline:
        model.zero_grad()
        model.use_schedule(schedule)
        dist.barrier()
        with sw.record_timeline() as timelines:
            train_step(model, given)
        return timelines[0]

    def built(schedule: str, costs: sw.StageCosts | None = None) -> sw.Schedule:
        return sw.Schedule.build(schedule, ranks=RANKS, microbatches=MICROBATCHES, costs=costs)

    source = sw.split_backward(built("1f1b"), range(1, MICROBATCHES, 2), delay=1)
    warm = sw.measured_costs([run(source) for _ in range(3)][1:])
    schedules = {other: built(other, warm) for other in OTHERS}
    recorded, timelines = [], defaultdict[str, list[sw.Timeline]](list)
    for repetition in range(repetitions + 1):
        found = {other: run(schedule) for other, schedule in schedules.items()}
        if repetition:
            recorded.append(run(source))
            for other, timeline in found.items():
                timelines[other].append(timeline)
    costs = sw.measured_costs(recorded)
    sw.shutdown()
    return [
        (other, sw.simulate(schedule, costs).makespan_s, [t.makespan_s for t in timelines[other]])
        for other, schedule in schedules.items()
    ]


def work(rank: int, port: int, models: list[str], repetitions: int, found: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ.update(LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if rank == 0:
        print("| model | schedule | predicted_ms | measured_ms, median (quartiles) | error |")
        print("|---|---|---|---|---|")
    errors: dict[str, float] = {}
    for name in models:
        for other, predicted, times in measure(name, repetitions):
            low, middle, high = statistics.quantiles(times, n=4)
            errors[f"{name}, {other}"] = predicted / middle - 1
            if rank == 0:
                spread = f"{1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"
                print(
                    f"| {name} | {other} | {1e3 * predicted:.1f} | {spread} | {predicted / middle - 1:+.1%} |",
                    flush=True,
                )
    if rank == 0:
        within = sum(abs(error) <= 0.05 for error in errors.values())
        median = statistics.median(abs(error) for error in errors.values())
        print(f"\n{within} of {len(errors)} predictions within 5%; the median error {median:.1%}.\n", flush=True)
        found.put(errors)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert", "llama", "t5", "vit"])
    parser.add_argument("--repetitions", type=int, default=11)
    parser.add_argument("--port", type=int, default=29519)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("# Fidelity of predictions from measured actions\n\n    " + " ".join(["python", *sys.argv]) + "\n")
    found = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, args=(given.port, given.models, given.repetitions, found), nprocs=RANKS)
    judged = claims.pipeline_fidelity(found.get())
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
