"""The hardware files' schema, and errors that name the file and the path inside it."""

import tomllib
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, create_model, model_validator

from shardwright.core.cluster.hardware.collective_table import CollectiveTable, MeasuredCollective
from shardwright.core.cluster.hardware.device import Device, Kind, MeasuredProduct, MeasuredUnit
from shardwright.core.cluster.hardware.link import Link, Sharing
from shardwright.core.cluster.hardware.plausible_units import faster_than_memory, implausible, inconsistent
from shardwright.core.errors import ClusterError, nearest
from shardwright.core.values.text_files import printable, read_text, require_short_keys

MOST_BYTES = 4 << 20
"""The largest size of a file of hardware: a profile with thousands of measurements has less."""

FORMAT = 1
"""The version of profile, link and cluster files that this version writes, and the newest that it reads."""

_SET_BY_USER = "user: set in code"
PLAIN_NUMBER = "user: given as a plain number"
"""The origin of a number that a file gives without one."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Constant(_Section):
    """A number and its origin; a plain number in a user's own file."""

    value: float
    origin: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _of_number(cls, given: object) -> object:
        if isinstance(given, int | float) and not isinstance(given, bool):
            return {"value": float(given), "origin": PLAIN_NUMBER}
        return given


def _number_or_constant(given: object) -> str:
    return "<constant>" if isinstance(given, dict) else "<number>"


Given = Annotated[
    Annotated[float, Tag("<number>")] | Annotated[Constant, Tag("<constant>")],
    Discriminator(_number_or_constant),
]
"""A number in a user's own file: with an origin, or plain."""


def _section_of(cls: type) -> type[_Section]:
    """The schema of a measured value: the fields of its class, with the ranges that their annotations give."""
    hints = get_type_hints(cls, include_extras=True)
    held = {each.name: (hints[each.name], ... if each.default is MISSING else each.default) for each in fields(cls)}
    return create_model(cls.__name__, __base__=_Section, **held)  # type: ignore[call-overload, no-any-return]


class LinkTable(_Section):
    """A link of the catalogue, with an origin for every constant."""

    summary: str = ""
    sharing: Sharing
    transport: str = ""
    bandwidth_bytes_per_s: Constant
    latency_s: Constant
    efficiency: Constant


class UserLinkTable(_Section):
    """A link written out in a cluster file."""

    name: str = "custom"
    sharing: Sharing = "device"
    transport: str = ""
    bandwidth_bytes_per_s: Given
    latency_s: Given
    efficiency: Given = 1.0
    collectives: list[_section_of(MeasuredCollective)] = []  # type: ignore[valid-type]


class DeviceTable(_Section):
    """A device, with an origin for every constant."""

    name: Annotated[str, Field(min_length=1)]
    kind: Kind
    summary: str = ""
    memory_bytes: Constant
    reserved_memory_bytes: Constant
    peak_flops_per_s: dict[str, Constant]
    memory_bandwidth_bytes_per_s: Constant
    kernel_launch_s: Constant
    matmul_efficiency: Constant
    memory_efficiency: Constant
    host_link_bandwidth_bytes_per_s: Constant
    compute_units: Constant | None = None
    tile_depth: Constant | None = None
    vector_efficiency: Constant | None = None
    dispatch_s: Constant | None = None
    attention_efficiency: Constant | None = None
    optimizer_efficiency: Constant | None = None
    host_memory_bytes: Constant | None = None
    price_usd_per_hour: Constant | None = None


class LinksFile(_Section):
    """The catalogue of links."""

    format: int
    links: dict[str, LinkTable]


class PresetTable(_Section):
    """A kind of node: its device and links by name."""

    summary: str
    origin: Annotated[str, Field(min_length=1)]
    device: str
    devices_per_node: Annotated[int, Field(ge=1)]
    intra_node: str
    inter_node: str


class PresetsFile(_Section):
    """The catalogue of nodes."""

    format: int
    presets: dict[str, PresetTable]


def _name_or_table(given: object) -> str:
    return "<table>" if isinstance(given, dict) else "<name>"


