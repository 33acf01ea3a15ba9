"""The cluster file: TOML, one kind of node at the top level, or several as ``[[groups]]``."""

from collections.abc import Sequence
from typing import Any

from shardwright.core.cluster.hardware import (
    Device,
    Link,
    link_names,
    load_device,
    load_link,
    profile_fields,
    profile_names,
)
from shardwright.core.cluster.node_group import NodeGroup
from shardwright.core.errors import ClusterError

_GROUP_KEYS = tuple(profile_fields.GroupTable.model_fields)


def parse(document: dict[str, Any], source: str) -> profile_fields.ClusterFile:
    """The tables of ``document``, checked by the schema. Raises ClusterError that names the path of each fault."""
    at_top = [key for key in document if key in _GROUP_KEYS]
    if "groups" in document and at_top:
        raise ClusterError(f"{source}: {at_top[0]} stands at the top beside groups; move it into one of them")
    if "groups" not in document:
        document = {key: value for key, value in document.items() if key not in _GROUP_KEYS} | {
            "groups": [{key: document[key] for key in at_top}]
        }
        assumed: tuple[str | int, ...] = ("groups", 0)
    else:
        assumed = ()
    return profile_fields.parse(profile_fields.ClusterFile, document, source, assumed=assumed)


def device_of(given: "str | profile_fields.DeviceTable", source: str) -> str | Device:
    """The device that a file names or writes out: the name, where the catalogue knows it."""
    return given if isinstance(given, str) else profile_fields.to_device(given, source)


def document(groups: Sequence[NodeGroup], inter_node: Link | None, inter_region: Link | None) -> dict[str, Any]:
    """The document that ``parse`` reads: names where the catalogue has just that value, tables elsewhere."""
    tables = [
        {
            "device": _device_entry(group.device),
            "nodes": group.nodes,
            "devices_per_node": group.devices_per_node,
            "intra_node": _link_entry(group.intra_node),
        }
        | ({"region": group.region} if group.region else {})
        for group in groups
    ]
    links = {"inter_node": inter_node, "inter_region": inter_region}
    between = {name: _link_entry(link) for name, link in links.items() if link is not None}
    inside: dict[str, Any] = tables[0] if len(tables) == 1 else {"groups": tables}
    return {"format": profile_fields.FORMAT} | inside | between


def link_of(given: "str | profile_fields.UserLinkTable | None", source: str) -> str | Link | None:
    """The link that a file names or writes out, if it has any."""
    return (
        profile_fields.to_link(given.name, given, source) if isinstance(given, profile_fields.UserLinkTable) else given
    )


def _device_entry(device: Device) -> str | dict[str, Any]:
    known = load_device(device.name) if device.name in profile_names() else None
    return device.name if device == known else profile_fields.device_document(device, known)


def _link_entry(link: Link) -> str | dict[str, Any]:
    known = load_link(link.name) if link.name in link_names() else None
    return link.name if link == known else profile_fields.link_document(link, known)
