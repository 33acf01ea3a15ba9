"""The JAX part of `out_of_core.py`: the networks of `out_of_core_jax_models.py` at a third of the memory of their step.

The budget is what XLA says of the compiled step with everything kept (`TrainStep.memory_bytes`, of `memory_analysis`),
divided by ``times``. On CPUs nothing can be offloaded, so that three plans of a model are compared: all kept; every
unit recomputed that may be; and the one that is planned for the budget. Where there is none, the smallest budget for
which there is a plan is looked for, and that plan is run.

Gradients (the momentum after the first step), updated weights, running statistics and loss are compared with those of a
plain `jax.value_and_grad`; with dropout, whose masks follow the plan's own rule, with those of the plan that keeps all.
"""

import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from out_of_core_jax_models import built
from out_of_core_table import KEPT, MEMORY_BYTES, MIB, PINS, PLANNED, RECOMPUTED, show

import shardwright as sw
import shardwright.jax as swj
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.errors import PlanError

HEADER = ["model", "plan", "units", "peak, MiB", "budget, MiB", "budget / all kept",
          "predicted / peak", "within", "time of all kept", "as predicted", "differs by"]  # fmt: skip
RATE, MOMENTUM, FINE = 1e-3, 0.9, 0.01
"""Of the optimizer; and how fine a smallest budget is looked for, as a share of it."""
PLANNED_MODELS = frozenset({"ResNet-50", "WRN-28", "Transformer"})
"""The models that have a plan at a third, of those that were measured: ResNet-200 was not."""


@dataclass
class Result:
    """What one step leaves: leaves in the model's order."""

    loss: jax.Array
    gradients: Sequence[jax.Array]
    others: Sequence[jax.Array]
    """Updated weights and running statistics."""

    def differs(self, reference: "Result") -> float:
        """The largest relative difference of any array. A gradient counts as at least a hundredth of the norm of all,
        as in the definition of equal results."""
        floor = 0.01 * float(jnp.sqrt(sum((g**2).sum() for g in reference.gradients)))
        pairs = [(a, b, floor) for a, b in zip(reference.gradients, self.gradients, strict=True)]
        pairs += [(a, b, 1e-9) for a, b in zip(reference.others, self.others, strict=True)]
        pairs.append((reference.loss, self.loss, 0.0))
        found = [float(jnp.linalg.norm(jnp.ravel(a - b))) / (float(jnp.linalg.norm(jnp.ravel(a))) + f)
                 for a, b, f in pairs]  # fmt: skip
        return float("nan") if any(x != x for x in found) else max(found)


class Run:
    """One plan in training: its peak, what its first step leaves, and the times of others."""

    def __init__(self, name: str, plan: sw.Plan) -> None:
        model, self.batch, loss = built(name)
        self.plan = plan
        self.train = swj.train_step(loss, optax.sgd(RATE, momentum=MOMENTUM), plan, log_every=0)
        self.state = self.train.init(model)
        self.peak = self.train.memory_bytes(self.state, self.batch)[0]
        self.state, made = self.train(self.state, self.batch)
        moments = [leaf for leaf in jax.tree.leaves(self.state.optimizer) if leaf.ndim]
        statistics_of = _numbers(self.state.other)
        self.result = Result(made, *_copied((moments, [*jax.tree.leaves(self.state.params), *statistics_of])))
        self.step_s()  # the first step that is timed is not the first after compiling

    def step_s(self) -> float:
        begun = time.perf_counter()
        self.state, made = self.train(self.state, self.batch)
        jax.block_until_ready((self.state.params, made))
        return time.perf_counter() - begun


def _numbers(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]


def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def plain(name: str) -> Result:
    """What a step without a plan leaves."""
    model, batch, loss = built(name)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    optimizer = optax.sgd(RATE, momentum=MOMENTUM)

    def of(params: Any) -> tuple[jax.Array, Any]:
        # Mapped, so that its variables are of this trace: the model writes its statistics.
        merged = nnx.merge(graphdef, params, jax.tree.map(lambda leaf: leaf, rest))
        found = loss(merged, batch)
        return found, nnx.split(merged, nnx.Param, ...)[2]

    @jax.jit
    def step(params: Any) -> Any:
        (found, rest), gradients = jax.value_and_grad(of, has_aux=True)(params)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return found, gradients, optax.apply_updates(params, updates), rest

    found, gradients, updated, rest = step(params)
    return Result(found, jax.tree.leaves(gradients), [*jax.tree.leaves(updated), *_numbers(rest)])


