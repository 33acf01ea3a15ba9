"""Conversions over Gloo: values kept, bytes sent as the core predicts."""

import socket
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from shardwright.backends.torch.state.conversion import Converter
from shardwright.core.layout.conversions import convert
from shardwright.core.layout.mesh import Mesh
from shardwright.core.layout.placements import Layout, Partial, Placement, Replicate, Split
from tests.comparison import Comparison
from tests.core.simulated_ranks import assemble, distribute

PLACES: tuple[Placement, ...] = (Split(0), Split(1), Replicate(), Partial("sum"))
SHAPE = (5, 7)


def cases(which: str) -> tuple[Mesh, list[tuple[Layout, Layout]]]:
    if which == "one axis":
        layouts = [Layout.of(x=p) for p in PLACES]
        return Mesh.of(x=3), list(product(layouts, layouts))
    both = [Layout.of(x=a, y=b) for a, b in product(PLACES, PLACES)]
    pairs = list(product(both, both))
    return Mesh.of(x=2, y=2), pairs


def _rank(rank: int, which: str, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    mesh, pairs = cases(which)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=mesh.size)
    value = np.arange(35.0).reshape(SHAPE)
    results: list[Any] = []
    for before, after in pairs:
        found = convert(SHAPE, 8, mesh, before, after)
        converter = Converter()
        piece = torch.from_numpy(distribute(value, before, mesh)[rank].copy())
        results.append((converter.run(found, piece).numpy(), converter.sent_bytes))
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("which", ["one axis", pytest.param("two by two", marks=pytest.mark.slow)])
def test_conversions_over_gloo(which: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mesh, pairs = cases(which)
    mp.spawn(_rank, (which, port, str(tmp_path)), nprocs=mesh.size)
    ranks = [torch.load(tmp_path / f"{r}.pt", weights_only=False) for r in range(mesh.size)]
    for i, (before, after) in enumerate(pairs):
        pieces = [of_rank[i][0] for of_rank in ranks]
        found, wanted = assemble(SHAPE, pieces, after, mesh), np.arange(35.0).reshape(SHAPE)
        Comparison(f"{before} to {after}").values(found, wanted, relative=1e-7, absolute=1e-9).require()
        sent = sum(of_rank[i][1] for of_rank in ranks)
        assert sent == convert(SHAPE, 8, mesh, before, after).moved_bytes, f"{before} to {after}"
