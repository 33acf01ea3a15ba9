"""Maps between the names of a model in PyTorch and those of its twin in JAX, and between the layouts of its weights.

A map is a list of relations, each one line: a name on either side, with the dims in brackets where they differ::

    "transformer.h.{layer}.mlp.c_fc.weight" = "h.{layer}.mlp.c_fc.kernel"
    "encoder.{layer}.query.weight[(head size), width]" = "layers.query.kernel[layer, width, head, size]"
    "h.{layer}.qkv.weight[d, (part out)]" = "h.{layer}.{part}.kernel[d, out]"

Both sides have the same axes: an axis is in braces where it is a part of the name, and in brackets where it is a dim,
or one of several that are one dim. So the second line stacks the layers of a scan and divides heads, and the third
divides a fused matrix. It reads both ways.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from shardwright.core.checkpoint.axis_boxes import Dims
from shardwright.core.errors import CheckpointError, nearest
from shardwright.core.values.text_files import path_of, read_text

Framework = Literal["torch", "jax"]
FAMILIES = "shardwright.core.checkpoint.name_maps"
"""The package whose TOML files are the maps that come with the library."""
_SIDE = re.compile(r"(?P<name>[^\[\]]+?)\s*(?:\[(?P<dims>[^\[\]]*)\])?")
_AXIS = r"[A-Za-z_][A-Za-z0-9_]*"
_IN_NAME = re.compile(r"\{(?P<axis>" + _AXIS + r")(?P<deep>\.\.\.)?\}")
_DIM = re.compile(rf"(?P<one>{_AXIS})|\((?P<group>\s*{_AXIS}(?:\s+{_AXIS})*\s*)\)|(?P<unit>1)")


@dataclass(frozen=True)
class Side:
    """The names of one framework in a relation, with ``{axis}`` where they differ, and the dims of the tensors."""

    name: str
    dims: Dims | None = None
    """None: those of the other side."""

    @cached_property
    def name_axes(self) -> tuple[str, ...]:
        """The axes that are parts of the name."""
        return tuple(found["axis"] for found in _IN_NAME.finditer(self.name))

    @property
    def dim_axes(self) -> tuple[str, ...]:
        """The axes that are dims."""
        return tuple(axis for group in self.dims or () for axis in group)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        text, at = "", 0
        for found in _IN_NAME.finditer(self.name):
            inner = r".+" if found["deep"] else r"[^./]+"
            text += re.escape(self.name[at : found.start()]) + f"(?P<{found['axis']}>{inner})"
            at = found.end()
        return re.compile(text + re.escape(self.name[at:]))

    def match(self, name: str) -> dict[str, str] | None:
        """The values of the axes in a name; None where it is none of these names."""
        found = self._pattern.fullmatch(name)
        return None if found is None else found.groupdict()

    def filled(self, values: Mapping[str, str]) -> str:
        """The name of these values of its axes."""
        return _IN_NAME.sub(lambda found: values[found["axis"]], self.name)

    def __str__(self) -> str:
        if self.dims is None:
            return self.name
        said = [group[0] if len(group) == 1 else f"({' '.join(group)})" if group else "1" for group in self.dims]
        return f"{self.name}[{', '.join(said)}]"


@dataclass(frozen=True)
class Relation:
    """Tensors in both frameworks that hold the same entries."""

    torch: Side
    jax: Side

    def __post_init__(self) -> None:
        """Raises CheckpointError where the sides have different axes."""
        if (self.torch.dims is None) != (self.jax.dims is None):
            raise CheckpointError(f"{self}: give the dims of both sides, or of none where they are the same")
        own, other = ({*side.name_axes, *side.dim_axes} for side in (self.torch, self.jax))
        if own != other:
            axis = sorted(own ^ other)[0]
            raise CheckpointError(f"{self}: axis {axis!r} is on one side alone: each belongs to a name or to the dims")
        for side in (self.torch, self.jax):
            axes = [*side.name_axes, *side.dim_axes]
            if len(axes) != len(set(axes)):
                raise CheckpointError(f"{side}: an axis is there twice")
        if self.torch.dims is None and set(self.torch.name_axes) != set(self.jax.name_axes):
            raise CheckpointError(f"{self}: an axis of a name is missing on the other side, which has no dims")

    def sides(self, to: Framework) -> tuple[Side, Side]:
        """The side that is read, and that which is wanted."""
        return (self.torch, self.jax) if to == "jax" else (self.jax, self.torch)

    def __str__(self) -> str:
        return f"{self.torch} = {self.jax}"


@dataclass(frozen=True)
class NameMap:
    """The relations of a model's tensors in PyTorch and in JAX. The first that fits a name counts."""

    relations: tuple[Relation, ...]
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For an axis that is a part of names, what it is called there, in order; those of others count from 0."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The sizes of axes that no shape tells."""
    torch_only: tuple[Side, ...] = ()
    """Names of tensors that the twin in JAX has not; they keep the values that they have."""
    jax_only: tuple[Side, ...] = ()
    source: str = "the map"
    """What errors call it."""

    @classmethod
    def of(cls, relations: Mapping[str, str], *, source: str = "the map", **more: Any) -> "NameMap":
        """A map of names in PyTorch to names in JAX, written as in the module's text. Raises CheckpointError for text
        that cannot be read so."""
        values = {axis: tuple(map(str, held)) for axis, held in more.pop("values", {}).items()}
        only = {key: tuple(side_of(name) for name in more.pop(key, ())) for key in ("torch_only", "jax_only")}
        sizes = more.pop("sizes", {})
        if more:
            raise CheckpointError(f"{source}: {nearest(next(iter(more)), KEYS)}")
        if bad := [axis for axis, size in sizes.items() if type(size) is not int or size < 1]:
            raise CheckpointError(f"{source}: the size of {bad[0]!r} is {sizes[bad[0]]!r}: expected a number above 0")
        made = tuple(Relation(side_of(torch), side_of(jax)) for torch, jax in relations.items())
        axes = {axis for one in made for axis in (*one.torch.name_axes, *one.torch.dim_axes)}
        for axis in [*values, *sizes]:
            if axis not in axes:
                raise CheckpointError(f"{source}: no relation has an axis {axis!r}: {nearest(axis, axes)}")
        return cls(made, values, dict(sizes), only["torch_only"], only["jax_only"], source)

    @classmethod
    def load(cls, path: str | Path) -> "NameMap":
        """The map in a TOML file: a table ``relations`` of names in PyTorch to names in JAX; ``values`` and ``sizes``
        of axes, and the lists ``torch_only`` and ``jax_only``. Raises CheckpointError where the file is none."""
        found = path_of(path, CheckpointError)
        return cls._read(read_text(found, CheckpointError, "map of names"), str(found))

    @classmethod
    def family(cls, name: str) -> "NameMap":
        """A map that comes with the library. Raises CheckpointError for another name; the nearest is named."""
        if name not in families():
            raise CheckpointError(
                f"names={name!r}: expected a map, the path of its TOML file, or a family: {nearest(name, families())}"
            )
        return cls._read((files(FAMILIES) / f"{name}.toml").read_text(encoding="utf-8"), f"the map of {name}")

    @classmethod
    def of_any(cls, given: "NameMap | str | Path | Mapping[str, str]") -> "NameMap":
        """A map, whatever way it is given: itself, a family's name, a TOML file, or relations."""
        if isinstance(given, NameMap):
            return given
        if isinstance(given, Mapping):
            return cls.of(given)
        is_file = isinstance(given, Path) or (isinstance(given, str) and given.endswith(".toml"))
        return cls.load(given) if is_file else cls.family(str(given))

    @classmethod
    def _read(cls, text: str, source: str) -> "NameMap":
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as failed:
            raise CheckpointError(f"{source}: no TOML: {failed}") from failed
        for key, value in document.items():
            kind = list if key.endswith("_only") else dict
            if key not in KEYS or not isinstance(value, kind):
                raise CheckpointError(f"{source}: {key!r}: expected {', '.join(KEYS)}")
        relations = document.pop("relations", {})
        if not relations or not all(isinstance(name, str) for name in relations.values()):
            raise CheckpointError(f"{source}: expected a table 'relations' of names in PyTorch = names in JAX")
        return cls.of(relations, source=source, **document)

    def relation(self, name: str, framework: Framework) -> tuple[Relation, dict[str, str]] | None:
        """The first relation that has a name on a framework's side, and the values of the axes in it."""
        for relation in self.relations:
            side = relation.torch if framework == "torch" else relation.jax
            values = side.match(name)
            if values is not None and all(v in self.values.get(axis, (v,)) for axis, v in values.items()):
                return relation, values
        return None

    def is_only(self, name: str, framework: Framework) -> bool:
        """Whether a name is one of those that the other framework's model has not."""
        sides = self.torch_only if framework == "torch" else self.jax_only
        return any(side.match(name) is not None for side in sides)

    def value(self, axis: str, index: int) -> str:
        """What an index of an axis is called in names."""
        return self.values[axis][index] if axis in self.values else str(index)

    def index(self, axis: str, value: str) -> int:
        """The index of what an axis is called in a name. Raises CheckpointError where that is no number."""
        if axis in self.values:
            return self.values[axis].index(value)
        if not value.isdecimal():
            raise CheckpointError(f"{self.source}: axis {axis!r} is {value!r} in a name: expected a number, or values")
        return int(value)


KEYS = ("relations", "values", "sizes", "torch_only", "jax_only")
"""The keys of a map's file."""


def families() -> list[str]:
    """The names of the maps that come with the library."""
    return sorted(file.name.removesuffix(".toml") for file in files(FAMILIES).iterdir() if file.name.endswith(".toml"))


def side_of(text: str) -> Side:
    """One side of a relation in its text form. Raises CheckpointError where the text is none."""
    found = _SIDE.fullmatch(text.strip())
    if found is None or "{" in _IN_NAME.sub("", found["name"]):
        raise CheckpointError(f"{text!r}: expected a name, with {{axis}} where it varies, and its dims as [a, (b c)]")
    if found["dims"] is None:
        return Side(found["name"])
    return Side(found["name"], tuple(_dims_of(found["dims"], text)))


def _dims_of(text: str, whole: str) -> Iterator[tuple[str, ...]]:
    for part in text.split(",") if text.strip() else ():
        found = _DIM.fullmatch(part.strip())
        if found is None:
            raise CheckpointError(f"{whole!r}: {part.strip()!r} is no dim: expected an axis, (several axes) or 1")
        yield () if found["unit"] else (found["one"],) if found["one"] else tuple(found["group"].split())
