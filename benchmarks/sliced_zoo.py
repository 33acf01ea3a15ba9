"""Which causal language models of `transformers` can run slice after slice, and which op forbids it in the others.

    python benchmarks/sliced_zoo.py [CLASS...]

Every causal class is built tiny, captured, and its ops are sorted by what they need of the sequence
(`core.slices.sequence_ops`), masks by their values. Apart from that the model itself is asked: the second half of the
tokens is changed, and the outputs of the first half stay or not. A class that is said to run in slices has to be one
whose outputs stay.
"""

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
from zoo import all_classes

import shardwright as sw
from shardwright.core.slices.sequence_ops import sequence_inputs, sequence_ops
from tests.models import inputs

SOFTMAXES = (F.softmax, torch.softmax, torch.Tensor.softmax)
LEAST = 0.5
"""The share of the causal classes that runs in slices."""


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
    if (found.masks or found.hides) and not reason and not masks_hide(model, batch):
        reason = "a mask that shows later tokens"
    return {"sliced": not reason, "reason": reason, "causal": causal, "carried": len(found.carried)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", help="default: all causal language models")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    names = asked.classes or [name for name, task in all_classes().items() if task == "CAUSAL_LM"]
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            rows[name] = row(name)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        said = failed.get(name) or ("in slices" if rows[name]["sliced"] else rows[name]["reason"])
        print(f"{name}: {said}{'' if name in failed or rows[name]['causal'] else ' (not causal)'}", flush=True)
    print("\n| causal classes | number |\n|---|---|")
    print(f"| run in slices | {sum(one['sliced'] for one in rows.values())} |")
    whys = Counter(one["reason"].split(" in ")[0] for one in rows.values() if one["causal"] and not one["sliced"])
    for why, count in whys.most_common():
        print(f"| causal, forbidden by {why} | {count} |")
    print(f"| not causal as they are built | {sum(not one['causal'] for one in rows.values())} |")
    print(f"| not asked: not built, captured or run | {len(failed)} |")
    judged = claims.sliced_zoo(rows, LEAST)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
