"""A JAX pipeline over two processes beside the same pipeline in one: stages of 20 ms, 8 microbatches.

    python benchmarks/jax_processes.py                       # 1F1B and zb-h1, 3 launches of each way in turns
    python benchmarks/jax_processes.py --stage-ms 20 --launches 5 --repetitions 15 --schedules 1f1b

The model and the flags are those of `jax_pipeline.py`. *One process* has both devices; *two processes* have one each,
and arrays go between them by the transfers of `machine.process_transfers`, here over the loopback. Every process has a
thread for each of its devices (`NPROC`). By itself JAX gives each process as many as the host has cores, and hands the
work of a device from one to the other: two processes then have twice as many threads as cores, which take each other's
place. `--all-threads` leaves it so.

Both train under the same plan, loss and parameters must agree to the last bit but rounding, and the step is that of the
slower process. Beside them stands the time of the bytes alone: as many messages of their size as a step sends, one way
after the other, with nothing to compute. Nothing of it is added to the step where it overlaps.

It ends with 1 where a step over two processes takes more than 1.05 of that in one.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import jax
import jax_pipeline  # it sets the flags of XLA, which are read when devices are first asked for
import numpy as np

import shardwright.jax as sw
from tests.comparison import Comparison

if "SHARDWRIGHT_BENCHMARK_DEVICES" in os.environ:
    count = os.environ["SHARDWRIGHT_BENCHMARK_DEVICES"]
    os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace("device_count=2", f"device_count={count}")

WARM_UP = 3
LIMIT = 1.05
LIMIT_S = 900.0


def repeats_for(stage_ms: float) -> int:
    """Repeats of a chunk in every layer for which a stage takes so long, forward and backward, both devices busy: by
    the fastest of some steps, so that other work on the machine does not make stages short."""
    repeats = 8
    ways = [jax_pipeline.single(repeats, device) for device in jax.devices()]
    took = [max(jax_pipeline.side_by_side([way.step for way in ways])) for _ in range(30)]
    of_one = min(took) / (jax_pipeline.MICROBATCHES * jax_pipeline.STAGES * repeats)
    return max(1, round(stage_ms / 1e3 / of_one))


def step_times(repeats: int, schedule: str, repetitions: int) -> dict[str, Any]:
    """The seconds of the steps of this process, its losses, and the sum of its parameters."""
    ours = jax_pipeline.Ours(repeats, schedule, one_program=False)
    losses = [float(ours.step()) for _ in range(WARM_UP)]
    took = []
    for _ in range(repetitions):
        start = time.perf_counter()
        loss = ours.step()
        took.append(time.perf_counter() - start)
        losses.append(float(loss))
    return {"took": took, "losses": losses, "sum": float(np.abs(ours.weights_now()).sum())}


def message_s(count: int = 40) -> float:
    """Seconds that one activation takes from one process to the other: half of a round."""
    from shardwright.backends.jax.machine.process_transfers import absent, across

    ends = [
        jax.sharding.NamedSharding(jax.sharding.Mesh([device], "one"), jax.sharding.PartitionSpec())
        for device in jax.devices()
    ]
    shape = jax.ShapeDtypeStruct((1, jax_pipeline.ROWS, jax_pipeline.WIDTH), np.float32)
    own = jax.process_index() == 0
    array = jax.device_put(np.ones(shape.shape, np.float32), ends[0]) if own else absent(shape, ends[0])
    rounds = []
    for _ in range(count):
        start = time.perf_counter()
        for end in (ends[1], ends[0]):
            (array,) = across([array], [end])
            if array.is_fully_addressable:
                array.block_until_ready()
        rounds.append((time.perf_counter() - start) / 2)
    return statistics.median(rounds[count // 4 :])


def work(argv: argparse.Namespace) -> None:
    """One process of a launch: it prints what it measured, as JSON."""
    found: dict[str, Any] = {}
    if argv.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        begin = jax.distributed.initialize if argv.ppermute else sw.init
        begin(f"127.0.0.1:{argv.port}", argv.processes, argv.rank)
    for schedule in argv.schedules:
        found[schedule] = step_times(argv.repeats, schedule, argv.repetitions)
    if argv.processes > 1:
        found["message_s"] = message_s()
        (jax.distributed.shutdown if argv.ppermute else sw.shutdown)()
    print(json.dumps(found), flush=True)


def launch(processes: int, argv: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process of one launch measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    devices = str(jax_pipeline.STAGES // processes)
    environment |= {"OMP_NUM_THREADS": "1", "SHARDWRIGHT_BENCHMARK_DEVICES": devices}
    if not argv.all_threads:
        environment["NPROC"] = devices
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(rank), "--processes", str(processes), "--port", str(port),
             "--repeats", str(argv.repeats), "--repetitions", str(argv.repetitions), "--schedules", *argv.schedules,
             *["--ppermute"] * argv.ppermute],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(processes)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=LIMIT_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    if any(worker.returncode for worker in workers):
        raise SystemExit(f"a process of {processes} ended with {[worker.returncode for worker in workers]}")
    return [json.loads(text.splitlines()[-1]) for text in said]


def require_same(schedule: str, alone: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for own in found:
        for what in ("losses", "sum"):
            same = Comparison(f"{schedule} over two processes")
            same.values(own[schedule][what], alone[0][schedule][what], relative=1e-6, absolute=0.0, what=what).require()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage-ms", type=float, default=20.0)
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--schedules", nargs="+", default=["1f1b", "zb-h1"])
    parser.add_argument("--all-threads", action="store_true", help="leave the number of threads to JAX")
    parser.add_argument("--ppermute", action="store_true", help="begin without a socket: collectives carry arrays")
    parser.add_argument("--repeats", type=int, default=0, help="of a chunk in every layer, in place of --stage-ms")
    for name in ("rank", "processes", "port"):
        parser.add_argument(f"--{name}", type=int, default=-1, help=argparse.SUPPRESS)
    argv = parser.parse_args()
    if argv.rank >= 0:
        work(argv)
        return 0
    argv.repeats = argv.repeats or repeats_for(argv.stage_ms)
    print(f"{argv.repeats} repeats of a chunk in every layer")
    runs: dict[int, list[list[dict[str, Any]]]] = {1: [], 2: []}
    for number in range(argv.launches):
        for processes in (1, 2) if number % 2 == 0 else (2, 1):
            runs[processes].append(launch(processes, argv))
    judged = claims.Claims()
    messages = 2 * jax_pipeline.MICROBATCHES
    size = jax_pipeline.ROWS * jax_pipeline.WIDTH * 4
    print("| schedule | one process | two processes | two / one, by launch | the bytes alone |\n|---|---|---|---|---|")
    for schedule in argv.schedules:
        for alone, found in zip(runs[1], runs[2], strict=True):
            require_same(schedule, alone, found)
        one = [statistics.median(launched[0][schedule]["took"]) for launched in runs[1]]
        two = [max(statistics.median(own[schedule]["took"]) for own in launched) for launched in runs[2]]
        each = statistics.median(own["message_s"] for launched in runs[2] for own in launched)
        ratios = [b / a for a, b in zip(one, two, strict=True)]
        shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(
            f"| {schedule} | {statistics.median(one) * 1e3:.1f} ms | {statistics.median(two) * 1e3:.1f} ms | {shown} | "
            f"{messages} × {size // 1024} KiB: {messages * each * 1e3:.1f} ms, {each * 1e3:.2f} ms each |"
        )
        judged.at_most(f"{schedule}: a step over two processes to one in one", statistics.median(ratios), LIMIT)
    print(judged.verdict())
    return judged.exit_code


if __name__ == "__main__":
    sys.exit(main())
