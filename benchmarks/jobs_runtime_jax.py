"""Six models on two CPU devices in JAX, shard by shard: the measured makespan beside the simulated one.

    python benchmarks/jobs_runtime_jax.py

Three learning rates by two batch sizes of one GPT-2, each at least three times as large as what a device may hold, one
thread a device, in one process. Each batch size is first trained alone, whose median seconds of every pass are the
profile; the simulator runs the passes of all six under the plan's policy. Limits: the measured makespan is within 10%
of the simulated one, and of that which is simulated from the seconds of this run's own passes, so that on a machine
with other work the runtime can be told from the machine; no device ever holds more than the budget.
"""

import os
import sys
from dataclasses import replace
from typing import Any

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import claims

RATES, BATCHES, STEPS, MICROBATCH, LENGTH = (1e-3, 3e-4, 1e-4), (8, 16), 3, 4, 128
DEVICES = 2


def planned() -> tuple[Any, dict[str, Any]]:
    """The plan of the jobs, and what each trains."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import shardwright as sw
    import shardwright.jax as swj
    from examples import gpt2_flax

    config = gpt2_flax.Config(n_layer=8, n_head=4, n_embd=256, vocab_size=512, n_positions=LENGTH)

    def create() -> Any:
        return gpt2_flax.create(config, seed=3)

    sample = {"input_ids": jax.ShapeDtypeStruct((max(BATCHES), LENGTH), jnp.int32)}
    graph = sw.capture(nnx.eval_shape(create), sample, gpt2_flax.next_token_loss)
    drawn = np.random.default_rng(0)
    jobs, given = [], {}
    for batch in BATCHES:
        for rate in RATES:
            name = f"{rate:g} at {batch}"
            jobs.append(
                sw.Job(name=name, model=graph, steps=STEPS, batch=batch, microbatch=MICROBATCH, precision="fp32")
            )
            given[name] = swj.JobTraining(
                graph=graph, model=create(), loss=gpt2_flax.next_token_loss, optimizer=optax.adamw(rate),
                data=[{"input_ids": drawn.integers(0, 512, (batch, LENGTH), np.int32)} for _ in range(STEPS)],
                reduction="mean",
            )  # fmt: skip
    cluster = sw.Cluster("cpu", devices_per_node=DEVICES)
    least = min(sw.plan_jobs([job], cluster).device_bytes for job in jobs)
    return sw.plan_jobs(jobs, cluster, budget_bytes=least // 3), given


def profile(plan: Any, given: dict[str, Any]) -> dict[int, list[float]]:
    """The median seconds of each pass of a step, by the batch size."""
    import numpy as np

    import shardwright.jax as swj

    found = {}
    for own in {job.batch: job for job in plan.jobs}.values():
        result = swj.run_jobs(replace(plan, jobs=(own,)), {own.name: given[own.name]})
        seconds: list[list[float]] = [[] for _ in own.passes]
        for device in range(DEVICES):
            for span in result.timeline.spans(device):
                seconds[span.action.number % len(own.passes)].append(span.end_s - span.start_s)
        found[own.batch] = [float(np.median(each)) for each in seconds]
    return found


def seconds_of(result: Any, plan: Any) -> list[list[float]]:
    """The measured seconds of all passes of each job."""
    found = [[0.0] * (len(job.passes) * job.steps) for job in plan.jobs]
    for device in range(DEVICES):
        for span in result.timeline.spans(device):
            found[span.action.job][span.action.number] = span.end_s - span.start_s
    return found


def main() -> int:
    """Print the table, and judge it."""
    import shardwright as sw
    import shardwright.jax as swj

    plan, given = planned()
    seconds = profile(plan, given)
    units = [seconds[job.batch] * job.steps for job in plan.jobs]
    simulated = sw.simulate_jobs(units, DEVICES, plan.policy)
    result = swj.run_jobs(plan, given)
    failed = [f"{name}: {job.failure}" for name, job in result.jobs.items() if job.failure]
    measured = result.timeline.makespan_s
    own = sw.simulate_jobs(seconds_of(result, plan), DEVICES, plan.policy).makespan_s
    work = [sum(span.end_s - span.start_s for span in result.timeline.spans(d)) for d in range(DEVICES)]
    print(f"{plan.summary()}\n")
    print("| | seconds |\n|---|---|")
    print(f"| all passes one after another, from the profile | {sum(map(sum, units)):.3f} |")
    print(f"| simulated makespan on {DEVICES} devices | {simulated.makespan_s:.3f} |")
    print(f"| simulated from the measured passes themselves | {own:.3f} |")
    print(f"| measured makespan | {measured:.3f} |")
    print(f"| measured passes, of each device | {', '.join(f'{each:.3f}' for each in work)} |\n")
    peak = max(result.peak_bytes)
    print(
        f"Most held by a device: {peak:,} bytes of a budget of {plan.budget_bytes:,}; predicted {plan.device_bytes:,} "
        f"({plan.device_bytes / peak - 1:+.1%}).\n"
    )
    print(*failed, sep="\n")
    judged = claims.jobs_runtime_jax(
        {
            "jobs": len(result.jobs) - len(failed),
            "makespan": measured / simulated.makespan_s,
            "own passes": measured / own,
            "budget": peak / plan.budget_bytes,
        }
    )
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
