"""The time of calls: with the host's part, or of the device alone."""

import time
from collections.abc import Callable

import torch

REPEATS = 20
"""The most times that a call stands in one CUDA graph, so that the host's part of starting it does not count."""


def device_s(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """The time of a call in seconds; on a GPU without the host's part, as one of many in a CUDA graph."""
    if device.type != "cuda":
        return quartile_s(run, device, budget_s)
    with torch.cuda.device(device):
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):  # what is made at first use is not recorded
            run()
            beside.synchronize()
            began = time.perf_counter()
            run()
            beside.synchronize()
        once_s = time.perf_counter() - began
        repeats = min(REPEATS, max(1, int(budget_s / (6 * once_s))))  # five replays, and one to warm up
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=beside):
            for _ in range(repeats):
                run()
        return quartile_s(graph.replay, device, budget_s) / repeats


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