AnyDevice = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[DeviceTable, Tag("<table>")], Discriminator(_name_or_table)
]
AnyLink = Annotated[
    Annotated[str, Tag("<name>")] | Annotated[UserLinkTable, Tag("<table>")], Discriminator(_name_or_table)
]


class LinkNames(_Section):
    """The links that the device's usual node has: names in the catalogue, or written out where they were measured."""

    intra_node: AnyLink
    inter_node: AnyLink


class ProfileFile(DeviceTable):
    """A profile file: a device, its usual links, and what was measured on it, if anything was."""

    format: int
    links: LinkNames
    products: list[_section_of(MeasuredProduct)] = []  # type: ignore[valid-type]
    units: list[_section_of(MeasuredUnit)] = []  # type: ignore[valid-type]


class GroupTable(_Section):
    """Nodes of one kind in a cluster file."""

    device: AnyDevice
    nodes: Annotated[int, Field(ge=1)]
    devices_per_node: Annotated[int, Field(ge=1)]
    intra_node: AnyLink | None = None
    region: str = ""


class ClusterFile(_Section):
    """A cluster file: one kind of node, whose keys stand at the top, or several ``[[groups]]``."""

    format: int
    inter_node: AnyLink | None = None
    inter_region: AnyLink | None = None
    groups: Annotated[list[GroupTable], Field(min_length=1)]


