"""What importing the package loads, and what it says when a framework is not there; each in a fresh process."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "optax", "orbax", "transformers")
SLOW_TO_LOAD = ("networkx", "scipy")
"""What the functions that need it load: it takes longer than the whole package."""

BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("module", ["shardwright", "shardwright.core", "shardwright.backends", "shardwright.cli"])
def test_importing_loads_no_framework_and_nothing_slow(module: str) -> None:
    result = run(f"import sys, {module}; print(sorted(set({FRAMEWORKS + SLOW_TO_LOAD!r}) & set(sys.modules)))")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("side", "other"), [("torch", ("jax", "jaxlib", "flax", "optax")), ("jax", ("torch",))])
def test_each_side_works_without_the_other_framework(side: str, other: tuple[str, ...]) -> None:
    code = BLOCKED.format(blocked=other) + f"import shardwright, shardwright.{side}, shardwright.backends.{side}"
    result = run(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_missing_framework_is_named_with_its_extra(framework: str) -> None:
    code = BLOCKED.format(blocked=(framework,)) + (
        "from shardwright.core.errors import MissingFrameworkError\n"
        f"try:\n    import shardwright.{framework}\n"
        "except MissingFrameworkError as error:\n    print(error)\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert f"shardwright[{framework}]" in result.stdout
    assert "pip install" in result.stdout


def test_the_core_loads_where_no_framework_is_installed() -> None:
    code = BLOCKED.format(blocked=FRAMEWORKS) + (
        "import importlib, pkgutil, shardwright.core as core\n"
        "names = [m.name for m in pkgutil.walk_packages(core.__path__, 'shardwright.core.')]\n"
        "[importlib.import_module(name) for name in names]\n"
        "print(len(names))\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 10
