"""How many small errors in the core its tests find: a random sample of one-line changes, each run against the tests.

    python benchmarks/mutants.py                      # 150 changes, seed 0: about ten minutes on two quiet cores
    python benchmarks/mutants.py --count 20 --files shardwright/core/schedule/checks.py
    python benchmarks/mutants.py --jobs 2 --results out.jsonl     # goes on where it was stopped

The core's tests run once under `coverage`, which says which tests come to which line. Every change (`mutations.py`) is
then made in a copy of the repository, and the tests that come to its line run there, file by file, those of the file's
own name and the shortest first, until one fails. A change that no test notices survives, and is printed as a diff. One
that makes the tests take five times as long counts as noticed. Changes that alter nothing that could be observed are
named in `mutants_equivalent.json`, each with the reason, and are not drawn. The exit code is 1 where fewer than 90% are
noticed.
"""

import argparse
import hashlib
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mutations import Mutation, mutations_of

ROOT = Path(__file__).resolve().parents[1]
CORE = "shardwright/core"
COPIED = ("shardwright", "tests", "benchmarks", "examples", "pyproject.toml", "README.md", "docs", "Makefile")
EQUIVALENT = ROOT / "benchmarks" / "mutants_equivalent.json"
NOTICED = 0.9
SLOWER, START_S = 5.0, 60.0
"""A change is given so many times the processor's seconds of its tests, and so many to start."""
WAITED = 20.0
"""How many times longer than that it may take by the clock, on a machine that does other work too."""
PRELOADED = ("numpy", "scipy.optimize", "scipy.sparse", "networkx", "pydantic", "rich.table", "hypothesis", "pytest")
"""What each run would import again, were it not forked from a process that has it."""
PLUGIN = """
import pytest, time, json, os
from coverage import Coverage

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    Coverage.current().switch_context(item.nodeid)
    begun = time.process_time()
    yield
    DURATIONS[item.nodeid] = time.process_time() - begun
    Coverage.current().switch_context("")

DURATIONS = {}

def pytest_sessionfinish():
    with open(os.environ["DURATIONS"], "w") as file:
        json.dump(DURATIONS, file)
"""


@dataclass(frozen=True)
class Coverage:
    """Which tests come to which line, and how long each takes.

    Attributes:
        tests: file, then line, then the tests; those of the empty name are run by an import.
        durations_s: of each test, on the processor.
    """

    tests: dict[str, dict[int, set[str]]]
    durations_s: dict[str, float]

    def of(self, mutation: Mutation) -> list[list[str]]:
        """The tests that come to a change, by file in the order in which they run; where an import comes to it, all
        that come to the file."""
        lines = self.tests.get(mutation.file, {})
        changed = range(mutation.lines[0], mutation.lines[1] + 1)
        found: set[str] = set().union(*(lines.get(line, set()) for line in changed))
        if "" in found:
            found = set().union(*lines.values())
        by_file: dict[str, list[str]] = {}
        for test in sorted(found - {""}, key=self.duration_s):
            by_file.setdefault(test.split("::")[0], []).append(test)
        stem = Path(mutation.file).stem

        def order(tests: list[str]) -> tuple[bool, float]:
            return stem not in Path(tests[0].split("::")[0]).stem, sum(map(self.duration_s, tests))

        return sorted(by_file.values(), key=order)

    def duration_s(self, test: str) -> float:
        return self.durations_s.get(test, 0.0)


