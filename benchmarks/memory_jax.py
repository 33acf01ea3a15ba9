"""The JAX part of `memory.py`: what devices hold in a step, against what is known before and after compiling it.

Measured: one program by its `memory_analysis`; a pipeline by its live arrays from action to action, each buffer once,
with what the running program takes beside them. *Before*: the plan. *After*: `TrainStep.memory_bytes`. Aim: 15% before,
3% after. (The CPU client keeps no statistics of its own, so of one program measured and after are the same figure.)
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
MIB = 2**20
PLANS: dict[str, dict[str, Any]] = {
    "one device": {"pp": 1, "dp": 1, "tp": 1},
    "dp 2": {"pp": 1, "dp": 2, "tp": 1},
    "tp 2": {"pp": 1, "dp": 1, "tp": 2},
    "pp 2, 1f1b": {"pp": 2, "dp": 1, "tp": 1, "schedule": "1f1b"},
    "pp 2, gpipe": {"pp": 2, "dp": 1, "tp": 1, "schedule": "gpipe"},
}
MICROBATCHES = 4


def run(models: Sequence[str], write: Path | None) -> int:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
    import jax

    lines = [
        f"## JAX {jax.__version__} on virtual CPU devices",
        "",
        "    python benchmarks/memory.py --framework jax",
        "",
        f"MiB on the device where measured is largest; {MICROBATCHES} microbatches, AdamW, fp32.",
        "",
        "| model | plan | measured | before compiling | ratio, by device | after | ratio, by device |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for name in models:
        for kind, pins in PLANS.items():
            before, after, measured = step_bytes(name, pins)
            most = max(range(len(measured)), key=lambda rank: measured[rank])
            cells = []
            for said in (before, after):
                ratios = " ".join(f"{s / m:.3f}" for s, m in zip(said, measured, strict=True))
                cells.append(f"{said[most] / MIB:.1f} | {ratios}")
            lines.append(f"| {name} | {kind} | {measured[most] / MIB:.1f} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if write:
        with write.open("a") as file:
            file.write("\n" + "\n".join(lines) + "\n")
    return 0


def step_bytes(name: str, pins: dict[str, Any]) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """(before, after, measured) bytes of every device."""
    import jax
    import jax_models
    import numpy as np
    import optax

    import shardwright as sw
    import shardwright.jax as swj

    model, sample, loss = getattr(jax_models, name)()
    size, devices = len(next(iter(sample.values()))), pins["pp"] * pins["dp"] * pins["tp"]
    fixed = {"precision": "fp32", "recompute": "none", "shard": 0, "microbatch": size, "loss_scope": "replica"}
    count = MICROBATCHES * pins["dp"]
    cluster = sw.Cluster("cpu", devices_per_node=devices)
    plan = sw.plan(sw.capture(model, sample, loss), cluster, batch=count * size, **fixed, **pins)
    train = swj.train_step(loss, optax.adamw(1e-3), plan, devices=jax.devices()[:devices])
    state = train.init(model)
    batch = {key: np.concatenate([np.asarray(value)] * count) for key, value in sample.items()}
    del model, sample
    after = train.memory_bytes(state, batch)
    return plan.predicted.peak_memory_bytes, after, measured_bytes(train, state, batch, plan)


def measured_bytes(train: Any, state: Any, batch: Any, plan: Any) -> Sequence[int]:
    """Bytes of every device in a step, which a pipeline takes for it: the state is given away."""
    import jax
    from found_plans import Live

    if plan.decision.pp == 1:
        return list(train.memory_bytes(state, batch))
    live = Live(train.pipeline.launches, jax.devices()[: plan.mesh.size])
    step, leaves = train._step_for(state, batch)
    step(state, leaves, live)
    return live.peak
