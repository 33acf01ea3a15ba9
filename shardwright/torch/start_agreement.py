"""The values that the ranks of a run compare when it starts, before there are process groups."""

import platform
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import shardwright
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.core.layout.mesh import Mesh
from shardwright.core.plan.file import to_document
from shardwright.core.plan.plan import Plan
from shardwright.core.schedule import Schedule
from shardwright.torch.config import Config

_OWN_ON_EACH_RANK = frozenset({"wait_timeout_s"})
"""Keys of the configuration that may differ between ranks."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def said_at_start(config: Config, plan: Plan | None, mesh: Mesh, device: torch.device) -> dict[str, str]:
    """The values, in words and by name, that must be the same on all ranks before there are process groups."""
    python = ".".join(platform.python_version_tuple()[:2])
    said = {
        "the mesh": " × ".join(f"{name} {size}" for name, size in zip(mesh.names, mesh.sizes, strict=True)),
        "the plan": "given" if plan is not None else "not given",
        "the kind of device": device.type,
        "the version of shardwright": _own_version(),
        "the version of torch": torch.__version__,
        "the version of Python": python,
    }
    for entry in fields(config):
        if entry.name not in _OWN_ON_EACH_RANK:
            said[entry.name] = _text_of(getattr(config, entry.name))
    if plan is not None:
        document = to_document(plan)
        said |= {f"{name} of the plan": _text_of(value) for name, value in document["decision"].items()}
        said["the schedule of the plan"] = plan.build_schedule().digest[:12]
        said["the model of the plan"] = f"{plan.model_name} ({plan.model.digest})"
        said |= {f"the tensor layouts of the plan in {name}": program.digest for name, program in plan.programs}
        said["the units of the plan"] = f"{digest_of(document['bindings']) & 0xFFFFFFFF:08x}"
    return said


@cache  # a process runs the code that it has loaded, and may begin hundreds of sessions
def _own_version() -> str:
    """The version of this package, and a digest of its code: two checkouts may have one version."""
    folder = Path(shardwright.__file__).parent
    code = digest_of(*(path.read_bytes() for path in sorted(folder.rglob("*.py"))))
    return f"{version('shardwright')} (code {code & 0xFFFFFFFF:08x})"


def _text_of(value: Any) -> str:
    if isinstance(value, Schedule):
        return f"{value.name} ({value.digest[:12]})"
    if isinstance(value, Mapping):
        return str({key: value[key] for key in sorted(value, key=str)})
    return _ADDRESS.sub("", repr(value))
