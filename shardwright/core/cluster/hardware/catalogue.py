"""The catalogue of known hardware: the data files beside this module, and profiles that users keep elsewhere."""

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from shardwright.core.cluster.hardware import check, profile_fields
from shardwright.core.cluster.hardware.device import Device, Profile
from shardwright.core.cluster.hardware.link import Link
from shardwright.core.errors import ClusterError, nearest

_FOLDER = files("shardwright.core.cluster.hardware")


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that come with the package, sorted."""
    entries = (entry.name for entry in (_FOLDER / "profiles").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in entries if name.endswith(".toml")))


def link_names() -> tuple[str, ...]:
    """The names of the links that come with the package, sorted."""
    return tuple(sorted(_links()))


def load_profile(name: str | Path) -> Profile:
    """The profile called ``name``, or the one in the file at ``name`` when it is a path or ends in ``.toml``.

    Raises ClusterError when there is no such profile (with the nearest name), or the file is not valid (with the path
    inside it).
    """
    if not isinstance(name, str | Path):
        raise ClusterError(f"hardware is the name of a profile, the path of a profile file or a Device; given {name!r}")
    if isinstance(name, Path) or name.endswith(".toml"):
        return profile_of(profile_fields.read_toml(Path(name), "hardware profile"), str(name))
    return _known_profile(name)


def load_device(name: str | Path) -> Device:
    """The device of ``load_profile(name)``."""
    return load_profile(name).device


def load_link(name: str) -> Link:
    """The link called ``name``. Raises ClusterError when there is none (with the nearest name)."""
    if not isinstance(name, str):
        raise ClusterError(f"a link is the name of a known one, or a Link with bandwidth and latency; given {name!r}")
    if name not in _links():
        raise ClusterError(f"link {name!r} is not known; {nearest(name, _links())}")
    return _links()[name]


def preset_names() -> tuple[str, ...]:
    """The names of the kinds of node that come with the package, sorted."""
    return tuple(sorted(_presets()))


def load_preset(name: str) -> profile_fields.PresetTable:
    """The kind of node called ``name``. Raises ClusterError when there is none (with the nearest name)."""
    if not isinstance(name, str) or name not in _presets():
        raise ClusterError(f"preset {name!r} is not known; {nearest(str(name), _presets())}")
    return _presets()[name]


@cache
def _presets() -> dict[str, profile_fields.PresetTable]:
    table = profile_fields.parse(profile_fields.PresetsFile, _read("presets.toml"), "presets.toml")
    for name, preset in table.presets.items():
        check.origins(f"preset {name!r}", {"preset": preset.origin})
    return table.presets


@cache
def _known_profile(name: str) -> Profile:
    known = profile_names()
    if name not in known:
        if name in _presets():
            raise ClusterError(f"{name!r} is a kind of node, not of hardware: write Cluster.preset({name!r}, nodes=…)")
        raise ClusterError(f"hardware {name!r} is not known; {nearest(name, known)}")
    return profile_of(_read(f"profiles/{name}.toml"), f"profiles/{name}.toml")


def profile_of(document: dict[str, Any], source: str) -> Profile:
    """The profile in a document, as a profile file holds it. Raises ClusterError that names ``source`` and the path of
    each fault inside it."""
    table = profile_fields.parse(profile_fields.ProfileFile, document, source)
    links: dict[str, Link | None] = {}
    for place in ("intra_node", "inter_node"):
        given = getattr(table.links, place)
        try:
            links[place] = load_link(given) if isinstance(given, str) else None
        except ClusterError as error:
            raise ClusterError(f"{source}: links: {error}") from None
    device, found = profile_fields.to_profile(table, links, source)
    return Profile(device=device, **found)


@cache
def _links() -> dict[str, Link]:
    table = profile_fields.parse(profile_fields.LinksFile, _read("links.toml"), "links.toml")
    return {name: profile_fields.to_link(name, link, "links.toml") for name, link in table.links.items()}


def _read(path: str) -> dict[str, Any]:
    return tomllib.loads((_FOLDER / path).read_text(encoding="utf-8"))