def planner(name: str) -> Callable[..., sw.Plan | str]:
    """The function of (budget in bytes or None, recompute) for a plan of one model, or why there is none."""
    model, batch, loss = built(name)
    graph, count = sw.capture(model, batch, loss), len(next(iter(batch.values())))
    cpu = load_profile("cpu").device

    def planned(budget: int | None, recompute: str) -> sw.Plan | str:
        reserved = 0 if budget is None else MEMORY_BYTES - budget
        device = replace(cpu, memory_bytes=MEMORY_BYTES, reserved_memory_bytes=reserved)
        try:
            return sw.plan(
                graph, sw.Cluster(device), batch=count, microbatch=count, optimizer="momentum", recompute=recompute,
                **PINS,
            )  # fmt: skip
        except PlanError as error:
            return str(error)

    return planned


def smallest(planned: Callable[..., sw.Plan | str], without: int, most: int) -> tuple[sw.Plan, int] | None:
    """The plan for the smallest budget above ``without`` that has one, with it; None where ``most`` has none."""
    found = planned(most, "auto")
    if isinstance(found, str):
        return None
    while most - without > FINE * most:
        middle = (without + most) // 2
        plan = planned(middle, "auto")
        if isinstance(plan, str):
            without = middle
        else:
            found, most = plan, middle
    return found, most


def measured(name: str, times: float, rounds: int) -> tuple[list[list[str]], tuple[float, float, float]]:
    """The rows of one model; of its plan for the budget the budget over all kept, the peak over the budget, and the
    largest difference."""
    planned = planner(name)
    whole, full = planned(None, "none"), planned(None, "full")
    assert isinstance(whole, sw.Plan), whole
    assert isinstance(full, sw.Plan), full
    runs = {KEPT: Run(name, whole), RECOMPUTED: Run(name, full)}
    kept = runs[KEPT].peak
    budget = int(kept / times)
    chosen: Any = planned(budget, "auto")
    if isinstance(chosen, str):
        print(f"{name}: {chosen}", file=sys.stderr, flush=True)
        found = smallest(planned, budget, max(kept, whole.predicted.peak_memory_bytes[0]))
        assert found is not None, chosen
        chosen, budget = found
    like = [run for run in runs.values() if run.plan.unit_modes == chosen.unit_modes]
    runs[PLANNED] = like[0] if like else Run(name, chosen)  # the same program is compiled once
    has_dropout = name == "Transformer"
    reference = runs[KEPT].result if has_dropout else plain(name)
    seconds: dict[str, list[float]] = {label: [] for label in runs}
    for _ in range(rounds):
        for label, run in runs.items():
            seconds[label].append(run.step_s())
    first, rows = statistics.median(seconds[KEPT]), []
    for label, run in runs.items():
        differs, share = run.result.differs(reference), budget / kept
        modes = ", ".join(f"{count} {mode}" for mode, count in sorted(Counter(run.plan.unit_modes).items()))
        rows.append(
            [name, label, modes, f"{run.peak / MIB:.1f}",
             f"{budget / MIB:.1f}", f"{share:.3f}", f"{run.plan.predicted.peak_memory_bytes[0] / run.peak:.3f}",
             "yes" if run.peak <= budget else "no", f"{statistics.median(seconds[label]) / first:.2f}",
             f"{run.plan.predicted.step_time_s / whole.predicted.step_time_s:.2f}", f"{differs:.1e}"]
        )  # fmt: skip
    print("\n".join(" | ".join(row) for row in rows), file=sys.stderr, flush=True)
    return rows, (share, runs[PLANNED].peak / budget, differs)


def run(models: Sequence[str], times: float, rounds: int, write: Path | None) -> int:
    """The exit code of the benchmark."""
    rows, found = [], {}
    for name in models:
        of_model, found[name] = measured(name, times, rounds)
        rows += of_model
        jax.clear_caches()
    show(HEADER, rows, write)
    planned = {name: row[1:] for name, row in found.items() if row[0] <= 1 / times}
    others = [(name, differs) for name, (_, _, differs) in found.items() if name not in planned]
    judged = claims.out_of_core(planned, len(PLANNED_MODELS.intersection(models)), *others)
    print(judged.verdict())
    return judged.exit_code
