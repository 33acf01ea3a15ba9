"""Values of dataclasses as sections of a JSON file: the schema of a section, its values, and the values read back.

All three follow from the annotations of the class. A tuple is a list. A tuple of tuples that begin with text is an
object with these texts as its keys (and the rest of each tuple as its value). A layout is an object from mesh axis to
placement. A cluster is the object of its own file.
"""

from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, FailFast, create_model

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import LayoutError
from shardwright.core.layout.placements import Layout, Partial, Placement, Split
from shardwright.core.model.fold import CallRef
from shardwright.core.plan.plan_input import cluster_of
from shardwright.core.plan.program import AS_TEXT
from shardwright.core.values.fields import Amount, Choices, Count, Option, Text, Words

AS_LISTS = frozenset({CallRef})
"""The classes that are written as lists of their fields, because files have thousands of them."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PlacementSection(Section):
    """``{"split": dim}``, with the blocks that the dim is made of, or ``{"partial": reduction}``."""

    split: Amount | None = None
    blocks: list[Count] | None = None
    partial: Literal["sum", "max", "min", "mean"] | None = None


@cache
def section_of(cls: type) -> type[Section]:
    """The schema of a class's values: all of its fields, none left out."""
    held = {name: (_type(hint), ...) for name, hint in _hints(cls).items()}
    return create_model(cls.__name__, __base__=Section, **held)  # type: ignore[call-overload, no-any-return]


def to_section(value: Any, hint: Any = None) -> Any:
    """The JSON values of a value of this annotation; default: of its class."""
    if value is None:
        return None
    kind = _bare(type(value) if hint is None else hint)
    if kind is Layout:
        return {axis: _placement_out(placement) for axis, placement in value.placements}
    if kind is Cluster:
        return value.to_document()
    if kind in AS_TEXT:
        return str(value)
    if _has_fields(kind):
        own = {name: to_section(getattr(value, name), inner) for name, inner in _hints(kind).items()}
        return list(own.values()) if kind in AS_LISTS else own
    if not isinstance(value, tuple):
        return value
    if (rest := _keyed(kind)) is not None:
        return {key: to_section(more[0] if len(rest) == 1 else tuple(more), _joined(rest)) for key, *more in value}
    return [to_section(each, inner) for each, inner in zip(value, _entries(kind, len(value)), strict=True)]


def from_section(read: Any, hint: Any) -> Any:
    """The value of an annotation that a section holds. Raises the errors of the value's class."""
    if read is None:
        return None
    kind = _bare(hint)
    if kind is Layout:
        return Layout.of({axis: _placement_in(axis, placement) for axis, placement in read.items()})
    if kind is Cluster:
        return cluster_of(read)
    if kind in AS_TEXT:
        return AS_TEXT[kind](read)
    if _has_fields(kind):
        own = dict(zip(_hints(kind), read, strict=True)) if kind in AS_LISTS else None
        return kind(
            **{
                name: from_section(getattr(read, name) if own is None else own[name], inner)
                for name, inner in _hints(kind).items()
            }
        )
    if (rest := _keyed(kind)) is not None:
        return tuple(
            (key, from_section(held, _joined(rest))) if len(rest) == 1 else (key, *from_section(held, _joined(rest)))
            for key, held in read.items()
        )
    if isinstance(read, list | tuple):
        inner = _entries(kind, len(read))
        return tuple(from_section(each, of) for each, of in zip(read, inner, strict=True))
    return read


def _has_fields(kind: Any) -> bool:
    return is_dataclass(kind)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in fields(cls)}


def _type(hint: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = tuple(said for said in inner[1:] if not isinstance(said, Words | Choices | Option))
        return Annotated[(_type(inner[0]), *ranges)] if ranges else _type(inner[0])
    if origin in (Union, UnionType):
        return Union[tuple(_type(each) for each in inner)]  # noqa: UP007  # as many as there are
    if hint is Layout:
        return dict[Text, PlacementSection]
    if hint is Cluster:
        return dict[Text, Any]
    if hint is str or hint in AS_TEXT:
        return Text
    if _has_fields(hint):
        held = _hints(hint)
        return tuple[tuple(map(_type, held.values()))] if hint in AS_LISTS else section_of(hint)  # type: ignore[misc]
    if (rest := _keyed(hint)) is not None:
        return dict[Text, _type(_joined(rest))]  # type: ignore[misc]
    if origin is tuple and inner[1:] == (...,):
        return Annotated[list[_type(inner[0])], FailFast()]  # type: ignore[misc]  # a file may have millions of entries
    if origin is tuple:
        return tuple[tuple(map(_type, inner))]  # type: ignore[misc]
    return hint


def _bare(hint: Any) -> Any:
    """An annotation without its metadata, and without None."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, UnionType):
        kinds = [each for each in get_args(hint) if each is not NoneType]
        return _bare(kinds[0]) if len(kinds) == 1 else hint
    return hint


@cache
def _keyed(hint: Any) -> tuple[Any, ...] | None:
    """The types after the text in a tuple of tuples that begin with text, or None."""
    inner = get_args(hint)
    if get_origin(hint) is not tuple or inner[1:] != (...,) or get_origin(inner[0]) is not tuple:
        return None
    first, *rest = get_args(inner[0])
    return tuple(rest) if _bare(first) is str and rest and rest != [...] else None


def _joined(rest: tuple[Any, ...]) -> Any:
    return rest[0] if len(rest) == 1 else tuple[rest]  # type: ignore[valid-type]


def _entries(hint: Any, count: int) -> list[Any]:
    """The annotations of the entries of a tuple."""
    inner = get_args(hint)
    return [inner[0]] * count if inner[1:] == (...,) else list(inner)


def _placement_out(placement: Placement) -> dict[str, Any]:
    if isinstance(placement, Split):
        return {"split": placement.dim} | ({"blocks": list(placement.blocks)} if placement.blocks else {})
    return {"partial": placement.op} if isinstance(placement, Partial) else {}


def _placement_in(axis: str, read: PlacementSection) -> Placement:
    if read.split is not None:
        return Split(read.split, tuple(read.blocks or ()))
    if read.partial is not None:
        return Partial(read.partial)
    raise LayoutError(f"axis {axis!r}: expected split or partial")
