"""The mutation run: what it changes, what it leaves alone, and that it fails where too little is noticed."""

import ast
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import mutants
from mutations import mutations_of

ROOT = Path(__file__).parents[2]
SOURCE = '''"""A file of 3 things."""

LIMIT: Literal[1, 2] = 1


def first(values: list[int], *, wide: bool = True) -> int:
    """Of 2."""
    if not values and wide:
        raise ValueError(f"{len(values) + 1} of {LIMIT + 1}")
    found = pick(max(values[0] * 2, LIMIT), 0.5)
    log.write(found)
    return found if found <= LIMIT else -found
'''
CHANGED = {
    ("number", "LIMIT: Literal[1, 2] = 2"),
    ("truth value", "def first(values: list[int], *, wide: bool = False) -> int:"),
    ("condition", "if  values and wide:"),
    ("condition", "if not values or wide:"),
    ("number", "found = pick(max(values[1] * 2, LIMIT), 0.5)"),
    ("number", "found = pick(max(values[0] * 3, LIMIT), 0.5)"),
    ("arithmetic", "found = pick(max(values[0] / 2, LIMIT), 0.5)"),
    ("number", "found = pick(max(values[0] * 2, LIMIT), 1.0)"),
    ("arguments", "found = pick(0.5, max(values[0] * 2, LIMIT))"),
    ("statement", "pass"),
    ("comparison", "return found if found < LIMIT else -found"),
}


def test_what_is_changed_and_what_is_left_alone() -> None:
    """Not the docstrings, the message and what is raised, the types, nor the order of what is compared by `max`."""
    found = set()
    for mutation in mutations_of("file.py", SOURCE):
        before, after = (text.splitlines() for text in (SOURCE, mutation.apply(SOURCE)))
        (line,) = (n for n, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        assert mutation.lines[0] <= line + 1 <= mutation.lines[1]
        assert mutation.place == ("first" if line > 4 else "")
        found.add((mutation.kind, after[line].strip()))
    assert found == CHANGED


def test_changes_of_equal_lines_have_keys_of_their_own_that_other_code_does_not_move() -> None:
    twice = "def f():\n    x += 1\n    x += 1\n"
    keys = [mutation.key for mutation in mutations_of("f.py", twice)]
    assert len(keys) == len(set(keys)) == 6
    assert [mutation.key for mutation in mutations_of("f.py", "def g():\n    return 3\n\n\n" + twice)][1:] == keys


def test_changes_of_the_core_can_be_parsed() -> None:
    for path in random.Random(0).sample(sorted((ROOT / mutants.CORE).rglob("*.py")), 12):
        source = path.read_text()
        found = mutations_of(str(path.relative_to(ROOT)), source)
        for mutation in random.Random(0).sample(found, min(5, len(found))):
            changed = mutation.apply(source)
            ast.parse(changed)
            assert changed != source
            # The head and a line; of arguments over several lines that are swapped, some stay where they are.
            assert 2 <= mutation.diff(source).count("\n+") <= mutation.text.count("\n") + 2


def test_what_counts_as_equivalent_is_there_and_has_a_reason() -> None:
    entries = json.loads(mutants.EQUIVALENT.read_text())
    for entry in entries:
        assert len(entry["reason"]) > 20, entry
    for file in {entry["key"].split("|")[0] for entry in entries}:
        there = {mutation.key for mutation in mutations_of(file, (ROOT / file).read_text())}
        assert {entry["key"] for entry in entries if entry["key"].startswith(f"{file}|")} <= there


def test_the_run_fails_where_too_little_is_noticed_or_nothing_was_run(capsys: pytest.CaptureFixture[str]) -> None:
    noticed, survives = ({"how": how, "key": f"{how}|f", "diff": "-a\n+b\n"} for how in ("noticed", "survives"))
    assert mutants.report([noticed] * 9 + [survives], 100) == 0
    assert "survives|f\n-a\n+b" in capsys.readouterr().out
    assert mutants.report([noticed] * 8 + [survives] * 2, 100) == 1
    assert mutants.report([], 0) == 1
    assert "0 of 0 changes are noticed" in capsys.readouterr().out


def test_the_tests_that_come_to_a_change_run_first_those_of_the_files_own_name() -> None:
    tests = {"f.py": {2: {"tests/test_other.py::a", "tests/test_f.py::slow", "tests/test_f.py::quick"}, 3: {""}}}
    durations = {"tests/test_other.py::a": 0.1, "tests/test_f.py::slow": 9.0, "tests/test_f.py::quick": 1.0}
    covered = mutants.Coverage(tests, durations)
    one, two = (m for m in mutations_of("f.py", "def f(a):\n    return a[1]\nB = 2\n") if m.kind == "number")
    order = [["tests/test_f.py::quick", "tests/test_f.py::slow"], ["tests/test_other.py::a"]]
    assert covered.of(one) == order
    assert covered.of(two) == order  # an import runs it, so all that come to the file
    assert mutants.Coverage({}, {}).of(one) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run_from_end_to_end(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "mutants.py"), "--count", "5", "--results", str(results)]
    files = ["--files", "shardwright/core/cluster/collectives.py", "--tests", "tests/core/test_collectives.py"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=ROOT, timeout=500)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(found) == 5, done.stderr
    share = sum(result["how"] != "survives" for result in found) / 5
    assert done.returncode == (0 if share >= mutants.NOTICED else 1)
    assert share >= 0.8, done.stdout
    assert all(result["tests"] for result in found)