def copy_of_repository(folder: Path) -> Path:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def measure(copy: Path, tests: Sequence[str]) -> Coverage:
    """Run all tests once. RuntimeError where one fails without any change."""
    import coverage

    (copy / "contexts_plugin.py").write_text(PLUGIN)
    data = copy / ".coverage"
    environment = os.environ | {
        "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "DURATIONS": str(copy / "durations.json"),
        "COVERAGE_FILE": str(data), "COVERAGE_CORE": "ctrace",
    }  # fmt: skip
    command = [sys.executable, "-m", "coverage", "run", f"--source={CORE}", "-m"]
    command += ["pytest", "-q", "-p", "contexts_plugin", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tests fail without a change:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    read = coverage.CoverageData(str(data))
    read.read()
    found = {
        str(Path(file).relative_to(copy)): {
            line: {context.split("|")[0] for context in contexts}
            for line, contexts in read.contexts_by_lineno(file).items()
        }
        for file in read.measured_files()
    }
    return Coverage(found, json.loads((copy / "durations.json").read_text()))


def kept_or_measured(file: Path | None, copy: Path, tests: Sequence[str]) -> Coverage:
    """What ``file`` holds, where it is of the same core and tests; else measured, and left there."""
    digest = hashlib.sha256(" ".join(tests).encode())
    for path in sorted([*(copy / CORE).rglob("*.py"), *(copy / "tests").rglob("*.py")]):
        digest.update(path.read_bytes())
    if file is not None and file.exists():
        kept = json.loads(file.read_text())
        if kept["digest"] == digest.hexdigest():
            of_files = {n: {int(line): set(held) for line, held in lines.items()} for n, lines in kept["tests"].items()}
            return Coverage(of_files, kept["durations_s"])
    found = measure(copy, tests)
    if file is not None:
        lists = {name: {line: sorted(held) for line, held in lines.items()} for name, lines in found.tests.items()}
        file.write_text(json.dumps({"digest": digest.hexdigest(), "tests": lists, "durations_s": found.durations_s}))
    return found


def candidates(covered: Coverage, files: Sequence[str], seed: int) -> Iterator[Mutation]:
    """All changes that some test comes to and that could be noticed, in a random order."""
    equivalent = {entry["key"] for entry in json.loads(EQUIVALENT.read_text())}
    paths = [ROOT / file for file in files] or sorted((ROOT / CORE).rglob("*.py"))
    every = [m for path in paths for m in mutations_of(str(path.relative_to(ROOT)), path.read_text())]
    unknown = equivalent - {m.key for m in every}
    if unknown and not files:
        raise RuntimeError(f"{EQUIVALENT.name} names changes that there are none of any more: {sorted(unknown)}")
    every = [m for m in every if m.key not in equivalent and covered.of(m)]
    yield from sorted(every, key=lambda mutation: mutation.rank(seed))


class Run:
    """One change at work in a copy: a fork of this process, which has imported what all runs need but not the core."""

    def __init__(self, mutation: Mutation, covered: Coverage, copy: Path) -> None:
        self.mutation, self.copy = mutation, copy
        self.tests = covered.of(mutation)
        self.source = (copy / mutation.file).read_text()
        (copy / mutation.file).write_text(mutation.apply(self.source))
        self.begun = time.perf_counter()
        self.limit_s = START_S + SLOWER * sum(covered.duration_s(test) for tests in self.tests for test in tests)
        self.log = copy / "log.txt"
        self.pid = os.fork()
        if self.pid == 0:
            _run_tests(copy, self.tests, self.log, int(self.limit_s))

    def ended(self) -> dict[str, Any] | None:
        """What came of it, with the copy as it was before; None while it runs."""
        late = time.perf_counter() - self.begun > self.limit_s * WAITED
        if late:
            os.killpg(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if late else os.WNOHANG)
        if pid == 0:
            return None
        (self.copy / self.mutation.file).write_text(self.source)
        late = late or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU)
        noticed = "takes too long" if late else "noticed"
        said = [line for line in self.log.read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
        return {
            "key": self.mutation.key, "how": noticed if late or status else "survives", "by": said[:1],
            "line": self.mutation.lines[0], "tests": sum(map(len, self.tests)),
            "time_s": round(time.perf_counter() - self.begun, 1), "diff": self.mutation.diff(self.source),
        }  # fmt: skip


def _run_tests(copy: Path, tests: Sequence[Sequence[str]], log: Path, limit_s: int) -> None:
    """In a fork: end with 1 at the first failure. Byte code is not written, lest it outlive the change."""
    code = 1
    try:
        os.setsid()
        used = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (used + limit_s, used + limit_s + 5))
        os.chdir(copy)
        sys.dont_write_bytecode = True
        sys.path[:] = [str(copy), *(path for path in sys.path if Path(path).resolve() != ROOT)]
        os.environ["PYTHONPATH"] = str(copy)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        import pytest

        options = ["-q", "-x", "--no-header", "-p", "no:cacheprovider"]
        code = int(any(pytest.main([*options, *of_file]) for of_file in tests))
        sys.stdout.flush()
    finally:
        os._exit(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="*", default=[], help="of the core; all of it by default")
    parser.add_argument("--tests", nargs="*", default=["tests/core"])
    parser.add_argument("--jobs", type=int, default=1, help="copies that work at the same time")
    parser.add_argument("--map", type=Path, help="which tests come to which line: kept here until a file changes")
    parser.add_argument(
        "--results", type=Path, help="a line of JSON for each change; those that it has are not run again"
    )
    given = parser.parse_args()
    known: dict[str, dict[str, Any]] = {}
    if given.results is not None and given.results.exists():
        known = {entry["key"]: entry for entry in map(json.loads, given.results.read_text().splitlines())}
    with tempfile.TemporaryDirectory() as folder:
        copies = [copy_of_repository(Path(folder) / "0")]
        begun = time.perf_counter()
        covered = kept_or_measured(given.map, copies[0], given.tests)
        for job in range(1, given.jobs):  # with the byte code that the tests have left
            copies.append(Path(shutil.copytree(copies[0], Path(folder) / str(job))))
        print(f"{len(covered.durations_s)} tests pass, {time.perf_counter() - begun:.0f} s", flush=True)
        chosen = list(candidates(covered, given.files, given.seed))
        total, chosen = len(chosen), chosen[: given.count]
        for module in PRELOADED:
            importlib.import_module(module)
        waiting = [mutation for mutation in chosen if mutation.key not in known]
        results = {mutation.key: known[mutation.key] for mutation in chosen if mutation.key in known}
        running: list[Run] = []
        free = list(copies)
        while waiting or running:
            while waiting and free:
                running.append(Run(waiting.pop(0), covered, free.pop()))
            time.sleep(0.05)
            for run in list(running):
                result = run.ended()
                if result is None:
                    continue
                running.remove(run)
                free.append(run.copy)
                results[result["key"]] = result
                if given.results is not None:
                    with given.results.open("a") as file:
                        file.write(json.dumps(result) + "\n")
                name, place = result["key"].split("|")[:2]
                said = f"{result['how']} in {result['time_s']:.0f} s: {name}:{result['line']} {place}"
                print(f"{len(results)}/{len(chosen)} {said}", flush=True)
    found = [results[mutation.key] for mutation in chosen]
    return report(found, total)


def report(found: Sequence[dict[str, Any]], total: int) -> int:
    """Print what survives, and how many do not; the exit code."""
    for result in found:
        if result["how"] == "survives":
            print(f"\n{result['key']}\n{result['diff']}")
    noticed = sum(result["how"] != "survives" for result in found)
    share = noticed / len(found) if found else 0.0
    print(
        f"\n{noticed} of {len(found)} changes are noticed, {share:.1%}; {NOTICED:.0%} are required; there are {total}"
    )
    return 0 if share >= NOTICED else 1


if __name__ == "__main__":
    sys.exit(main())