SectionT = TypeVar("SectionT", bound=_Section)


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The document at ``path``. Raises ClusterError when there is none, or it is not TOML."""
    text = read_text(path, ClusterError, what, MOST_BYTES)
    require_short_keys(text, f"{path} is not a TOML {what}", ClusterError)
    try:
        document = tomllib.loads(text)
        _require_printable(document)
    except (ValueError, RecursionError) as error:
        said = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ClusterError(f"{path} is not a TOML {what}: {said}") from error
    return document


def _require_printable(document: dict[str, Any]) -> None:
    """Raise ValueError for a name or a text that a terminal would take for a command."""
    left: list[Any] = [document]
    while left:
        value = left.pop()
        if isinstance(value, str):
            printable(value)
        elif isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value


def parse(section: type[SectionT], document: object, source: str, *, assumed: tuple[str | int, ...] = ()) -> SectionT:
    """``document`` as a ``section``. Raises ClusterError that names ``source`` and the path of each fault inside it.

    ``assumed``: the start of the paths that the file itself does not have, because its keys were moved there.
    """
    newer = document.get("format") if isinstance(document, dict) else None
    if isinstance(newer, int) and newer > FORMAT:
        raise ClusterError(f"{source}: format {newer} is newer than this version reads ({FORMAT}); upgrade shardwright")
    if isinstance(newer, int) and newer < 1:
        raise ClusterError(f"{source}: there is no format {newer}; this version reads format {FORMAT}")
    try:
        return section.model_validate(document)
    except ValidationError as error:
        faults = [_fault(section, fault, assumed) for fault in error.errors(include_url=False)]
        raise ClusterError(f"{source}: " + "; ".join(faults)) from error


_OR_TABLE = "a name (`shardwright hardware` lists them) or a table of bandwidth_bytes_per_s, latency_s and efficiency"
_MISSING = {
    "links": f"; add [links] with intra_node and inter_node, each {_OR_TABLE}",
    "intra_node": f"; add the link between the devices of a node: {_OR_TABLE}",
    "inter_node": f"; add the link between nodes: {_OR_TABLE}",
    "bandwidth_bytes_per_s": "; add bandwidth_bytes_per_s = BYTES PER SECOND, in one direction (100 Gb/s are 12.5e9)",
    "latency_s": "; add latency_s = SECONDS (NVLink 3.4e-6, InfiniBand 14e-6, Ethernet 30e-6)",
}
"""What to add where one of these is missing."""


def _fault(section: type[BaseModel], fault: Any, assumed: tuple[str | int, ...]) -> str:
    location = [part for part in fault["loc"] if not (isinstance(part, str) and part.startswith("<"))]
    shown = location[len(assumed) :] if tuple(location[: len(assumed)]) == assumed else location
    path = ".".join(str(part) for part in shown) or "(top)"
    if fault["type"] == "extra_forbidden":
        return f"{path}: unknown key; {nearest(str(location[-1]), _keys_at(section, location[:-1]))}"
    wanted = '{ value = NUMBER, origin = "KIND: which one" }'
    if fault["type"] == "missing":
        field = section.model_fields.get(str(location[0])) if len(location) == 1 else None
        is_constant = field is not None and field.annotation is Constant
        hint = _MISSING.get(str(location[-1]), "")
        return f"{path}: missing; add {path} = {wanted}" if is_constant else f"{path}: missing{hint}"
    if fault["type"] == "model_type" and fault["ctx"]["class_name"] == Constant.__name__:
        return f"{path}: expected a number and where it comes from, {wanted}; given {fault['input']!r}"
    return f"{path}: {fault['msg']}; given {fault['input']!r}"


def _keys_at(section: type[BaseModel], location: list[str | int]) -> list[str]:
    """The keys that the schema knows at ``location``."""
    for part in location:
        field = section.model_fields.get(part) if isinstance(part, str) else None
        if field is not None:  # otherwise a key of a dict or an index of a list, already seen through
            inner = _inner_section(field.annotation)
            if inner is None:
                return []
            section = inner
    return list(section.model_fields)


def _inner_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType, list, dict):
        return next(filter(None, map(_inner_section, get_args(annotation))), None)
    return None


def to_profile(table: "ProfileFile", links: Mapping[str, Link | None], source: str) -> tuple[Device, dict[str, Link]]:
    """The device and the links of a profile's file; ``links``: those that it gives by name, in their places, and None
    where it writes one out. Raises ClusterError that names all numbers that cannot be, and the first other fault."""
    written = {place: getattr(table.links, place) for place, known in links.items() if known is None}
    said = device_faults(table)
    for place, link in written.items():
        said += [f"links.{place}: {fault}" for fault in link_faults(link.name, link)]
    if not said:
        bandwidth = table.memory_bandwidth_bytes_per_s.value
        for place, link in written.items():
            path = f"links.{place}.bandwidth_bytes_per_s"
            said += faster_than_memory(path, _number(link.bandwidth_bytes_per_s), bandwidth)
    _require_none(source, said)
    device = to_device(table, source)
    return device, {
        place: known or to_link(written[place].name, written[place], f"{source}: links.{place}")
        for place, known in links.items()
    }


def device_faults(table: DeviceTable) -> list[str]:
    """Why numbers of a device cannot be, each with its path."""
    constants, peaks = _constants(table), _peaks(table)
    said = [implausible(path, constant.value) for path, constant in (constants | peaks).items()]
    for place in ("products", "units"):
        for index, measured in enumerate(getattr(table, place, ())):
            said += [implausible(f"{place}.{index}.{name}", value) for name, value in measured]
    for name in _WHOLE:
        if name in constants and not constants[name].value.is_integer():
            of_bytes = " of bytes" if name.endswith("_bytes") else ""
            said.append(f"{name}: must be a whole number{of_bytes}; given {constants[name].value!r}")
    found = [fault for fault in said if fault is not None]
    if found:
        return found
    fastest: dict[str, float] = {}
    for product in getattr(table, "products", ()):
        fastest[product.precision] = max(product.flops_per_s, fastest.get(product.precision, 0.0))
    numbers = {name: constant.value for name, constant in constants.items()}
    return inconsistent(numbers, {precision: peak.value for precision, peak in table.peak_flops_per_s.items()}, fastest)


def link_faults(name: str, table: "LinkTable | UserLinkTable") -> list[str]:
    """Why numbers of a link cannot be, each with its path."""
    said = (implausible(f"{name}.{path}", _number(getattr(table, path))) for path in _LINK_CONSTANTS)
    return [fault for fault in said if fault is not None]


_WHOLE = ("memory_bytes", "reserved_memory_bytes", "host_memory_bytes", "compute_units")
_LINK_CONSTANTS = ("bandwidth_bytes_per_s", "latency_s", "efficiency")


def _constants(table: DeviceTable) -> dict[str, Constant]:
    return {name: value for name in DeviceTable.model_fields if isinstance(value := getattr(table, name), Constant)}


def _peaks(table: DeviceTable) -> dict[str, Constant]:
    return {f"peak_flops_per_s.{precision}": constant for precision, constant in table.peak_flops_per_s.items()}


def _number(given: float | Constant) -> float:
    return given.value if isinstance(given, Constant) else float(given)


def _require_none(source: str, faults: list[str]) -> None:
    """Raise ClusterError that names them all."""
    if faults:
        raise ClusterError(f"{source}: " + "; ".join(faults))


def to_device(table: DeviceTable, source: str) -> Device:
    """The device that ``table`` describes. Raises ClusterError that names the paths of the faults."""
    _require_none(source, device_faults(table))
    constants, peaks = _constants(table), _peaks(table)
    numbers: dict[str, Any] = {name: constant.value for name, constant in constants.items()}
    numbers |= {name: int(numbers[name]) for name in _WHOLE if name in numbers}
    try:
        return Device(
            name=table.name,
            kind=table.kind,
            summary=table.summary,
            peak_flops_per_s={precision: constant.value for precision, constant in table.peak_flops_per_s.items()},
            origins={path: constant.origin for path, constant in (constants | peaks).items()},
            measured_products=tuple(MeasuredProduct(**p.model_dump()) for p in getattr(table, "products", ())),
            measured_units=tuple(MeasuredUnit(**u.model_dump()) for u in getattr(table, "units", ())),
            **numbers,
        )
    except ClusterError as error:
        raise ClusterError(f"{source}: {error}") from error


def to_link(name: str, table: LinkTable | UserLinkTable, source: str) -> Link:
    """The link that ``table`` describes. Raises ClusterError that names the path of the fault."""
    _require_none(source, link_faults(name, table))
    numbers: dict[str, float] = {}
    origins: dict[str, str] = {}
    for path in _LINK_CONSTANTS:
        given: float | Constant = getattr(table, path)
        numbers[path] = _number(given)
        origins[path] = given.origin if isinstance(given, Constant) else f"user: {source}"
    try:
        measured = CollectiveTable(MeasuredCollective(**c.model_dump()) for c in getattr(table, "collectives", ()))
        return Link(
            name=name,
            sharing=table.sharing,
            transport=table.transport,
            measured=measured,
            origins=origins,
            **numbers,
        )
    except ClusterError as error:
        raise ClusterError(f"{source}: {error}") from error


def device_document(device: Device, known: Device | None = None) -> dict[str, Any]:
    """The inverse of ``to_device``: a document that a DeviceTable reads.

    A constant says that a user set it where it has no origin, or still the origin of ``known``, the device that this
    one was adapted from, but no longer its value.
    """
    document: dict[str, Any] = {"name": device.name, "kind": device.kind, "summary": device.summary}
    for name, field in DeviceTable.model_fields.items():
        value = getattr(device, name)
        if name == "peak_flops_per_s":
            peaks_before: Mapping[str, float] = known.peak_flops_per_s if known else {}
            document[name] = {
                key: _labelled(device, known, f"{name}.{key}", peak, peaks_before.get(key))
                for key, peak in value.items()
            }
        elif value is not None and _inner_section(field.annotation) is Constant:
            document[name] = _labelled(device, known, name, value, getattr(known, name, None))
    return document


def link_document(link: Link, known: Link | None = None) -> dict[str, Any]:
    """The inverse of ``to_link``: a document that a UserLinkTable reads; ``known`` as in ``device_document``."""
    document: dict[str, Any] = {"name": link.name, "sharing": link.sharing}
    if link.transport:
        document["transport"] = link.transport
    if link.measured:
        document["collectives"] = [asdict(each) for each in link.measured]
    for name in ("bandwidth_bytes_per_s", "latency_s", "efficiency"):
        document[name] = _labelled(link, known, name, getattr(link, name), getattr(known, name, None))
    return document


def _labelled(
    owner: Device | Link, known: Device | Link | None, path: str, value: float, before: float | None
) -> dict[str, Any]:
    origin = owner.origins.get(path, _SET_BY_USER)
    stale = known is not None and value != before and origin == known.origins.get(path)
    return {"value": value, "origin": _SET_BY_USER if stale else origin}
