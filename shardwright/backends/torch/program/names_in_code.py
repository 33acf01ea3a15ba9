"""The names in Python code: the globals that it reads, and the attributes that it asks objects for."""

import functools
import opcode
import sys
import sysconfig
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import shardwright

_GLOBAL_OPS = frozenset(
    opcode.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL") if name in opcode.opmap
)
_LOAD_GLOBAL = opcode.opmap["LOAD_GLOBAL"]
_LOAD_ATTRIBUTE = {opcode.opmap[name] for name in ("LOAD_ATTR", "LOAD_METHOD") if name in opcode.opmap}
_SHIFTED = sys.version_info >= (3, 12)
"""Whether the argument of LOAD_ATTR has a flag in its lowest bit, as that of LOAD_GLOBAL has."""
_TEXT_OPS = frozenset(
    opcode.opmap[name] for name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "BUILD_STRING") if name in opcode.opmap
)
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "attrgetter", "vars", "__dict__", "get", "asdict"})
"""Names beside which strings may be names of attributes."""


def _folder(path: str) -> str:
    return str(Path(path).resolve())


_TORCH = f"{_folder(torch.__path__[0])}/"
_LIBRARIES = (_TORCH, f"{_folder(np.__path__[0])}/", f"{_folder(shardwright.__path__[0])}/", "<frozen")
_STANDARD = tuple(f"{path}/" for path in {sysconfig.get_path("stdlib"), _folder(sysconfig.get_path("stdlib"))})
_PACKAGES = ("site-packages", "dist-packages")
_WITH_VALUES = (f"{_TORCH}nn/modules/", f"{_TORCH}optim/")
_MACHINERY = (f"{_TORCH}nn/modules/module.py", f"{_TORCH}nn/modules/container.py")


@functools.lru_cache(4096)
def is_library(filename: str) -> bool:
    """Whether code of this file keeps no values of the user's: torch, NumPy, the standard library, this package. The
    layers and the optimizers of torch do keep such values, in their attributes."""
    if filename.startswith(_WITH_VALUES):
        return filename in _MACHINERY
    if filename.startswith(_LIBRARIES):
        return True
    return filename.startswith(_STANDARD) and not any(name in filename for name in _PACKAGES)


def is_library_module(module: types.ModuleType) -> bool:
    """Whether a Python module keeps no values of the user's."""
    if module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    return file is None or is_library(file) or module.__name__.partition(".")[0] in sys.stdlib_module_names


@dataclass(frozen=True, slots=True)
class Names:
    """The names in one code object.

    Attributes:
        read: names of globals.
        attributes: names of attributes, as far as they are written out; ``loaded``: those that are not only set.
        beginnings: the possible beginnings of names of attributes that are put together.
        environment: whether it asks for variables of the process's environment.
    """

    read: tuple[str, ...]
    attributes: frozenset[str]
    loaded: frozenset[str]
    beginnings: tuple[str, ...]
    environment: bool


_known: dict[int, tuple[types.CodeType, Names]] = {}
"""The names by the id of a code object: hashing one hashes everything in it."""


def names_in(code: types.CodeType) -> Names:
    """The names in a code object, and in the functions inside it."""
    found = _known.get(id(code))
    if found is None:
        found = _known[id(code)] = code, _names_in(code)
    return found[1]


def _names_in(code: types.CodeType) -> Names:
    read: dict[str, None] = {}
    loaded: set[str] = set()
    extended, makes_text = 0, False
    for operation, given in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        argument = extended << 8 | given
        extended = argument if operation == opcode.EXTENDED_ARG else 0
        if operation in _GLOBAL_OPS:
            place = argument >> 1 if operation == _LOAD_GLOBAL else argument
            if place < len(code.co_names):
                read[code.co_names[place]] = None
        elif operation in _LOAD_ATTRIBUTE:
            loaded.add(code.co_names[argument >> 1 if _SHIFTED else argument])
        makes_text = makes_text or operation in _TEXT_OPS
    attributes, beginnings = set(code.co_names), set[str]()
    if not _BY_TEXT.isdisjoint(attributes):
        texts = set(_texts_in(code.co_consts))
        attributes |= {text for text in texts if text.isidentifier()}
        loaded |= attributes
        if makes_text:
            beginnings |= {text for text in texts if len(text) > 1 and text.isidentifier()}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            names = names_in(inner)
            read.update(dict.fromkeys(names.read))
            attributes |= names.attributes
            loaded |= names.loaded
            beginnings.update(names.beginnings)
    environment = not {"environ", "getenv"}.isdisjoint(attributes)
    return Names(tuple(read), frozenset(attributes), frozenset(loaded), tuple(sorted(beginnings)), environment)


def _texts_in(constants: tuple[object, ...] | frozenset[object]) -> list[str]:
    found: list[str] = []
    for item in constants:
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, (tuple, frozenset)):
            found += _texts_in(item)
    return found
