"""Runs ranks as forks of one process that has imported everything, and says how each ended: a case costs what its own
steps cost. To be used from a process that has run no op yet, by itself."""

import atexit
import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

SHARED = "/dev/shm/"
"""Where the system keeps shared memory and semaphores. Other processes have theirs there too."""
SHARED_EVERY_S = 0.25
"""How often ranks are asked what they have there: the answer is a list of all their libraries."""


@dataclass
class Ended:
    """How a rank ended.

    Attributes:
        code: its exit status; minus the signal that ended it.
        noted: what it noted by `note`.
        output: standard output and error.
        at: when it was seen to have ended, or was killed, by time.time().
        was_killed: whether it had to be killed.
        left: how many processes it left behind.
        shared: names in `SHARED` that it had in its memory, as far as it was seen while it ran.
    """

    code: int | None = None
    noted: dict[str, str] = field(default_factory=dict)
    output: str = ""
    at: float = 0.0
    was_killed: bool = False
    left: int = 0
    shared: list[str] = field(default_factory=list)


def note(name: str, text: str) -> None:
    """In a rank: keep a text for `Ended.noted`."""
    folder = Path(os.environ["FORKED_NOTES"])
    (folder / f"{name}.partly").write_text(text, encoding="utf-8")
    (folder / f"{name}.partly").rename(folder / f"{name}.note")


def run_ranks(
    main: Callable[[], None], environments: list[Mapping[str, str]], folder: Path, limit_s: float,
    kill: frozenset[int] = frozenset(),
) -> list[Ended]:  # fmt: skip
    """Run ``main`` in a fork for each environment, until all have ended but those of ``kill``, or for ``limit_s``; then
    kill what is left."""
    processes: list[int] = []
    for rank, given in enumerate(environments):
        mine = folder / str(rank)
        mine.mkdir(parents=True)
        sys.stdout.flush()
        sys.stderr.flush()
        process = os.fork()
        if process == 0:
            _be_rank(main, {**given, "FORKED_NOTES": str(mine)}, mine)
        processes.append(process)
    ended = [Ended() for _ in processes]
    shared: list[set[str]] = [set() for _ in processes]
    begun = looked = time.time()
    while True:
        if time.time() > looked + SHARED_EVERY_S:
            looked = time.time()
            for place, process in enumerate(processes):
                shared[place] |= shared_by(process)
        for place, process in enumerate(processes):
            if ended[place].code is None:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    ended[place].code, ended[place].at = os.waitstatus_to_exitcode(status), time.time()
        waiting = [p for p, end in enumerate(ended) if end.code is None]
        is_over = time.time() - begun > limit_s
        if not [p for p in waiting if p not in kill] or is_over:
            for place in waiting:
                os.kill(processes[place], signal.SIGKILL)
                os.waitpid(processes[place], 0)
                ended[place].at, ended[place].was_killed = time.time(), True
            break
        time.sleep(0.02)
    sessions = _sessions()
    for place, process in enumerate(processes):
        mine = folder / str(place)
        ended[place].output = (mine / "output").read_text(encoding="utf-8", errors="replace")
        ended[place].noted = {path.stem: path.read_text(encoding="utf-8") for path in mine.glob("*.note")}
        ended[place].left = sessions.count(process)
        ended[place].shared = sorted(shared[place])
    return ended


def world(size: int) -> list[dict[str, str]]:
    """The environments of a run of ``size`` ranks on this host, without an agent."""
    port = str(free_port())
    alike = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{"RANK": str(r), "LOCAL_RANK": str(r), **alike} for r in range(size)]


def _be_rank(main: Callable[[], None], environment: Mapping[str, str], folder: Path) -> NoReturn:
    os.environ.update(environment)
    live_as_script(main, folder / "output", lambda error: note("error", error))


def live_as_script(
    main: Callable[[], None], output: Path, tell: Callable[[str], None] = lambda error: None
) -> NoReturn:
    """The life of a fork: as that of a script of its own, with its hooks for errors and for the end.

    Args:
        output: standard output and error are appended to this file, which several may share.
        tell: is given the line that names the error with which ``main`` ends.
    """
    os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    atexit._clear()
    gc.freeze()  # what the parent imported is no garbage, and every `sw.shutdown` would search it again
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException as error:
        sys.last_value = error
        tell("".join(traceback.format_exception_only(error)))
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _sessions() -> list[int]:
    """The session of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found.append(int(path.read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[3]))
        except (OSError, IndexError):
            continue
    return found


def shared_by(process: int) -> set[str]:
    """The names in `SHARED` that a process has in its memory; none once it has ended."""
    try:
        memory = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {line.partition(SHARED)[2].removesuffix(" (deleted)") for line in memory.splitlines() if SHARED in line}
