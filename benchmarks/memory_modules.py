"""Memory of every layer that `torch.nn` ships: a step's peak against what a plan predicts.

    python benchmarks/memory_modules.py [--modules LSTM GRU] [--write benchmarks/results/memory_modules.md]

Every class of `torch.nn` that is a module is tried, or listed with the reason why it is no layer of its own: a class
that neither `memory_cases` nor `NO_LAYERS` names ends the run with an error. Each layer stands between values that need
gradients and a loss, in fp32 on one rank of the CPU, AdamW, gradients of an earlier microbatch in place. Measured with
torch's own MemTracker. Aim: 0.9999 × measured ≤ predicted ≤ 1.03 × measured.
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
import tracked
from memory_cases import CASES, NO_LAYERS, Case, Layered, layer_classes
from torch import nn

import shardwright as sw

MIB = 2**20
MICROBATCHES = 2
LEAST, MOST = 0.9999, 1.03
"""The aim: predicted / measured. Below 1 by scalars alone, of which some are not counted."""


def measured_bytes(model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Bytes at the peak of a step, with the batch of all microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def step() -> None:
        model(**batch).backward()
        optimizer.step()

    step()  # makes the optimizer's states and the gradients
    others = [torch.cat([value] * (MICROBATCHES - 1)) for value in batch.values()]
    held = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)]
    with tracked.tracking(held, optimizer, [*batch.values(), *others]) as tracker:
        step()
    return tracker.peak_bytes()


def planned(model: nn.Module, batch: dict[str, torch.Tensor]) -> sw.Plan:
    size = len(next(iter(batch.values())))
    return sw.plan(
        sw.capture(model, batch),
        sw.Cluster("cpu"),
        batch=MICROBATCHES * size,
        microbatch=size,
        precision="fp32",
        recompute="none",
        shard=0,
    )


def compared(case: Case) -> tuple[int, int]:
    """(measured, predicted) bytes of a case."""
    torch.manual_seed(0)
    model = Layered(case).train()
    batch = case.batch()
    return measured_bytes(model, batch), planned(model, batch).predicted.peak_memory_bytes[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", help="names of torch.nn's classes")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    named = {case.name for case in CASES} | NO_LAYERS.keys()
    if missing := layer_classes() - named:
        raise SystemExit(f"torch.nn's {', '.join(sorted(missing))}: neither a case nor among NO_LAYERS")
    warnings.simplefilter("ignore")
    rows, failed = [], []
    for case in CASES:
        if options.modules and case.name not in options.modules:
            continue
        try:
            measured, predicted = compared(case)
        except Exception as error:
            failed.append(f"{case.title}: {type(error).__name__}: {str(error).splitlines()[0]}")
            continue
        rows.append((predicted / measured, case.title, measured, predicted))
    rows.sort(key=lambda row: min(row[0], 2 - row[0] / MOST))
    text = "\n".join(_page(rows, failed)) + "\n"
    print(text)
    if options.write:
        options.write.write_text(text)
    return 1 if failed or any(not LEAST <= row[0] <= MOST for row in rows) else 0


def _page(rows: list[tuple[float, str, int, int]], failed: list[str]) -> list[str]:
    within = sum(LEAST <= row[0] <= MOST for row in rows)
    return [
        "# Memory of every layer of torch.nn",
        "",
        "    python benchmarks/memory_modules.py",
        "",
        f"torch {torch.__version__} on the CPU, fp32, one rank. Peak of a step, MiB. Worst first. "
        f"{within} of {len(rows)} within {LEAST} to {MOST}.",
        "",
        "| layer | measured | predicted | ratio |",
        "|---|---|---|---|",
        *(f"| {title} | {m / MIB:.2f} | {p / MIB:.2f} | {ratio:.4f} |" for ratio, title, m, p in rows),
        *([""] + [f"Failed: {line}." for line in failed] if failed else []),
        "",
        "Not tried:",
        "",
        *(f"- `{name}`: {reason}" for name, reason in NO_LAYERS.items()),
    ]


if __name__ == "__main__":
    sys.exit(main())
