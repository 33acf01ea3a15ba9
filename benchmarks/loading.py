"""Loading of checkpoints on CPU ranks: what each rank holds meanwhile, and the time beside that of DCP.

    python benchmarks/loading.py [--parts share time] [--gib 4] [--write benchmarks/results/loading.md]

*share*: a GPT-2 of 4 GiB on the meta device takes its weights from a folder of indexed safetensors files, on 4 ranks,
under three plans. Anonymous memory (``RssAnon``, read all along by a thread of the rank) counts, since mapped files
are the system's: the most of it above what the rank had before, less the share that it holds afterwards, in whole
tensors of the largest size. The files are sparse: zeros, but for the first and the last entry of each tensor, by which
what was loaded is checked.

*time*: on 2 ranks, parameters and AdamW's states of 1 GiB together, that were written under a pipeline of two stages,
are loaded under a tensor axis by `sw.resume_from_checkpoint`, and by ``torch.distributed.checkpoint.load`` into tensors
cut alike (DTensor), from a folder that it wrote of tensors that two ranks hold by stages. Rounds in turn, files in the
system's cache, medians of the slower rank.
"""

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import claims
import torch
import torch.distributed as dist
from cpu_ranks import AnonymousMemory, launch
from torch import nn

import shardwright as sw
from shardwright.core.cluster.hardware import load_profile

GIB, MIB = 2**30, 2**20
SPLITS: dict[str, dict[str, int]] = {
    "pp 4": {"pp": 4, "dp": 1, "tp": 1, "shard": 0},
    "pp 2 × tp 2": {"pp": 2, "dp": 1, "tp": 2, "shard": 0},
    "dp 4, shard 3": {"pp": 1, "dp": 4, "tp": 1, "shard": 3},
}
WIDTH, VOCABULARY, LENGTH = 2048, 50257, 32
BLOCK_BYTES = 4 * (12 * WIDTH**2 + 13 * WIDTH)
INNER = 1024
"""The width of the model that is timed; its blocks have as many entries as eight of its squares."""


# What each rank holds ----------------------------------------------------------------------------------------------


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        return GPT2LMHeadModel(
            GPT2Config(n_layer=layers, n_embd=WIDTH, n_head=16, vocab_size=VOCABULARY, n_positions=LENGTH)
        )


def marks(name: str) -> tuple[float, float]:
    """The first and the last entry of a tensor."""
    number = sum(name.encode()) % 97
    return 1.0 + number, -2.0 - number


def write_sparse(model: nn.Module, folder: Path, file_bytes: int) -> None:
    """A folder of safetensors files and their index, in which only the marks take space."""
    files: list[list[tuple[str, torch.Tensor]]] = [[]]
    for name, parameter in model.named_parameters():
        if files[-1] and sum(p.numel() * 4 for _, p in files[-1]) + parameter.numel() * 4 > file_bytes:
            files.append([])
        files[-1].append((name, parameter))
    where: dict[str, str] = {}
    for number, held in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for name, parameter in held:
            size = parameter.numel() * 4
            header[name] = {"dtype": "F32", "shape": list(parameter.shape), "data_offsets": [at, at + size]}
            where[name], at = file, at + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for name in header:
                first, last = header[name]["data_offsets"]
                for place, value in zip((first, last - 4), marks(name), strict=True):
                    out.seek(8 + len(text) + place)
                    out.write(torch.tensor(value).numpy().tobytes())
            out.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def rank_of_share(plan: str, folder: str, layers: int, out: str) -> None:
    import shardwright.torch as swt

    ctypes.CDLL("libc.so.6").mallopt(-3, 2**17)  # large memory goes back to the system at once
    swt.init(plan=plan, log_every=0)
    model = gpt2(layers)
    with AnonymousMemory() as memory:
        split = swt.DistributedModel(model, weights=folder)
        split_model = split.runtime.split_model
        if split_model.shard_level == 3:
            blocks: list[nn.Module] = [model.transformer.wte, model.transformer.wpe, *model.transformer.h]
            names = {id(p): name for name, p in model.named_parameters()}
            split_model.shard_state([[names[id(p)] for p in block.parameters()] for block in blocks])
    held = {name: p for name, p in model.named_parameters() if not p.is_meta}
    wrong = []
    sums = torch.zeros(2)
    for name, p in held.items():
        first, last = marks(name)
        counts = [int((p == value).sum()) for value in (first, last, 0.0)]
        sums += torch.tensor(counts[:2], dtype=torch.float32)
        if sum(counts) != p.numel():
            wrong.append(name)
    dist.all_reduce(sums)
    share = sum(p.nbytes for p in held.values())
    told: list[Any] = [None] * swt.size()
    dist.all_gather_object(told, (memory.most - memory.before, share, wrong))
    if swt.rank() == 0:
        Path(out).write_text(json.dumps({"ranks": told, "marks": sums.tolist()}))
    swt.shutdown()


