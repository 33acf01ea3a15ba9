"""What the processes of `zoo.py` do with a class: run it plainly, plan it, split it, give it to torch's tracer."""

import inspect
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers.utils import logging

import shardwright
from shardwright.backends.torch import TorchBackend
from shardwright.backends.torch.training.messages.module_flops import count_flops, module_tree
from shardwright.core.cluster.hardware import load_profile
from shardwright.core.cost.unit_work import WorkCounter
from shardwright.core.model.fold import fold
from shardwright.core.partition.module_tree import divide_modules
from shardwright.core.plan.plan import Plan
from tests.comparison import Comparison
from tests.models import inputs
from tests.models.equality import (
    MICROBATCHES,
    SAMPLES,
    Expected,
    microbatches_of,
    plain_step,
    split_step,
)
from tests.models.own import OWN

PLAIN = "reference-{}.pt"
SPLIT_POINTS = 4
"""So many units are tried, one after the other, where torch's tracer is to split."""
SLOWER = 1e5
"""Plans are for a CPU with so much less arithmetic: in toys of these sizes the cost of an op's start would decide."""


def reference(name: str, folder: Path, ranks: Sequence[int]) -> dict[str, Any]:
    """Run the plain model, leave what it gives and a plan for every number of ranks in ``folder``."""
    try:
        expected = plain_step(name)
    except Exception as error:
        return {"built": False, "reason": said(error)}
    keep(expected, folder / PLAIN.format("float32"))
    result: dict[str, Any] = {"built": True, "loss": expected.losses}
    try:
        result["shares"] = {str(pp): plan(name, pp, folder / f"plan{pp}.json") for pp in ranks}
    except Exception as error:
        result["no_plan"] = said(error)
        result["shares"] = by_modules(name, ranks)
    return result


def keep(expected: Expected, file: Path) -> None:
    torch.save({field.name: getattr(expected, field.name) for field in fields(expected)}, file)


def doubt(name: str, folder: Path) -> dict[str, Any]:
    """How far the plain model's gradients are, in units of what is allowed, from those of a second run and from those
    in float64; leave the latter in ``folder``."""
    first = Expected(**torch.load(folder / PLAIN.format("float32"), weights_only=True))
    again = distance(plain_step(name).gradients, first.gradients)
    try:
        exact = plain_step(name, torch.float64)
    except Exception:
        return {"again": again, "rounding": 0.0}
    keep(exact, folder / PLAIN.format("float64"))
    return {"again": again, "rounding": distance(first.gradients, exact.gradients)}


def distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """How far gradients are apart, in units of what is allowed."""
    return Comparison().gradients(one, other, none_is_zero=True, same_dtype=False).worst


def plan(name: str, pp: int, file: Path) -> dict[str, Any]:
    """Plan a model for so many ranks; each rank's share of the forward FLOPs, and the best that any cut of the units
    gives the rank that has the least."""
    model = inputs.build(name)
    given = inputs.batch(model, SAMPLES * MICROBATCHES, 0)
    graph = TorchBackend().capture(model, microbatches_of(given)[0], require_loss=False)
    device = load_profile("cpu").device
    slow = replace(device, peak_flops_per_s={"fp32": device.peak_flops_per_s["fp32"] / SLOWER}, measured_products=())
    cluster = shardwright.Cluster(slow, nodes=1, devices_per_node=pp)
    made = shardwright.plan(
        graph, cluster, batch=SAMPLES * MICROBATCHES, pp=pp, tp=1, dp=1, microbatch=SAMPLES, schedule="1f1b",
        recompute="none", shard=0, precision="fp32",
    )  # fmt: skip
    made.save(file)
    counter = WorkCounter(graph)
    flops = [counter.count(unit, SAMPLES).forward_flops for unit in fold(graph).units]
    total = sum(flops) or 1
    shares = [sum(flops[u] for u in units) / total for units in made.stage_units]
    largest = max(range(len(flops)), key=flops.__getitem__)
    names = [call.path for call in made.binding("torch").units[largest].calls if call.path]
    return {
        "ranks": shares, "best_least": best_least(flops, pp) / total, "units": len(flops),
        "largest": {"name": names[0] if names else "the model itself", "share": flops[largest] / total},
    }  # fmt: skip


