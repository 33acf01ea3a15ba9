"""`shardwright doctor`: what is installed, what it can use, what is missing and how to get it."""

import importlib
import json as json_format
import os
import platform
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from shardwright.commands.output import PlainConsole

EXTRAS = {
    "torch": ("torch",),
    "jax": ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint"),
    "solver": ("ortools",),
}
"""The packages that each extra brings. Only the frameworks among them are needed, and either one will do."""

OTHERS = {"transformers": "Hugging Face models, used by the demo and the examples"}

Status = Literal["ok", "missing", "too old", "broken"]


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package: its version if it is installed, the oldest that would do, the extra that brings it."""

    name: str
    status: Status
    version: str | None
    needs: str | None
    extra: str | None


@dataclass(frozen=True, slots=True)
class DeviceFound:
    """A device as a framework reports it. ``memory_bytes`` is None where the framework does not say."""

    framework: str
    platform: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Backend:
    """The state of a framework's side: whether it is usable, its transports and devices, and its trouble."""

    name: str
    usable: bool
    transports: tuple[str, ...] = ()
    devices: tuple[DeviceFound, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """Something that is missing, and the fix."""

    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings of the command."""

    shardwright: str
    python: str
    system: str
    cores: int
    memory_bytes: int | None
    packages: tuple[Package, ...]
    backends: tuple[Backend, ...]
    advice: tuple[Advice, ...] = field(default=())

    @property
    def usable(self) -> bool:
        """Whether at least one framework can be used."""
        return any(backend.usable for backend in self.backends)


def doctor_command(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    rules: Annotated[
        bool, typer.Option("--rules", help="Show the layout rules of every op of the example models instead.")
    ] = False,
) -> None:
    """Show versions, devices and backends, what is missing and how to get it; exit with 1 if no framework works."""
    if rules:
        from shardwright.commands.rules import (
            rules_command,
        )  # imports the layout rules, which doctor alone does not need

        rules_command(json)
        return
    with Console(stderr=True).status("Asking the frameworks for their devices …"):
        diagnosis = diagnose()
    if json:
        typer.echo(json_format.dumps(asdict(diagnosis) | {"usable": diagnosis.usable}, indent=2))
    else:
        _show(diagnosis, PlainConsole())
    if not diagnosis.usable:
        raise typer.Exit(1)


def diagnose() -> Diagnosis:
    """The findings about this machine. Imports the frameworks that are installed; one that cannot be imported is
    broken."""
    floors = _floors()
    packages = [_package(name, extra, floors) for extra, names in EXTRAS.items() for name in names]
    packages += [_package(name, None, floors) for name in OTHERS]
    backends = (_backend("torch", packages, _ask_torch), _backend("jax", packages, _ask_jax))
    failed = {backend.name for backend in backends if not backend.usable}
    packages = [replace(p, status="broken") if p.status == "ok" and p.name in failed else p for p in packages]
    return Diagnosis(
        shardwright=_version("shardwright") or "not installed, run from its source tree",
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=_cores(),
        memory_bytes=_memory_bytes(),
        packages=tuple(packages),
        backends=backends,
        advice=tuple(_advice(packages, backends)),
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _floors() -> dict[str, str]:
    """The oldest version of each package that Shardwright's own metadata admits."""
    try:
        requirements = metadata.requires("shardwright") or []
    except metadata.PackageNotFoundError:
        return {}
    found = (re.match(r"([A-Za-z0-9._-]+)[^;]*?>=\s*([0-9.]+)", requirement) for requirement in requirements)
    return {match[1].lower(): match[2] for match in found if match}


def _older(version: str, floor: str) -> bool:
    """Whether ``version`` is before ``floor``, by the numbers they begin with."""

    def numbers(text: str) -> list[int]:
        release = re.match(r"[0-9]+(\.[0-9]+)*", text)
        return [int(part) for part in release[0].split(".")] if release else []

    return numbers(version) < numbers(floor)


def _package(name: str, extra: str | None, floors: dict[str, str]) -> Package:
    version, floor = _version(name), floors.get(name)
    status: Status = "ok"
    if version is None:
        status = "missing"
    elif floor is not None and _older(version, floor):
        status = "too old"
    return Package(name, status, version, floor and f">={floor}", extra)


def _backend(name: str, packages: list[Package], ask: Callable[[], tuple[list[str], list[DeviceFound]]]) -> Backend:
    unfit = [package for package in packages if package.extra == name and package.status != "ok"]
    if unfit:
        return Backend(name, usable=False, trouble=", ".join(f"{p.name} is {p.status}" for p in unfit))
    try:
        transports, devices = ask()
    except Exception as error:  # a damaged installation can raise anything, and saying so is this command's work
        return Backend(name, usable=False, trouble=f"{type(error).__name__}: {error}")
    return Backend(name, usable=True, transports=tuple(transports), devices=tuple(devices))


def _ask_torch() -> tuple[list[str], list[DeviceFound]]:
    """The process-group libraries and the CUDA devices that torch has."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    memory: Any = importlib.import_module("shardwright.backends.torch.machine.process_memory")
    transports = []
    if distributed.is_available():
        transports = [name for name in ("gloo", "nccl", "mpi") if getattr(distributed, f"is_{name}_available")()]
        transports += ["peers' memory"] * memory.siblings_can_read()
    devices = []
    if torch.cuda.is_available():
        found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
        devices = [DeviceFound("torch", "cuda", each.name, each.total_memory) for each in found]
    return transports, devices


def _ask_jax() -> tuple[list[str], list[DeviceFound]]:
    """The platforms and the devices that JAX has."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # looking should not take three quarters of a GPU
    jax: Any = importlib.import_module("jax")
    devices = []
    for device in jax.devices():
        memory = (device.memory_stats() or {}).get("bytes_limit")
        devices.append(DeviceFound("jax", device.platform, device.device_kind, memory))
    return sorted({device.platform for device in devices}), devices


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _advice(packages: list[Package], backends: tuple[Backend, ...]) -> list[Advice]:
    advice = []
    for extra, names in EXTRAS.items():
        unfit = [package for package in packages if package.name in names and package.status in ("missing", "too old")]
        if unfit:
            what = ", ".join(f"{package.name} ({package.status})" for package in unfit)
            advice.append(Advice(what, f"pip install 'shardwright[{extra}]'"))
    for name, purpose in OTHERS.items():
        if any(package.name == name and package.status == "missing" for package in packages):
            advice.append(Advice(f"{name} ({purpose})", f"pip install {name}"))
    for backend in backends:
        if any(package.name == backend.name and package.status == "broken" for package in packages):
            advice.append(
                Advice(
                    f"{backend.name} is installed but fails: {backend.trouble}",
                    f"pip install --force-reinstall {backend.name}",
                )
            )
    gpu = Path("/proc/driver/nvidia/version").exists()
    for backend in backends:
        if gpu and backend.usable and not any(device.platform in ("cuda", "gpu") for device in backend.devices):
            fix = "pip install 'jax[cuda]'" if backend.name == "jax" else "install the CUDA build of torch"
            advice.append(Advice(f"this machine has an NVIDIA driver that {backend.name} does not use", fix))
    return advice


def _show(diagnosis: Diagnosis, console: Console) -> None:
    colours = {"ok": "green", "missing": "yellow", "too old": "yellow", "broken": "red"}
    packages = Table("package", "version", "needed", "status", title="Versions", title_justify="left")
    packages.add_row("shardwright", diagnosis.shardwright, "", "[green]ok[/]")
    packages.add_row("python", diagnosis.python, ">=3.11", "[green]ok[/]")
    for package in diagnosis.packages:
        colour = colours[package.status]
        packages.add_row(package.name, package.version or "", package.needs or "", f"[{colour}]{package.status}[/]")
    console.print(packages)

    backends = Table("backend", "usable", "over", "devices", title="Backends", title_justify="left")
    for backend in diagnosis.backends:
        state = "[green]yes[/]" if backend.usable else f"[yellow]no[/]: {escape(backend.trouble or '')}"
        backends.add_row(backend.name, state, ", ".join(backend.transports), escape(_devices(backend)))
    console.print(backends)

    memory = "" if diagnosis.memory_bytes is None else f", {diagnosis.memory_bytes / 2**30:.1f} GiB of memory"
    console.print(f"Host: {diagnosis.system}, {diagnosis.cores} CPU cores{memory}", highlight=False)
    if diagnosis.advice:
        advice = Table("missing", "how to get it", title="What is missing", title_justify="left")
        for entry in diagnosis.advice:
            advice.add_row(escape(entry.what), escape(entry.fix))
        console.print(advice)
    else:
        console.print("Nothing is missing.")


def _devices(backend: Backend) -> str:
    """The devices of a backend on one line, like ones together: ``8 × NVIDIA H100 (cuda, 79.1 GiB)``."""
    lines = []
    for device, count in Counter(backend.devices).items():
        memory = "" if device.memory_bytes is None else f", {device.memory_bytes / 2**30:.1f} GiB"
        lines.append(f"{count} × {device.name} ({device.platform}{memory})")
    return "\n".join(lines) or ("the CPU" if backend.usable else "")
