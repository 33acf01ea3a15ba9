"""Straight-line Python for the ops of a unit: no interpreter between them, nothing kept longer than it is read."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Var:
    """A value of the function under construction."""

    name: str


@dataclass(slots=True)
class _Line:
    made: Var
    text: str
    reads: tuple[Var, ...]
    is_kept: bool


@dataclass(slots=True)
class Source:
    """A function built call by call."""

    inputs: list[Var] = field(default_factory=list)
    lines: list[_Line] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    """The names that the text refers to: functions, and arguments that are no values."""
    _count: "itertools.count[int]" = field(default_factory=itertools.count)
    _known: dict[int, str] = field(default_factory=dict)

    def input(self) -> Var:
        """A new argument of the function."""
        self.inputs.append(Var(f"v{next(self._count)}"))
        return self.inputs[-1]

    def call(self, function: Callable[..., Any], *args: Any, is_kept: bool = False, **kwargs: Any) -> Var:
        """The result of a call. ``is_kept``: the call is made even if nothing reads its result."""
        reads: list[Var] = []
        given = [self._text(a, reads) for a in args]
        given += [f"{k}={self._text(v, reads)}" for k, v in kwargs.items()]
        return self._line(f"{self._name(function)}({', '.join(given)})", reads, is_kept)

    def constant(self, value: Any) -> Var:
        """A value that is the same in every call."""
        return self._line(self._name(value), [], False)

    def item(self, value: Var, index: int) -> Var:
        """One element of a sequence."""
        return self._line(f"{value.name}[{index}]", [value], False)

    def build(self, name: str, outputs: Sequence[Var]) -> Callable[..., tuple[Any, ...]]:
        """The function of the inputs that returns the outputs."""
        text = self.text(name, outputs)
        scope = dict(self.names)
        exec(compile(text, f"<replay of {name}>", "exec"), scope)
        built: Callable[..., tuple[Any, ...]] = scope[_identifier(name)]
        return built

    def text(self, name: str, outputs: Sequence[Var]) -> str:
        """The function as Python."""
        live = self._live(outputs)
        last: dict[Var, int] = {}
        for i, line in enumerate(live):
            last[line.made] = i
            last.update(dict.fromkeys(line.reads, i))
        kept = set(outputs)
        body = []
        for i, line in enumerate(live):
            gone = sorted({v.name for v in (*line.reads, line.made) if last[v] == i and v not in kept})
            body.append(f"    {line.made.name} = {line.text}" + (f"; {' = '.join(gone)} = None" if gone else ""))
        body.append(f"    return ({''.join(f'{v.name}, ' for v in outputs)})")
        return f"def {_identifier(name)}({', '.join(v.name for v in self.inputs)}):\n" + "\n".join(body)

    def _live(self, outputs: Sequence[Var]) -> list[_Line]:
        wanted = set(outputs)
        found = []
        for line in reversed(self.lines):
            if line.is_kept or line.made in wanted:
                found.append(line)
                wanted.update(line.reads)
        return found[::-1]

    def _line(self, text: str, reads: Sequence[Var], is_kept: bool) -> Var:
        made = Var(f"v{next(self._count)}")
        self.lines.append(_Line(made, text, tuple(reads), is_kept))
        return made

    def _text(self, value: Any, reads: list[Var]) -> str:
        if isinstance(value, Var):
            reads.append(value)
            return value.name
        if type(value) is list:
            return f"[{', '.join(self._text(v, reads) for v in value)}]"
        if value is None or type(value) in (bool, int):
            return repr(value)
        return self._name(value)

    def _name(self, value: Any) -> str:
        if id(value) not in self._known:
            name = f"c{len(self._known)}"
            self._known[id(value)] = name
            self.names[name] = value
        return self._known[id(value)]


def _identifier(name: str) -> str:
    return "unit_" + "".join(c if c.isalnum() and c.isascii() else "_" for c in name)
