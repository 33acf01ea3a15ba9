"""Whether values of Python that change in every step cost recordings, and what looking at them costs.

    python benchmarks/annealing.py [--layers 24]

On one process, with the pipeline's own recorder: a step whose loss is weighed by an argument, a global and an attribute
that all change in each of 20 steps is recorded twice at most, by its losses it is the unsplit model, and reading the
values that the recording of a Hugging Face model of 24 layers rests on takes less than 1% of a step of 200 ms. Exits
with 1 where one of these does not hold.
"""

import argparse
import copy
import sys
import time
from typing import Any

import claims
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw
from shardwright.backends.torch.program.step_recorder import StepRecorder

STEPS, STEP_S = 20, 0.2
beta = 1.0


def train_step(model: Any, ids: torch.Tensor, weight: float) -> torch.Tensor:
    loss = model(input_ids=ids, labels=ids).loss * weight / model.temperature + (1.0 - beta) ** 2
    model.backward(loss)
    return loss


class Plain:
    """The unsplit model as the step sees it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def __call__(self, **named: Any) -> Any:
        return self.module(**named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / 2).backward()


def gpt2(layers: int) -> Any:
    torch.manual_seed(0)
    sizes = {"n_layer": layers, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.temperature = 1.0
    return model


def annealed() -> tuple[int, float]:
    """How often the step was recorded, and the largest relative difference between losses."""
    global beta
    sw.init({"microbatches": 2})
    module = gpt2(2)
    plain, model, step = Plain(copy.deepcopy(module)), sw.DistributedModel(module), sw.step(train_step)
    optimizers = [torch.optim.SGD(plain.module.parameters(), 0.1)]
    optimizers.append(sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1)))
    off = []
    for number in range(STEPS):
        ids = torch.randint(0, 64, (4, 16))
        beta, weight = 1.0 - number / STEPS, 1.0 + number
        for held in (plain.module, model):
            held.temperature = 1.0 + 0.1 * number
        for optimizer in optimizers:
            optimizer.zero_grad()
        wanted = float(sum(train_step(plain, part, weight) for part in ids.chunk(2)) / 2)
        found = float(step(model, ids, weight).reduce_mean())
        off.append(abs(found - wanted) / abs(wanted))
        for optimizer in optimizers:
            optimizer.step()
    recordings = model.runtime.split_model.bodies.recorded
    sw.shutdown()
    return recordings, max(off) if all(one == one for one in off) else float("inf")


def looking(layers: int, *, units: bool) -> tuple[int, float]:
    """How many values a recording of the model rests on, and the seconds that it takes to look at them. Without
    ``units`` everything that the model reads counts, as on the tensor axis."""
    model = gpt2(layers)
    calls = {(f"transformer.h.{layer}", 0): layer for layer in range(layers)} if units else {("", 0): 0}
    recorder = StepRecorder(model, calls, torch.device("cpu"), units_run_again=units)
    ids = torch.zeros(2, 16, dtype=torch.int64)
    values = recorder.record(lambda given: model(input_ids=given[0], labels=given[0]).loss, [ids]).python
    if not values.hold():
        raise SystemExit(f"values changed though nothing was done: {values.changed_in_words()}")
    times = []
    for _ in range(50):
        start = time.perf_counter()
        values.hold()
        times.append(time.perf_counter() - start)
    return sum(len(guarded.keys) for guarded in values.guarded), sorted(times)[len(times) // 2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    layers = parser.parse_args().layers
    recordings, off = annealed()
    print(f"{STEPS} steps with three values that change: {recordings} recordings, losses off by {off:.2g} at most")
    shares: dict[str, float] = {}
    for what, units in (("pipeline", True), ("tensor axis", False)):
        count, seconds = looking(layers, units=units)
        print(f"{what}: {count} values of {layers} layers are looked at in {seconds * 1e6:.0f} us")
        shares[what] = seconds / STEP_S if count else float("nan")
    found = claims.annealing(recordings, off, shares)
    print(found.verdict())
    return found.exit_code


if __name__ == "__main__":
    sys.exit(main())
