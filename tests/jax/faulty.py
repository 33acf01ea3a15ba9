"""Faults in runs of forked processes with a JAX device each. Usage: faulty.py CASES.json FOLDER: runs the cases one
after the other and prints, as JSON, how each of their processes ended."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardwright.jax as sw
from tests.torch.forked import Ended, note, run_ranks

STEPS, WIDTH = 4, 8
AT_START = ("port", "missing", "twice", "world")


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        fault: kill, stop, exit, leave (its script ends), raise, nan (in its share of the batch), sleep (which is none),
            batch (it has another one), call (it asks for the parameters where others make a step); and for the start of
            a run those of `AT_START`.
        where: loader (between steps), or trace (in the loss function, before the first step).
        victim: the process that it happens to.
        dp: how many processes.
        stages: whether each process has a pipeline stage of its own, in place of a share of the batch.
        step: before which step; they are counted from 0.
        timeout_s: of `sw.init`; 0 leaves the default.
    """

    fault: str
    where: str = "loader"
    victim: int = 0
    dp: int = 2
    stages: bool = False
    step: int = 2
    timeout_s: float = 0.0


def happen(case: Case) -> None:
    """The fault."""
    note("fault", str(time.time()))
    if case.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.fault == "exit":
        os._exit(3)
    elif case.fault == "leave":
        raise SystemExit(0)
    elif case.fault == "raise":
        raise KeyError(f"a fault in the {case.where}")
    elif case.fault == "sleep":
        time.sleep(2 * case.timeout_s)


def plain(params: dict[str, list[jax.Array]], x: jax.Array) -> jax.Array:
    for weight in params["w"]:
        x = jnp.tanh(x @ weight)
    return jnp.square(x).mean()


def train(case: Case) -> None:
    """What a process does."""
    note("began", str(time.time()))
    rank, world = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    sw.init(**({"wait_timeout_s": case.timeout_s} if case.timeout_s else {}))

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        if case.where == "trace" and rank == case.victim:
            happen(case)
        return plain(params, x)

    params = {"w": [jnp.eye(WIDTH)] * (2 * world if case.stages else 1)}
    batch = np.ones((2 * world, WIDTH), np.float32)
    graph = sw.capture(plain, (params, batch))
    degrees = {"pp": world, "dp": 1, "schedule": "1f1b", "virtual_stages": 1} if case.stages else {"pp": 1, "dp": world}
    plan = sw.plan(
        graph, sw.Cluster("cpu", devices_per_node=world), batch=2 * world, tp=1, microbatch=2,
        precision="fp32", recompute="none", shard=0, **degrees,
    )  # fmt: skip
    train = sw.train_step(loss, optax.sgd(0.1), plan, nonfinite="error")
    state = train.init(params)
    for number in range(STEPS):
        given = batch
        if number == case.step and case.fault == "nan":
            note("fault", str(time.time()))
            given = np.full_like(batch, np.nan)
        elif number == case.step and rank == case.victim and case.where == "loader":
            happen(case)
            given = 2 * batch if case.fault == "batch" else batch
            if case.fault == "call":
                train.params(state)
        state, value = train(state, given)
        value.block_until_ready()
    train.settle()
    note("done", "")


def world(size: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    alike = {"JAX_NUM_PROCESSES": str(size), "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
    return [{"JAX_PROCESS_ID": str(rank), **alike} for rank in range(size)]


def run(case: Case, folder: Path, limit_s: float) -> list[Ended]:
    """Run a case; how its processes ended. Hubs that are still there are counted as left behind."""
    given: list[dict[str, str]] = world(case.dp)
    place = given[0]["JAX_COORDINATOR_ADDRESS"]
    taken = socket.socket()
    if case.fault == "port":
        taken.bind(("127.0.0.1", 0))
        taken.listen(64)
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        for environment in given:
            environment["JAX_COORDINATOR_ADDRESS"] = place
    elif case.fault == "missing":
        del given[case.victim]
    elif case.fault == "twice":
        given[case.victim]["JAX_PROCESS_ID"] = "0" if case.dp == 2 else "1" if case.victim != 1 else "2"
    elif case.fault == "world":
        given[case.victim]["JAX_NUM_PROCESSES"] = str(case.dp + 1)
    kill = frozenset({case.victim} if case.fault == "stop" else ())
    environments: list[Mapping[str, str]] = [*given]
    try:
        ended = run_ranks(partial(train, case), environments, folder, limit_s, kill)
    finally:
        taken.close()
    begun = time.monotonic()
    while hubs(place) and time.monotonic() - begun < 10:
        time.sleep(0.1)
    ended[0].left += hubs(place)
    return ended


def hubs(place: str) -> int:
    """How many hubs of the run there are."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        found += "shardwright.backends.rendezvous_store" in text and f'"{place}"' in text
    return found


def main() -> None:
    cases, folder = Path(sys.argv[1]), Path(sys.argv[2])
    found = []
    for number, given in enumerate(json.loads(cases.read_text(encoding="utf-8"))):
        case = Case(**given["case"])
        ended = run(case, folder / str(number), given["limit_s"])
        found.append({"case": asdict(case), "ended": [vars(end) for end in ended]})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
