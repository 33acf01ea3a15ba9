"""Ten thousand spoilt files, schedules, arguments and commands: each is refused by name, or what comes of it is legal.

    python benchmarks/fuzz.py [--cases 10000] [--seed 7] [--kind "plan files"] [--number 12]

Exits with 1 when a case raises what is no ShardwrightError, takes more than 10 s of the processor (or 60 s in all) or
more than 1 GiB, or when the oracle of `fuzz_oracle.py` finds that something illegal was accepted. With --kind and
--number one case is run by itself, as it is.
"""

import argparse
import multiprocessing
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import claims
import fuzz_cases
import fuzz_training

MOST_CPU_S, MOST_S = 10.0, 60.0
MOST_BYTES = 1 << 30
BATCH = 250
"""Cases that one process runs, one after the other: what they hold together is bounded too."""


class TooSlowError(BaseException):
    """The time of a case is over."""


@dataclass
class Found:
    """What the cases of one kind came to."""

    outcomes: Counter[str] = field(default_factory=Counter)
    worst_s: float = 0.0
    worst_bytes: int = 0
    faults: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kind", choices=fuzz_cases.KINDS)
    parser.add_argument("--number", type=int)
    asked = parser.parse_args()
    if asked.number is not None:
        print(*fuzz_cases.run(asked.kind or parser.error("--number goes with --kind"), asked.seed, asked.number))
        return 0
    kinds = [asked.kind] if asked.kind else list(fuzz_cases.KINDS)
    each = -(-asked.cases // len(kinds))
    found = {kind: run_kind(kind, asked.seed, each) for kind in kinds}
    show(found)
    judged = claims.fuzz({k: (sum(f.outcomes.values()), f.faults) for k, f in found.items()}, asked.cases)
    print(judged.verdict())
    return judged.exit_code


def run_kind(kind: str, seed: int, cases: int) -> Found:
    """All cases of a kind, in processes of their own."""
    found = Found()
    for start in range(0, cases, BATCH):
        numbers = range(start, min(start + BATCH, cases))
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=batch, args=(theirs, kind, seed, numbers))
        process.start()
        theirs.close()
        done = 0
        try:
            while True:
                outcome, said, seconds, grown = ours.recv()
                done += 1
                found.outcomes[outcome] += 1
                found.worst_s, found.worst_bytes = max(found.worst_s, seconds), max(found.worst_bytes, grown)
                if outcome not in ("refused", "accepted"):
                    found.faults.append(said)
        except EOFError:
            process.join()
        if done < len(numbers):
            found.outcomes["died"] += 1
            found.faults.append(f"{kind} {numbers[done]}: the process ended with {process.exitcode}")
        found.faults = found.faults[:50]
    return found


def batch(pipe: Any, kind: str, seed: int, numbers: range) -> None:
    """Run cases, each within its time and memory, and send what they came to."""
    for signalled in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(signalled, _stop)
    fuzz_cases.plans(), fuzz_cases.csvs(), fuzz_cases.tables()
    fuzz_training.prepare(kind)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    if kind != "JAX arguments":  # whose compiler asks for far more addresses than it uses
        resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, resource.RLIM_INFINITY))
    before = _most_held()
    for number in numbers:
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, MOST_CPU_S)
        signal.setitimer(signal.ITIMER_REAL, MOST_S)
        try:
            outcome, said = fuzz_cases.run(kind, seed, number)
        except TooSlowError:
            outcome, said = "slow", traceback.format_exc(limit=-3)
        except BaseException as error:
            outcome, said = type(error).__name__, "".join(traceback.format_exception(error, limit=-3))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        grown = _most_held() - before
        if grown > MOST_BYTES:
            outcome = "large"
        pipe.send((outcome, f"{kind} {number}: {outcome}: {said[:800]}", time.process_time() - begun, grown))
    pipe.close()


def _stop(*_: object) -> None:
    raise TooSlowError


def _most_held() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def show(found: dict[str, Found]) -> None:
    print("| kind | cases | refused | accepted, and legal | faults | longest, s of the processor | most memory, MiB |")
    print("|---|---|---|---|---|---|---|")
    for kind, result in found.items():
        cases, refused, accepted = (
            sum(result.outcomes.values()),
            *(result.outcomes[o] for o in ("refused", "accepted")),
        )
        print(
            f"| {kind} | {cases} | {refused} | {accepted} | {cases - refused - accepted} | {result.worst_s:.2f} | "
            f"{result.worst_bytes / 2**20:.0f} |"
        )
    for result in found.values():
        for fault in result.faults:
            print(f"\n{fault}")


if __name__ == "__main__":
    sys.exit(main())
