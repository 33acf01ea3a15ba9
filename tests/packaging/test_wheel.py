"""The wheel, built from the sdist as an index would offer it, holds everything and imports."""

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str | Path, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it (what `build` does without further options)."""
    folder = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but the installed wheel."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    run("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel)
    return folder


def source_files(pattern: str) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / "shardwright").rglob(pattern)}


def test_the_wheel_holds_every_module_and_data_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = source_files("*.py") | source_files("*.toml") | source_files("py.typed")
    assert "shardwright/core/cluster/hardware/profiles/a100-80gb.toml" in expected
    assert expected <= names
    beside = [name for name in names if not name.startswith(("shardwright/", "shardwright-"))]
    assert beside == ["shardwright_compat.pth"]
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_sdist_can_run_its_own_checks(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "Makefile", "constraints.txt", "LICENSE", "CHANGELOG.md", "tests/conftest.py"} <= names


def test_every_module_of_the_wheel_imports(installed: Path) -> None:
    code = (
        "import importlib, pkgutil, shardwright\n"
        "print(shardwright.__file__)\n"
        "for module in pkgutil.walk_packages(shardwright.__path__, 'shardwright.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "        print(module.name)\n"
    )
    origin, *modules = run("-c", code, PYTHONPATH=str(installed)).splitlines()
    assert Path(origin).is_relative_to(installed)  # not the editable install of the tree
    sources = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in source_files("*.py")}
    assert set(modules) == {name for name in sources if not name.endswith("__main__")} - {"shardwright"}


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "shardwright").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]


def test_the_installed_wheel_reads_its_data_files(installed: Path) -> None:
    code = (
        "from shardwright.core.cluster.hardware import *; print(len([load_profile(name) for name in profile_names()]))"
    )
    assert int(run("-c", code, PYTHONPATH=str(installed))) == len(source_files("profiles/*.toml"))


def test_the_metadata_offers_the_extras_and_keeps_the_base_small(installed: Path) -> None:
    code = "from importlib.metadata import requires; print('\\n'.join(requires('shardwright')))"
    requirements = run("-c", code, PYTHONPATH=str(installed)).splitlines()
    base = {line.split(">")[0].strip() for line in requirements if "extra ==" not in line}
    needed = {
        "annotated-types",
        "numpy",
        "scipy",
        "networkx",
        "pydantic",
        "typer",
        "rich",
        "typing-extensions",
        "xxhash",
    }
    assert base == needed
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) == {"torch", "jax", "solver", "all", "dev"}


def test_the_command_is_installed(installed: Path) -> None:
    entry_points = next(installed.glob("shardwright-*.dist-info")) / "entry_points.txt"
    assert "shardwright = shardwright.cli:main" in entry_points.read_text()


def test_an_editable_install_is_visible_to_type_checkers(tmp_path: Path) -> None:
    """It must be a plain path in a .pth file, which type checkers follow; import hooks they do not."""
    code = f"import os, hatchling.build; os.chdir({str(ROOT)!r}); hatchling.build.build_editable({str(tmp_path)!r})"
    run("-c", code)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        links = {name: wheel.read(name).decode().strip() for name in wheel.namelist() if name.endswith(".pth")}
        begins = links.pop("shardwright_compat.pth")
        assert list(links.values()) == [str(ROOT)]
        assert begins.startswith("import os; ")


@pytest.mark.parametrize(("value", "finds"), [("1", True), ("0", False), ("", False), (None, False)])
def test_processes_begin_with_sagemakers_names_where_the_environment_asks(
    installed: Path, value: str | None, finds: bool
) -> None:
    """Of the processes that a script starts too. (`site` reads such files in the folders of packages alone.)"""
    begin = f"import site; site.addsitedir({str(installed)!r}); "
    code = begin + (
        "import importlib.util; print(importlib.util.find_spec('smdistributed') is not None, "
        "'shardwright' in __import__('sys').modules)"
    )
    variable = {} if value is None else {"SHARDWRIGHT_COMPAT": value}
    assert run("-c", code, **variable).split() == [str(finds), str(finds)]