def share(gib: float, scratch: Path) -> tuple[list[list[str]], dict[str, Any]]:
    layers = max(4, round((gib * GIB - 4 * WIDTH * VOCABULARY) / BLOCK_BYTES))
    model = gpt2(layers)
    tensors = dict(model.named_parameters())
    whole, largest = sum(p.numel() * 4 for p in tensors.values()), max(p.numel() * 4 for p in tensors.values())
    folder = scratch / "hub"
    folder.mkdir()
    write_sparse(model, folder, GIB // 2)
    device = load_profile("cpu").device
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device="meta")
    graph = sw.capture(model, {"input_ids": ids, "labels": ids})
    rows, found = [], {}
    for label, pins in SPLITS.items():
        plan, out = scratch / "plan.json", scratch / "share.json"
        cluster = sw.Cluster(device, devices_per_node=4)
        asked = {"batch": 8, "microbatch": 1, "optimizer": "adamw", "recompute": "none", **pins}
        sw.plan(graph, cluster, **asked).save(plan)
        launch(__file__, 4, "share", str(plan), str(folder), str(layers), str(out))
        told = json.loads(out.read_text())
        peaks, shares = [rank[0] for rank in told["ranks"]], [rank[1] for rank in told["ranks"]]
        above = max((peak - own) / largest for peak, own in zip(peaks, shares, strict=True))
        # Copies of what several ranks hold carry its marks too.
        is_right = not any(rank[2] for rank in told["ranks"]) and min(told["marks"]) >= len(tensors)
        found[label] = (above, is_right)
        rows.append([
            label, f"{whole / GIB:.2f}", f"{largest / MIB:.0f}", " ".join(f"{own / MIB:.0f}" for own in shares),
            " ".join(f"{peak / MIB:.0f}" for peak in peaks), f"{above:.2f}",
        ])  # fmt: skip
        print(" | ".join(rows[-1]), flush=True)
    header = ["plan", "parameters, GiB", "largest tensor, MiB", "share by rank, MiB", "most held meanwhile, MiB",
              "above the share, in largest tensors"]  # fmt: skip
    return [header, *rows], found