def by_modules(name: str, ranks: Sequence[int]) -> dict[str, Any]:
    """The same of a model that no plan can be made for, which is divided by its module tree."""
    model = inputs.build(name)
    given = microbatches_of(inputs.batch(model, SAMPLES * MICROBATCHES, 0))[0]
    counted = count_flops(model, lambda: inputs.loss_of(model, given))
    found = {}
    for pp in ranks:
        divided = divide_modules(module_tree(model), pp, counted, name)
        flops = divided.flops
        total = sum(flops.values()) or 1
        largest = max(flops, key=flops.__getitem__)
        found[str(pp)] = {
            "ranks": [sum(f for path, f in flops.items() if divided.owners[path] == r) / total for r in range(pp)],
            "best_least": best_least(list(flops.values()), pp) / total, "units": len(flops),
            "largest": {"name": largest, "share": flops[largest] / total},
        }  # fmt: skip
    return found


def best_least(flops: Sequence[int], ranks: int) -> float:
    """The most that the rank with the least can have, over all cuts into runs of units."""
    sums = [0]
    for value in flops:
        sums.append(sums[-1] + value)
    best = [float(total) for total in sums]
    for _ in range(ranks - 1):
        best = [max((min(best[j], sums[i] - sums[j]) for j in range(i)), default=0.0) for i in range(len(sums))]
    return best[-1]


def split(name: str, folder: Path, pp: int, dtype: str) -> dict[str, Any]:
    """Run one step on this rank and compare what it holds with the reference."""
    expected = Expected(**torch.load(folder / PLAIN.format(dtype), weights_only=True))
    file = folder / f"plan{pp}.json"
    start = time.perf_counter()
    found = split_step(name, pp, expected, file if file.exists() else None, getattr(torch, dtype))
    return asdict(found) | {"time_s": time.perf_counter() - start}


def trace(name: str, folder: Path) -> dict[str, Any]:
    """Split a model in two by torch's tracer: forward only, cache off, no labels."""
    model = inputs.build(name).eval()
    given = microbatches_of(inputs.batch(model, SAMPLES * MICROBATCHES, 0))[0]
    labels = ("labels", "start_positions", "end_positions", "return_loss", "next_sentence_label", "target_values")
    kept = {key: value for key, value in given.items() if key not in labels} if name not in OWN else given
    takes_text = "decoder_input_ids" in inspect.signature(model.forward).parameters
    if takes_text and getattr(model.config, "is_encoder_decoder", False):
        kept.setdefault("decoder_input_ids", given.get("labels", given.get("input_ids")))
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "use_cache"):
            module.config.use_cache = False
    reason = ""
    for point in split_points(model, name, folder)[:SPLIT_POINTS]:
        try:
            with torch.no_grad():
                made = pipeline(model, (), kept, split_spec={point: SplitPoint.BEGINNING})
                whole, parts = model(**kept), made(**kept)
        except Exception as error:
            reason = reason or said(error)
            if "Split point" in str(error):
                continue
            break
        if made.num_stages != 2:
            reason = reason or f"{made.num_stages} stages, split at {point}"
            continue
        one, other = (
            [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)] for out in (whole, parts)
        )
        near = {"relative": 1e-5, "absolute": 1e-4}
        alike = bool(one) and any(not Comparison().values(o, one[0], **near).failures() for o in other)
        return {"traced": alike, "reason": "" if alike else "other results"}
    return {"traced": False, "reason": reason}


def split_points(model: torch.nn.Module, name: str, folder: Path) -> list[str]:
    """The units from our second stage on; without a plan, the second half of the longest list of modules."""
    file = folder / "plan2.json"
    try:
        plan(name, 2, file)
        return [call.path for call in Plan.load(file).stage_calls("torch")[1] if call.path]
    except Exception:
        lists = {path: module for path, module in model.named_modules() if isinstance(module, torch.nn.ModuleList)}
        if not lists:
            raise
        path, layers = max(lists.items(), key=lambda held: len(held[1]))
        return [f"{path}.{i}" for i in range(len(layers) // 2, len(layers))]


def said(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    first = " ".join(str(error).split())
    return f"{type(error).__name__}: {first[:400]} ({Path(place.filename).name}:{place.lineno})"


def serve(role: str, ranks: Sequence[int]) -> None:
    """Take names from standard input, one by one, and answer each with a line of JSON."""
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    if role == "split":
        dist.init_process_group("gloo")
    for line in sys.stdin:
        name, folder, *more = line.split()
        try:
            if role == "reference":
                result = doubt(name, Path(folder)) if more else reference(name, Path(folder), ranks)
            elif role == "tracer":
                result = trace(name, Path(folder))
            else:
                result = split(name, Path(folder), ranks[0], *(more or ["float32"]))
        except Exception as error:
            result = {"error": said(error)}
        answers.write(json.dumps(result) + "\n")
        answers.flush()
