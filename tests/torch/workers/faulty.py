"""Faults in runs of forked ranks. Usage: faulty.py CASES.json FOLDER: runs the cases one after the other and prints, as
JSON, how each of their ranks ended."""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

import shardwright.torch as sw
from tests.torch.forked import Ended, note, run_ranks, world

STEPS, WIDTH, ROWS = 4, 16, 8


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        fault: kill, stop, exit, raise, memory (the address space ends), sleep or hold (no faults: something takes
            long, and holds the interpreter), none; and for the start of a run port, missing, twice, world, config.
        where: forward, backward, body, loader (between steps).
        step: in which step it happens; they are counted from 0, and in the first one the step is recorded.
        timeout_s: of `sw.init`; 0 leaves the default.
    """

    fault: str
    where: str = "forward"
    victim: int = 0
    pp: int = 1
    dp: int = 1
    tp: int = 1
    step: int = 2
    timeout_s: float = 0.0

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def ends_silently(self) -> bool:
        """Whether the victim says nothing of its own."""
        return self.fault in ("kill", "stop", "exit")


class _Failing(torch.autograd.Function):
    """Fails in its forward or its backward, when it is switched on."""

    case: Case | None = None

    @staticmethod
    def forward(ctx, x):
        if _Failing.case is not None and _Failing.case.where == "forward":
            happen(_Failing.case)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if _Failing.case is not None and _Failing.case.where == "backward":
            happen(_Failing.case)
        return gradient


def happen(case: Case) -> None:
    """The fault, which comes once."""
    _Failing.case = None
    note("fault", str(time.time()))
    if case.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif case.fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case.fault == "exit":
        os._exit(3)
    elif case.fault == "raise":
        raise KeyError(f"a fault in the {case.where}")
    elif case.fault == "memory":
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, resource.RLIM_INFINITY))
        torch.ones(2**30)
    elif case.fault == "sleep":
        time.sleep(3 * case.timeout_s)
    elif case.fault == "hold":
        ctypes.PyDLL(None).usleep(int(3e6 * case.timeout_s))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Guarded(Block):
    """A block in which a fault may sit, where modules are called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Failing.apply(super().forward(x))


class Model(nn.Module):
    def __init__(self, is_guarded: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList((Guarded if is_guarded else Block)() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@sw.step
def train_step(model, x, name):
    if _Failing.case is not None and _Failing.case.where == "body":
        happen(_Failing.case)
    loss = model(x)
    model.backward(loss)
    return loss


@contextmanager
def failing(case: Case, model: sw.DistributedModel) -> Iterator[None]:
    """In here the fault happens. On the tensor axis ops run without their modules: it comes with a collective there."""
    axis = model.runtime.tensor.shards.axis if model.runtime.tensor is not None else None
    convert = axis.convert if axis is not None else None

    def fail(*args, **kwargs):
        # The second argument of a conversion's key says whether it is one of the forward.
        if _Failing.case is not None and case.where == (kwargs.get("key") or args[2])[1]:
            happen(case)
        return convert(*args, **kwargs)

    _Failing.case = case
    if axis is not None:
        axis.convert = fail
    try:
        yield
    finally:
        _Failing.case = None
        if axis is not None:
            del axis.convert


def train(case: Case) -> None:
    """What a rank does. After an error in a step it takes another one, and notes what comes of that."""
    torch.set_num_threads(1)
    note("began", str(time.time()))
    config = {"pipeline_parallel_degree": case.pp, "tensor_parallel_degree": case.tp, "ddp": case.dp > 1}
    config |= {"microbatches": 4} | ({"wait_timeout_s": case.timeout_s} if case.timeout_s else {})
    if case.fault == "config" and int(os.environ["RANK"]) == case.victim:
        config["microbatches"] = 0
    sw.init(config)
    torch.manual_seed(0)
    model = sw.DistributedModel(Model(is_guarded=case.tp == 1))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    for number in range(STEPS):
        generator = torch.Generator().manual_seed(number * case.dp + sw.rdp_rank())
        batch = torch.randn(ROWS, WIDTH, generator=generator)
        optimizer.zero_grad()
        # A body is to fail when it is recorded: another word in every step is another signature, as numbers are inputs.
        run = partial(train_step, model, batch, f"step {number}" if case.where == "body" else "")
        is_due = number == case.step and sw.rank() == case.victim
        if is_due and case.where == "loader":
            happen(case)
        try:
            if is_due:
                with failing(case, model):
                    run()
            else:
                run()
        except Exception as error:
            note("first", "".join(traceback.format_exception_only(error)))
            note("first_at", str(time.time()))
            try:
                run()
                note("again", "")
            except Exception as second:
                note("again", "".join(traceback.format_exception_only(second)))
            raise
        optimizer.step()
    sw.barrier()
    sw.shutdown()
    note("done", "")


def at_start(case: Case, folder: Path, limit_s: float) -> list[Ended]:
    """Faults of the start of a run."""
    given = world(case.ranks)
    taken = socket.socket()
    if case.fault == "port":
        taken.bind(("127.0.0.1", 0))
        taken.listen(64)
        for environment in given:
            environment["MASTER_PORT"] = str(taken.getsockname()[1])
    elif case.fault == "missing":
        del given[case.victim]
    elif case.fault == "twice":
        given[case.victim]["RANK"] = "1" if case.victim != 1 else "2"
    elif case.fault == "world":
        given[case.victim]["WORLD_SIZE"] = str(case.ranks + 1)
    try:
        return run_ranks(partial(train, case), given, folder, limit_s)
    finally:
        taken.close()


def run(case: Case, folder: Path, limit_s: float) -> list[Ended]:
    """Run a case; how its ranks ended."""
    if case.fault in ("port", "missing", "twice", "world", "config"):
        return at_start(case, folder, limit_s)
    kill = frozenset({case.victim} if case.fault == "stop" else ())
    return run_ranks(partial(train, case), world(case.ranks), folder, limit_s, kill)


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