# Time ----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(INNER, 4 * INNER), nn.Linear(4 * INNER, INNER)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def rank_of_time(folder: str, blocks: int, rounds: int, out: str) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import shardwright.torch as swt

    @swt.step
    def train_step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        model.backward(loss)
        return loss

    def start(**config: Any) -> tuple[Any, Any]:
        swt.init({"ddp": True, "microbatches": 2, **config}, log_every=0)
        torch.manual_seed(0)
        model = swt.DistributedModel(Net(blocks))
        optimizer = swt.DistributedOptimizer(torch.optim.AdamW(model.parameters(), foreach=False))
        train_step(model, torch.ones(2, INNER))
        optimizer.step()
        return model, optimizer

    def as_dtensor(name: str, tensor: torch.Tensor, cut: Mapping[str, int], mesh: Any) -> Any:
        if name in cut and tensor.dim():
            return DTensor.from_local(tensor, mesh, [Shard(cut[name])], run_check=False)
        return tensor

    def state(model: Any, optimizer: Any, cut: Mapping[str, int], mesh: Any) -> dict[str, Any]:
        """What this rank holds, as DCP takes it: DTensors where the tensor axis cuts."""
        found = {}
        for name, parameter in model.module.named_parameters():
            if parameter.is_meta:
                continue
            held = {"model": parameter.detach(), **optimizer.state[parameter]}
            found |= {f"{key}.{name}": as_dtensor(name, value, cut, mesh) for key, value in held.items()}
        return found

    model, optimizer = start(pipeline_parallel_degree=2)
    path, other = Path(folder) / "ours", Path(folder) / "dcp"
    swt.save_checkpoint(path, "last")
    dcp.save(state(model, optimizer, {}, None), checkpoint_id=other)
    swt.shutdown()
    model, optimizer = start(tensor_parallel_degree=2)
    mesh = init_device_mesh("cpu", (2,))
    cut = {name: place.dim for name, place in model.runtime.split_model.parts.tensor.places.items()}
    times: dict[str, list[float]] = {"ours": [], "dcp": []}
    loads: dict[str, Callable[[], Any]] = {
        "ours": lambda: swt.resume_from_checkpoint(path, "last"),
        "dcp": lambda: dcp.load(state(model, optimizer, cut, mesh), checkpoint_id=other),
    }
    kept: dict[str, torch.Tensor] = {}
    for number in range(rounds + 1):
        for kind in ("ours", "dcp") if number % 2 else ("dcp", "ours"):
            for p in model.module.parameters():
                p.detach().zero_()
            dist.barrier()
            begun = time.perf_counter()
            loads[kind]()
            took = torch.tensor(time.perf_counter() - begun)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if number:  # the first one warms the cache
                times[kind].append(float(took))
            values = {name: p.detach().clone() for name, p in model.module.named_parameters()}
            assert all(torch.equal(value, kept.setdefault(name, value)) for name, value in values.items()), kind
    size = sum(
        t.to_local().nbytes if isinstance(t, DTensor) else t.nbytes for t in state(model, optimizer, cut, mesh).values()
    )
    if swt.rank() == 0:
        Path(out).write_text(json.dumps({"times": times, "cut": len(cut), "of_rank": size}))
    swt.shutdown()


def timed(gib: float, rounds: int, scratch: Path) -> tuple[list[list[str]], float]:
    per_block = 3 * 4 * (8 * INNER**2 + 5 * INNER)
    blocks = max(2, round(gib * GIB / per_block))
    out = scratch / "time.json"
    launch(__file__, 2, "time", str(scratch), str(blocks), str(rounds), str(out))
    found = json.loads(out.read_text())
    medians = {kind: statistics.median(seconds) for kind, seconds in found["times"].items()}
    ratio = medians["ours"] / medians["dcp"]
    header = ["state, GiB", "of a rank, GiB", "parameters cut", "ours, s", "DCP, s", "ours / DCP", "by round"]
    by_round = [a / b for a, b in zip(found["times"]["ours"], found["times"]["dcp"], strict=True)]
    row = [
        f"{blocks * per_block / GIB:.2f}", f"{found['of_rank'] / GIB:.2f}", f"{found['cut']} of {4 * blocks}",
        f"{medians['ours']:.2f}", f"{medians['dcp']:.2f}", f"{ratio:.2f}", " ".join(f"{one:.2f}" for one in by_round),
    ]  # fmt: skip
    return [header, row], ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("share", "time"), default=["share", "time"])
    parser.add_argument("--gib", type=float, default=4.0, help="the size of the model whose share is looked at")
    parser.add_argument("--timed-gib", type=float, default=1.0, help="the size of what is loaded for its time")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    tables: list[list[list[str]]] = []
    shares: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if "share" in options.parts:
            table, shares = share(options.gib, Path(scratch))
            tables.append(table)
        if "time" in options.parts:
            table, ratios["DCP"] = timed(options.timed_gib, options.rounds, Path(scratch))
            tables.append(table)
    text = ""
    for header, *rows in tables:
        lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
        text += "\n" + "\n".join(lines) + "\n"
    print(text)
    if options.write:
        with options.write.open("a", encoding="utf-8") as file:
            file.write(text)
    judged = claims.loading(shares, ratios)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    if sys.argv[1:3] == ["--rank-of", "share"]:
        rank_of_share(sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
    elif sys.argv[1:3] == ["--rank-of", "time"]:
        rank_of_time(sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    else:
        sys.exit(main())
