"""`shardwright doctor` on this machine, and on machines where something is missing."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from shardwright.cli import app
from shardwright.commands import doctor

RUNNER = CliRunner()


def run(*arguments: str) -> Result:
    alone = typer.Typer()
    alone.command()(doctor.doctor_command)
    return RUNNER.invoke(alone, arguments)


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Make packages look as if they were not installed."""
    true_version = metadata.version

    def version(name: str) -> str:
        if name in names:
            raise metadata.PackageNotFoundError(name)
        return true_version(name)

    monkeypatch.setattr(metadata, "version", version)


def test_json_names_versions_devices_and_backends() -> None:
    result = run("--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    packages = {package["name"]: package for package in found["packages"]}
    for name in ("torch", "jax", "flax", "optax", "transformers"):
        assert packages[name]["status"] == "ok"
        assert packages[name]["version"] == metadata.version(name)
    backends = {backend["name"]: backend for backend in found["backends"]}
    assert "gloo" in backends["torch"]["transports"]
    assert backends["jax"]["devices"]
    assert found["usable"] is True
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28


def test_the_command_line_has_it() -> None:
    result = RUNNER.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["usable"] is True


def test_the_table_is_for_people() -> None:
    result = run()
    assert result.exit_code == 0
    for word in ("Versions", "Backends", "torch", "gloo", metadata.version("jax")):
        assert word in result.stdout


def test_a_missing_framework_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "flax", "optax")
    result = run("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0  # torch is still there
    backend = next(backend for backend in found["backends"] if backend["name"] == "jax")
    assert backend["usable"] is False
    assert backend["trouble"] == "flax is missing, optax is missing"
    assert {"what": "flax (missing), optax (missing)", "fix": "pip install 'shardwright[jax]'"} in found["advice"]


def test_no_framework_at_all_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "torch", "jax")
    result = run()
    assert result.exit_code == 1
    assert "shardwright[torch]" in result.stdout
    assert "shardwright[jax]" in result.stdout


def test_a_framework_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ['torch>=99.1; extra == "torch"', "numpy>=1.26"])
    found = json.loads(run("--json").stdout)
    package = next(package for package in found["packages"] if package["name"] == "torch")
    assert (package["status"], package["needs"]) == ("too old", ">=99.1")
    assert {"what": "torch (too old)", "fix": "pip install 'shardwright[torch]'"} in found["advice"]


def test_a_framework_that_fails_to_import_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr(doctor, "_ask_torch", fail)
    found = json.loads(run("--json").stdout)
    assert next(p for p in found["packages"] if p["name"] == "torch")["status"] == "broken"
    assert any("libtorch_cpu.so" in entry["what"] for entry in found["advice"])


@pytest.mark.parametrize(
    ("version", "floor", "older"),
    [
        ("2.6", "2.6", False),
        ("2.6.0+cpu", "2.6", False),
        ("2.5.1", "2.6", True),
        ("2.13.0", "2.6", False),
        ("2.7.0a0+git1", "2.6", False),
        ("0.10.2", "0.4.38", False),
    ],
)
def test_versions_compare_by_number(version: str, floor: str, older: bool) -> None:
    assert doctor._older(version, floor) is older


def test_the_module_itself_imports_no_framework() -> None:
    code = "import sys, shardwright.commands.doctor; sys.exit(bool({'torch', 'jax'} & set(sys.modules)))"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False).returncode == 0


@pytest.mark.gpu
def test_cuda_devices_are_listed_with_their_memory() -> None:
    found = json.loads(run("--json").stdout)
    devices = next(backend for backend in found["backends"] if backend["name"] == "torch")["devices"]
    assert devices
    assert all(device["platform"] == "cuda" and device["memory_bytes"] > 2**30 for device in devices)
