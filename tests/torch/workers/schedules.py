"""One model under every schedule, in one launch: each gradient against those of the plain, unsplit model.

Usage: schedules.py OUT.json. Every name in the registry, each with the sizes that it admits, and `auto`.
"""

import sys
from importlib import import_module

import torch
import torch.distributed as dist
from launched import leave
from models import every_kind_of_weight

import shardwright.torch as sw
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.core.errors import ShardwrightError
from shardwright.core.model.graph import Graph
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import AUTO, schedule_names
from tests.comparison import Comparison

MICROBATCHES = 8


@sw.step
def train_step(model, ids):
    loss = model(ids)
    model.backward(loss)
    return loss


@sw.step
def evaluate(model, ids):
    return model(ids)


def ids() -> torch.Tensor:
    return torch.randint(0, 32, (MICROBATCHES, 10), generator=torch.Generator().manual_seed(4))


def reference() -> tuple[float, dict[str, torch.Tensor | None]]:
    model = every_kind_of_weight()
    total = 0.0
    for part in ids().chunk(MICROBATCHES):
        loss = model(part)
        (loss / MICROBATCHES).backward()
        total += loss.item() / MICROBATCHES
    return total, {name: p.grad for name, p in model.named_parameters()}


def sizes(name: str, ranks: int) -> int | None:
    """How many virtual stages this schedule admits."""
    for virtual in (1, 2):
        try:
            sw.Schedule.build(name, ranks=ranks, microbatches=MICROBATCHES, virtual_stages=virtual)
        except ShardwrightError:
            continue
        return virtual
    return None


PLANS: dict[int, Plan] = {}
"""By virtual stages: the model is captured and cut once for each."""
GRAPHS: list[Graph] = []
capturing = import_module("shardwright.backends.torch.training.first_plan")
planning = import_module("shardwright.torch.step_mode")
plan_anew, capture_anew = planning.plan_at_first_step, capturing.captured


def capture_once(*args) -> Graph:
    if not GRAPHS:
        GRAPHS.append(capture_anew(*args))
    return GRAPHS[0]


def plan_once(config, *args) -> StageMap:
    virtual = config.virtual_stages
    if virtual not in PLANS:
        stage_map = plan_anew(config, *args)
        PLANS[virtual] = stage_map.plan
        return stage_map
    plan = PLANS[virtual]
    return StageMap.of_plan(plan, config.schedule(plan.stage_costs()))


def run(name: str, virtual: int, loss: float, expected: dict[str, torch.Tensor | None]) -> dict[str, object]:
    world = dist.get_world_size()
    sw.init(
        {
            "pipeline_parallel_degree": world, "microbatches": MICROBATCHES, "pipeline": name,
            "virtual_stages": virtual, "wait_timeout_s": 60.0,
        }
    )  # fmt: skip
    model = sw.DistributedModel(every_kind_of_weight())
    forward_only = name == "forward-only"
    if forward_only:
        with torch.no_grad():
            found = float(evaluate(model, ids()).all_reduce_mean())
    else:
        found = float(train_step(model, ids()).all_reduce_mean())
    same = Comparison(name).losses(found, loss)
    held = {key: parameter.grad for key, parameter in model.local_named_parameters()}
    if forward_only:
        assert all(gradient is None for gradient in held.values())
    else:
        same.gradients(held, expected, part=True)
    stage_map = model.runtime.stage_map
    kinds = sorted({part.kind.value for order in stage_map.schedule.table for a in order for part in a.flat})
    every: list[object] = [None] * world
    dist.all_gather_object(every, same.report())
    sw.shutdown()
    return {"same": every, "kinds": kinds}


def main() -> None:
    dist.init_process_group("gloo")
    planning.plan_at_first_step, capturing.captured = plan_once, capture_once
    loss, expected = reference()
    results = {}
    for name in (*schedule_names(), AUTO):
        virtual = sizes(name, dist.get_world_size())
        results[name] = None if virtual is None else run(name, virtual, loss, expected)
    results["auto, two stages a rank"] = run(AUTO, 2, loss, expected)
    leave(results, sys.argv[1])


if __name__ == "__main__":
    main()
