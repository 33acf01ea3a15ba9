"""The public names of the three packages that users import, with their arguments, as text.

python -m tests.packaging.public_api > tests/packaging/public_api.txt
"""

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

PACKAGES = ("shardwright", "shardwright.torch", "shardwright.jax")


def lines() -> Iterator[str]:
    """A line for every name, argument by argument."""
    for package in PACKAGES:
        module: ModuleType = importlib.import_module(package)
        for name in sorted(module.__all__):
            found = getattr(module, name)
            if found.__class__.__module__ == "typing" or not callable(found):
                yield f"{package}.{name}"
                continue
            yield f"{package}.{name}{_arguments(found)}"
            if inspect.isclass(found) and found.__module__.startswith("shardwright"):
                yield from _members(f"{package}.{name}", found)


def _members(name: str, cls: type) -> Iterator[str]:
    fields = getattr(cls, "__dataclass_fields__", {})
    for member in sorted(set(dir(cls)) | set(fields)):
        if member.startswith("_") or inspect.getattr_static(cls, member, None) in vars(Exception).values():
            continue
        owner = next((each for each in cls.__mro__ if member in vars(each)), cls)
        if not owner.__module__.startswith("shardwright"):
            continue
        held = inspect.getattr_static(cls, member, None)
        function = held.__func__ if isinstance(held, classmethod | staticmethod) else held
        yield f"{name}.{member}{_arguments(function) if inspect.isfunction(function) else ''}"


def _arguments(of: Any) -> str:
    """The arguments without their types, which Python's versions write in different ways."""
    try:
        given = inspect.signature(of).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown = [each.replace(annotation=inspect.Parameter.empty) for each in given if not each.name.startswith("_")]
    defaults = [
        each.replace(default=_Named(each.default)) if each.default is not inspect.Parameter.empty else each
        for each in shown
    ]
    return str(inspect.Signature(defaults))


class _Named:
    """A default that is shown without where it lies in memory."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __repr__(self) -> str:
        return getattr(self.value, "__qualname__", None) or repr(self.value)


if __name__ == "__main__":
    print("\n".join(lines()))
