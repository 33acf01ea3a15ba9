"""The time of calls: with the host's part, or of the device alone."""

import time
from collections.abc import Callable

import torch

REPEATS = 20
"""The number of times a call stands in one CUDA graph, so that the host's part of starting it does not count."""


def device_s(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The time of a call in seconds; on a GPU without the host's part, as one of many in a CUDA graph."""
    if device.type != "cuda":
        return quartile_s(run, device, budget_s)
    beside, own = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    beside.wait_stream(own)
    with torch.cuda.stream(beside):  # what is made at first use is not recorded
        for _ in range(2):
            run()
    own.wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    return quartile_s(graph.replay, device, budget_s) / REPEATS


def quartile_s(
    run: Callable[[], object], device: torch.device, budget_s: float, *, runs: int = 0, whole: bool = True
) -> float:
    """The time of a call in seconds, the lower quartile of several: other programs only ever make it longer.

    There are ``runs`` calls, or as many as the budget allows, at least 5. Not ``whole``: the time to issue the call,
    without waiting for the device.
    """

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    synchronize()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < (runs or 5) or (not runs and time.perf_counter() - began < budget_s and len(times) < 200):
        started = time.perf_counter()
        run()
        if whole:
            synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 4]
