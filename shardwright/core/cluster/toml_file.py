"""Clusters and profiles written as TOML, with a constant and its origin on one line."""

import json
from pathlib import Path
from typing import Any

from shardwright.core.errors import ClusterError
from shardwright.core.values.text_files import write_text


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write ``contents`` as TOML, whole or not at all. Raises ClusterError when it cannot be written."""
    write_text(path, "\n".join(_toml_lines(contents, ())).lstrip("\n") + "\n", ClusterError)


def _toml_lines(table: dict[str, Any], path: tuple[str, ...]) -> list[str]:
    """``table`` as lines of TOML: plain keys first, as they must come before the sub-tables."""
    lines = [f"{key} = {toml_value(value)}" for key, value in table.items() if not _is_section(value)]
    for key, value in table.items():
        if isinstance(value, list):
            for entry in value:
                lines += ["", f"[[{'.'.join((*path, key))}]]", *_toml_lines(entry, (*path, key))]
        elif _is_section(value):
            lines += ["", f"[{'.'.join((*path, key))}]", *_toml_lines(value, (*path, key))]
    return lines


def _is_section(value: Any) -> bool:
    """Whether ``value`` needs a header of its own; a constant with its origin fits on its key's line."""
    return isinstance(value, list) or (isinstance(value, dict) and set(value) != {"value", "origin"})


def toml_value(value: Any) -> str:
    """A text, a number, a truth value or a constant with its origin, as TOML has it."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml_value(entry)}" for key, entry in value.items()) + " }"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float) and abs(value) >= 1e6 and float(f"{value:.6g}") == value:
        return f"{value:.6g}".replace("e+", "e")
    return json.dumps(value) if isinstance(value, bool) else repr(value)
