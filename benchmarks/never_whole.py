"""The memory of one rank of several that share a model's parameters, from the first line on until its pieces are cut.

A Llama configuration is built under `delay_param_initialization()` for real; the other ranks are simulated by torch's
fake process group, so that a model of 7 billion parameters can be looked at on a machine that could not hold it. The
figures are the process's own: resident memory above what it had before.

    python benchmarks/never_whole.py --size 7b --ranks 8
"""

import argparse
import ctypes
import gc
import sys
import time
from pathlib import Path

import claims
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

import shardwright.torch as sw
from shardwright.backends.torch.machine.mesh import bind
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.backends.torch.pipeline.sentinels import Sentinel
from shardwright.backends.torch.program.stage_map import StageMap
from shardwright.backends.torch.training.split_model import SplitModel
from shardwright.core.layout.mesh import Mesh
from shardwright.core.schedule import Schedule

SIZES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "1b": {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 20, "num_attention_heads": 16},
    "60m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8},
}
GIB = 2**30


def resident(key: str) -> int:
    """Resident memory in bytes: ``VmRSS`` now, ``VmHWM`` the most since the peak was reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="60m")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    given = parser.parse_args()
    # Large memory goes back to the system at once, not to a heap with holes.
    ctypes.CDLL("libc.so.6").mallopt(-3, 2**17)
    dist.init_process_group("fake", rank=given.rank, world_size=given.ranks, store=FakeStore())
    reset_peak()
    before, began = resident("VmRSS"), time.perf_counter()
    torch.manual_seed(0)
    with sw.delay_param_initialization():
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **SIZES[given.size]))
    built_s, built = time.perf_counter() - began, resident("VmHWM") - before
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    blocks: list[nn.Module] = [model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head]
    names = {id(p): name for name, p in model.named_parameters()}
    calls = [[names[id(p)] for p in block.parameters()] for block in blocks]
    reset_peak()
    bound, watchdog = bind(Mesh.of(pp=1, dp=given.ranks, tp=1), torch.device("cpu")), Watchdog("rank", 60.0)
    sentinel = Sentinel("ignore", False, watchdog, bound.device)
    split = SplitModel(model, bound, watchdog, None, seed=0, weights=None, sentinel=sentinel)  # type: ignore[arg-type]
    split.split(StageMap.whole(Schedule.build("1f1b", ranks=1, microbatches=1), shard=3))
    split.shard_state(calls)
    cut = resident("VmHWM") - before
    cut_s = time.perf_counter() - began - built_s
    whole, share = sum(sizes.values()), sum(p.numel() * p.element_size() for p in model.parameters())
    largest = max(sum(sizes[name] for name in held) for held in calls)
    print(f"{given.size}: {whole / GIB:.2f} GiB of parameters, rank {given.rank} of {given.ranks}")
    print(f"  its share {share / GIB:.2f} GiB, the largest block {largest / GIB:.2f} GiB, the largest parameter "
          f"{max(sizes.values()) / GIB:.2f} GiB")  # fmt: skip
    print(f"  peak while it is built {built / GIB:.2f} GiB, in {built_s:.0f} s")
    print(f"  peak until its pieces are cut {cut / GIB:.2f} GiB, in {cut_s:.0f} s")
    print(f"  above its share {(cut - share) / GIB:.2f} GiB, {(cut - share) / largest:.2f} of the largest block")
    judged = claims.never_whole(built, cut, share, largest)
    print("\n" + judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
