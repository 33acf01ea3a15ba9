"""Runs whose units recompute by op, or keep their activations on the host, against the same runs that keep everything.

Usage: memory_policies.py [--all] [CHECK...], on two ranks.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launched import ALL, chosen, run_checks
from tp_models import batch, build

import shardwright as core
import shardwright.torch as sw
from benchmarks.tracked import held_by, tracking
from shardwright.backends.torch.machine import host_store
from shardwright.backends.torch.memory import offload
from tests.comparison import Comparison

STEPS, MICROBATCHES = 3, 2
OFTEN: list[tuple[str, dict[str, Any]]] = [("gpt2", {"dp": 2}), ("t5", {"pp": 2})]
SPLITS = [(name, {axis: 2}) for name in ("gpt2", "llama", "images", "t5") for axis in ("dp", "pp")] if ALL else OFTEN
"""Models, and how they are split."""
EVERYWHERE: dict[str, Any] = {"pp": 1, "dp": 1, "tp": 1, "shard": 0, "schedule": "1f1b"}


@sw.step
def train_step(model: Any, given: dict[str, torch.Tensor]) -> Any:
    loss = model(**given).loss
    model.backward(loss, reduction="mean")
    return loss


GRAPHS: dict[Any, core.Graph] = {}
"""What was captured, by what the models are."""


def planned(which: Any, model: torch.nn.Module, sample: dict[str, torch.Tensor], **pins: Any) -> core.Plan:
    """A plan for two ranks, of microbatches as large as the sample. Models that are alike, by ``which``, are captured
    once."""
    if which not in GRAPHS:
        GRAPHS[which] = core.capture(model, sample)
    asked = EVERYWHERE | {"precision": "fp32", "recompute": "none"} | pins
    size = len(next(iter(sample.values())))
    cluster = core.Cluster("cpu", devices_per_node=2)
    return core.plan(GRAPHS[which], cluster, batch=size * MICROBATCHES * asked["dp"], microbatch=size, **asked)


def trained(name: str, dropout: float, watched: bool = False, **pins: Any) -> dict[str, Any]:
    """Losses, gradients and buffers after some steps, and the most bytes that this rank held in another."""
    torch.manual_seed(0)
    model = build(name, dropout)
    whole = {key: torch.cat([value] * 4) for key, value in batch(name, 0).items()}
    sample = {key: value[:4] for key, value in whole.items()}
    plan = planned((name, dropout), model, sample, **pins)
    with tempfile.TemporaryDirectory() as folder:
        plan.save(Path(folder) / "plan.json")
        sw.init(plan=str(Path(folder) / "plan.json"), wait_timeout_s=60.0)
        sw.set_seed(5)
        split = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(split.parameters(), lr=0.1))
    own = plan.decision.batch // plan.decision.dp
    losses = []
    for step in range(STEPS):
        given = {key: value[:own].roll(step, 0) for key, value in whole.items()}
        optimizer.zero_grad()
        losses.append(float(train_step(split, given).all_reduce_mean()))
        gradients = {key: p.grad for key, p in split.local_named_parameters()}
        gradients = {key: None if g is None else g.clone() for key, g in gradients.items()}
        optimizer.step()
    peak = 0
    if watched:
        optimizer.zero_grad()
        with tracking(held_by(split.runtime), optimizer.optimizer, given.values()) as tracker:
            train_step(split, given)
        peak = tracker.peak_bytes()
    found = {
        "losses": losses,
        "gradients": gradients,
        "buffers": {key: value.clone() for key, value in split.local_named_buffers()},
        "peak": peak,
        "predicted": plan.predicted.peak_memory_bytes[dist.get_rank()],
        "plan": plan,
    }
    sw.shutdown()
    return found


def require_same(title: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    same = Comparison(title).equal(found["losses"], wanted["losses"], what="losses")
    same.equal(found["gradients"], wanted["gradients"], what="gradients")
    if wanted["buffers"]:
        same.equal(found["buffers"], wanted["buffers"], what="buffers")
    same.require()


def blocks_of(plan: core.Plan) -> list[int]:
    """The units of the class that has most."""
    classes = plan.model.unit_classes
    most = max(set(classes), key=classes.count)
    return [unit for unit, kind in enumerate(classes) if kind == most]


def offloaded_units_train_as_kept_ones() -> None:
    for name, split in SPLITS:
        kept = trained(name, 0.1, **split)
        blocks = blocks_of(kept["plan"])
        pins = split | {"stage_starts": kept["plan"].decision.stage_starts, "recompute": "full"}
        for away in (blocks, blocks[::2]):
            found = trained(name, 0.1, **pins, offloaded_units=away)
            assert found["plan"].decision.offloaded_units == tuple(away)
            require_same(f"{name}, {pins}, offloaded {away}", found, kept)


MODULES = {
    "gpt2": "products:attn.c_attn,mlp.c_fc", "llama": "products:mlp.up_proj,self_attn", "images": "products:0",
    "t5": "products:layer.0.SelfAttention,layer.1.DenseReluDense.wi",
}  # fmt: skip
"""Modules whose products are kept."""


def products_that_are_kept_are_not_computed_again() -> None:
    for name, split in SPLITS:
        kept = trained(name, 0.1, **split)
        pins = split | {"stage_starts": kept["plan"].decision.stage_starts}
        for recompute in ("elementwise", "alternate", MODULES[name]):
            found = trained(name, 0.1, **pins, recompute=recompute)
            require_same(f"{name}, {pins}, {recompute}", found, kept)
        again = [unit for unit, mode in enumerate(found["plan"].unit_modes) if mode != "none"]
        mixed = {"recompute": MODULES[name], "other_recompute": "elementwise", "other_units": again[1::2]}
        found = trained(name, 0.1, **pins, **mixed, kept_units=again[2::4] or None)
        assert {MODULES[name], "elementwise"} <= set(found["plan"].unit_modes)
        require_same(f"{name}, {pins}, {mixed}", found, kept)


def policies_go_with_shards_and_tensor_axes() -> None:
    for pins in ({"dp": 2, "shard": 3}, {"dp": 2, "shard": 2}, {"tp": 2}):
        kept = trained("gpt2", 0.1, **pins)
        blocks = blocks_of(kept["plan"])
        policies: list[dict[str, Any]] = [
            {"recompute": "full", "offloaded_units": blocks[:1], "kept_units": blocks[-1:]},
            {"recompute": MODULES["gpt2"]},
            {"recompute": "full", "offloaded_units": blocks},
            {"recompute": "elementwise"},
            {"recompute": "alternate"},
        ]
        for policy in policies if ALL else policies[:2]:
            require_same(f"{pins}, {policy}", trained("gpt2", 0.1, **pins, **policy), kept)


def policies_go_with_split_backwards() -> None:
    """The forward runs again for the input gradients, whose weight gradients come later. Batch statistics move on
    once."""
    halves: list[dict[str, Any]] = [{"schedule": "zb-h1"}, {"schedule": "zbv", "virtual_stages": 2}]
    often = [("gpt2", halves[1]), ("images", halves[0])]
    for name, schedule in [(n, h) for n in ("gpt2", "images", "t5") for h in halves] if ALL else often:
        pins: dict[str, Any] = {"pp": 2, **schedule}
        kept = trained(name, 0.1, **pins)
        blocks = blocks_of(kept["plan"])
        pins |= {"stage_starts": kept["plan"].decision.stage_starts}
        policies: list[dict[str, Any]] = [
            {"recompute": "full", "offloaded_units": blocks[:1], "kept_units": blocks[1:2]},
            {"recompute": "elementwise"},
            {"recompute": MODULES[name]},
            {"recompute": "full"},
            {"recompute": "full", "offloaded_units": blocks},
            {"recompute": "alternate"},
        ]
        for policy in policies if ALL else policies[:3]:
            found = trained(name, 0.1, **pins, **policy)
            assert any(found["plan"].unit_modes[unit] != "none" for unit in blocks)
            require_same(f"{name}, {pins}, {policy}", found, kept)


def memory_is_as_predicted() -> None:
    for name in ("gpt2", "llama") if ALL else ("gpt2",):
        kept = trained(name, 0.0, True, dp=2)
        blocks = blocks_of(kept["plan"])
        peaks = {"kept": kept["peak"]}
        for label, policy in {
            "offloaded": {"recompute": "full", "offloaded_units": blocks},
            "products": {"recompute": "elementwise"},
            "alternate": {"recompute": "alternate"},
            "named": {"recompute": MODULES[name]},
            "mixed": {"recompute": "full", "other_recompute": "elementwise", "other_units": blocks[1:]},
            "some kept": {"recompute": MODULES[name], "kept_units": blocks[1:]},
            "full": {"recompute": "full"},
        }.items():
            found = trained(name, 0.0, True, dp=2, **policy)
            peaks[label] = found["peak"]
            print(
                f"{name}, {label}: {found['peak']} held, {found['predicted'] / found['peak']:.3f} predicted", flush=True
            )
        assert peaks["full"] < peaks["alternate"] < peaks["products"] < peaks["kept"], peaks
        assert peaks["full"] < peaks["named"] < peaks["products"], peaks
        assert peaks["full"] < peaks["mixed"] < peaks["products"], peaks
        assert peaks["named"] < peaks["some kept"] < peaks["kept"], peaks
        assert peaks["offloaded"] < peaks["full"] * 1.1, peaks


def the_host_gets_its_memory_back() -> None:
    stores: list[host_store.MappedFile] = []
    make = offload.store_of

    def noted(device: torch.device) -> Any:
        stores.append(make(device))
        return stores[-1]

    offload.store_of = noted
    try:
        kept = trained("gpt2", 0.0, dp=2)
        blocks = blocks_of(kept["plan"])
        trained("gpt2", 0.0, dp=2, recompute="full", offloaded_units=blocks)
    finally:
        offload.store_of = make
    (store,) = stores
    free = sum(len(block) for blocks in store._free.values() for block in blocks)
    assert free == store._size > 0, (free, store._size)


CHECKS: tuple[Callable[[], None], ...] = (
    offloaded_units_train_as_kept_ones,
    products_that_are_kept_are_not_computed_again,
    policies_go_with_shards_and_tensor_axes,
    policies_go_with_split_backwards,
    memory_is_as_predicted,
    the_host_gets_its_memory_back,
)

if __name__ == "__main__":
    run_checks(chosen(CHECKS))
