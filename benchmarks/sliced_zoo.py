"""Which causal language models of `transformers` can run slice after slice, and which op forbids it in the others.

    python benchmarks/sliced_zoo.py [--run] [CLASS...]

Every causal class is built tiny, captured, and its ops are sorted by what they need of the sequence
(`core.slices.sequence_ops`), masks by their values. Apart from that the model itself is asked: the second half of the
tokens is changed, and the outputs of the first half stay or not. A class that is said to run in slices has to be one
whose outputs stay.

With --run each of these classes takes a training step in slices of 6, 6 and 4 tokens, two microbatches, dropout on as
the class has it, and one under the same plan for whole sequences, in one process: loss and every gradient are compared.
A runtime may refuse what the sorting allows (numbers that follow from the length, ops that cannot run one by one).
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
from zoo import all_classes

import shardwright as sw
import shardwright.torch as runtime
from shardwright.core.errors import CaptureError, ShardwrightError
from shardwright.core.slices.sequence_ops import sequence_inputs, sequence_ops
from shardwright.core.slices.unit_parts import require_sliceable
from tests.comparison import Comparison
from tests.models import inputs

SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)
LEAST = 0.5
"""The share of the causal classes that runs in slices."""
LENGTHS = (6, 6, 4)
PINS: dict[str, Any] = {
    "batch": 4, "microbatch": 2, "pp": 1, "tp": 1, "dp": 1, "schedule": "1f1b", "recompute": "none", "shard": 0,
    "precision": "fp32",
}  # fmt: skip


def stays(model: Any, batch: dict[str, Any], key: str) -> bool:
    """Whether what the model says of the first half of the tokens stays when the second half changes."""
    ids = batch[key]
    half = ids.shape[1] // 2
    changed = ids.clone()
    changed[:, half:] = ids[:, half:].flip(1) if not torch.equal(ids[:, half:], ids[:, half:].flip(1)) else 3
    plain = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad():
        one, two = (model.eval()(**plain | {key: x}).logits[:, :half] for x in (ids, changed))
    return bool((one - two).abs().max() <= 1e-5 * one.abs().max())


class _Masks(TorchFunctionMode):
    """Notes whether each mask of an attention, and what it adds to scores that are written out, hides from every query
    the keys behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.hide = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | (kwargs or {})
        mask = given.get("attn_mask") if func is F.scaled_dot_product_attention else None
        if mask is not None and mask.shape[-1] == mask.shape[-2]:
            later = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
            shown = mask if mask.dtype == torch.bool else mask > -1e4
            self.hide &= not bool((shown & later).any())
        scores = args[0] if func in SOFTMAXES and args else None
        if scores is not None and scores.dim() > 2 and scores.shape[-1] == scores.shape[-2]:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            self.hide &= not bool(((scores > -1e9) & later).any())
        return func(*args, **(kwargs or {}))


def masks_hide(model: Any, batch: dict[str, Any]) -> bool:
    with torch.no_grad(), _Masks() as masks:
        model.eval()(**batch)
    return masks.hide


def row(name: str) -> dict[str, Any]:
    """One class: whether it runs in slices, the first obstacle, and whether its outputs stay."""
    model = inputs.build(name)
    batch = inputs.batch(model, 2, 0)
    graph = sw.capture(model, batch)
    tokens = next(iter(sequence_inputs(graph)))
    found = sequence_ops(graph)
    causal = stays(model, batch, graph.tensors[tokens].name)
    reason = found.obstacles[0].reason if found.obstacles else ""
    try:
        require_sliceable(graph, found)
    except CaptureError as error:
        reason = reason or str(error)
    if (found.masks or found.hides) and not reason and not masks_hide(model, batch):
        reason = "a mask that shows later tokens"
    return {"sliced": not reason, "reason": reason, "causal": causal, "carried": len(found.carried) + len(found.tails)}


def trained(name: str, plan: sw.Plan, batch: dict[str, Any]) -> tuple[float, dict[str, torch.Tensor | None]]:
    """The loss and the gradients of one step under a plan."""
    runtime.init(plan=plan)
    try:
        runtime.set_seed(5)
        model = runtime.DistributedModel(inputs.build(name))

        @runtime.step
        def step(model: Any, batch: dict[str, Any]) -> Any:
            loss = model(**batch).loss
            model.backward(loss, reduction="mean")
            return loss

        loss = float(step(model, batch).reduce_mean())
        return loss, {n: None if p.grad is None else p.grad.clone() for n, p in model.local_named_parameters()}
    finally:
        runtime.shutdown()


def run(name: str) -> str:
    """Whether a step in slices is that of whole sequences: '' where it is, else what differs, or why it is refused."""
    model = inputs.build(name)
    batch = inputs.batch(model, PINS["batch"], 0)
    two = {key: value[:2] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    graph, cluster = sw.capture(model, two), sw.Cluster("cpu", devices_per_node=1)
    same = Comparison(name)
    try:
        expected = trained(name, sw.plan(graph, cluster, **PINS), batch)
    except ShardwrightError as error:
        return f"refused without slices: {str(error).splitlines()[0][:200]}"
    try:
        loss, gradients = trained(name, sw.plan(graph, cluster, **PINS, slice_lengths=list(LENGTHS)), batch)
    except ShardwrightError as error:
        return f"refused: {str(error).splitlines()[0][:200]}"
    same.losses(loss, expected[0])
    same.gradients(gradients, expected[1])
    try:
        same.require("losses", "gradients")
    except AssertionError as error:
        return f"differs: {str(error).splitlines()[0][:200]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="default: all causal language models")
    parser.add_argument("--run", action="store_true", help="take a step of each class that is said to run")
    asked = parser.parse_args()
    if asked.run:
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = asked.classes or [name for name, task in all_classes().items() if task == "CAUSAL_LM"]
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            rows[name] = row(name)
            if asked.run and rows[name]["sliced"] and rows[name]["causal"]:
                rows[name]["ran"] = run(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        said = failed.get(name) or ("in slices" if rows[name]["sliced"] else rows[name]["reason"])
        if rows.get(name, {}).get("ran") is not None:
            said = f"{said}, {rows[name]['ran'] or 'the step is the same'}"
        print(f"{name}: {said}{'' if name in failed or rows[name]['causal'] else ' (not causal)'}", flush=True)
    print("\n| causal classes | number |\n|---|---|")
    print(f"| run in slices | {sum(one['sliced'] for one in rows.values())} |")
    whys = Counter(one["reason"].split(" in ")[0] for one in rows.values() if one["causal"] and not one["sliced"])
    for why, count in whys.most_common():
        print(f"| causal, forbidden by {why} | {count} |")
    ran = [one["ran"] for one in rows.values() if "ran" in one]
    if asked.run:
        print(f"| took a step in slices that is the same | {ran.count('')} of {len(ran)} |")
        print(f"| refused by the runtime | {sum(one.startswith('refused') for one in ran)} |")
    print(f"| not causal as they are built | {sum(not one['causal'] for one in rows.values())} |")
    print(f"| not asked: not built, captured or run | {len(failed)} |")
    judged = claims.sliced_zoo(rows, LEAST)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
