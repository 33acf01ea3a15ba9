"""The small errors that `mutants.py` puts into a source file, one at a time.

Comparisons, arithmetic, numbers, truth values and conditions are changed, statements are left out, the first two
arguments of a call change places. Docstrings, messages, annotations and what is raised are left as they are: a test of
those would repeat them.
"""

import ast
import difflib
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

COMPARISONS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
}  # fmt: skip
ARITHMETIC = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitOr: ("|", "&"), ast.BitAnd: ("&", "|"),
}  # fmt: skip
BOOLEAN = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
OF_TYPES = ("Literal", "TypeVar", "TypeAlias", "cast", "overload", "isinstance")
"""What stands in calls and subscripts of these names says something of types."""
COMMUTATIVE = ("min", "max", "minimum", "maximum", "gcd", "isclose", "add", "multiply")
"""Calls of these names have arguments that may change places."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of a file.

    Attributes:
        file: the path in the repository.
        lines: the first and the last line of the statement or expression that changes, from 1.
        start, end: bytes of the source that ``text`` stands for.
        kind: comparison, arithmetic, number, truth value, condition, statement, arguments.
        place: names of the classes and functions around it.
        before: the line, or the first of them, without its indent.
        which: how many like it, of one kind and in equal lines of one function, come before.
    """

    file: str
    lines: tuple[int, int]
    start: int
    end: int
    text: str
    kind: str
    place: str
    before: str
    which: int = 0

    @property
    def key(self) -> str:
        """What stays as it is when other code changes: a sample that is drawn by it stays, too."""
        return "|".join((self.file, self.place, self.kind, self.before, self.text, str(self.which)))

    def rank(self, seed: int) -> str:
        """Its place in a random order."""
        return hashlib.sha256(f"{seed}|{self.key}".encode()).hexdigest()

    def apply(self, source: str) -> str:
        raw = source.encode()
        return (raw[: self.start] + self.text.encode() + raw[self.end :]).decode()

    def diff(self, source: str) -> str:
        pair = (text.splitlines(keepends=True) for text in (source, self.apply(source)))
        return "".join(difflib.unified_diff(*pair, self.file, self.file, n=2))


def mutations_of(file: str, source: str) -> list[Mutation]:
    """All changes of a file, in the order of its text. Each gives a file that Python can parse."""
    found: list[Mutation] = []
    seen: dict[str, int] = {}
    for one in sorted(_Finder(file, source).run(), key=lambda m: (m.start, m.end, m.text)):
        count = seen[one.key] = seen.get(one.key, -1) + 1
        found.append(Mutation(*(getattr(one, name) for name in Mutation.__slots__[:-1]), which=count))
    return found


class _Finder:
    def __init__(self, file: str, source: str) -> None:
        self.file, self.source = file, source.encode()
        self.tree = ast.parse(source)
        self.rows = source.splitlines()
        self.offsets = [0]
        for line in source.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line.encode()))

    def run(self) -> Iterator[Mutation]:
        yield from self._walk(self.tree, ())

    def _walk(self, node: ast.AST, place: tuple[str, ...]) -> Iterator[Mutation]:
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)) or _is_of_types(node):
            return
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            place = (*place, node.name)
        for kind, start, end, text, of in self._at(node):
            row = self.rows[of.lineno - 1].strip()
            lines = (of.lineno, of.end_lineno or of.lineno)
            yield Mutation(self.file, lines, start, end, text, kind, ".".join(place), row)
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return  # of a zip: it says what is so
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not _is_docstring(child):
                    yield from self._walk(child, place)

    def _at(self, node: Any) -> Iterator[tuple[str, int, int, str, Any]]:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right, table, op = node.left, node.comparators[0], COMPARISONS, type(node.ops[0])
            yield from self._between(left, right, table[op], "comparison", node)
        elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
            yield from self._between(node.left, node.right, ARITHMETIC[type(node.op)], "arithmetic", node)
        elif isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC and not _is_text(node):
            old, new = ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, (f"{old}=", f"{new}="), "arithmetic", node)
        elif isinstance(node, ast.BoolOp):
            yield from self._between(node.values[0], node.values[1], BOOLEAN[type(node.op)], "condition", node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "condition", self._start(node), self._start(node) + len("not"), "", node
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            kind = "truth value" if type(node.value) is bool else "number"
            yield kind, self._start(node), self._end(node), _other(node.value), node
        elif isinstance(node, (ast.If, ast.IfExp)) and not isinstance(
            node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)
        ):
            yield (
                "condition",
                self._start(node.test),
                self._end(node.test),
                f"(not ({self._text(node.test)}))",
                node.test,
            )
        elif isinstance(node, ast.Call) and _has_an_order(node):
            first, second = node.args[:2]
            one, other = self._text(first), self._text(second)
            if one != other:
                between = self.source[self._end(first) : self._start(second)].decode()
                yield "arguments", self._start(first), self._end(second), other + between + one, node
        if _can_be_left_out(node):
            yield "statement", self._start(node), self._end(node), "pass", node

    def _between(
        self, left: ast.expr, right: ast.expr, change: tuple[str, str], kind: str, of: Any
    ) -> Iterator[tuple[str, int, int, str, Any]]:
        """The operator that stands between two operands."""
        old, new = change
        pattern = old if "\\" in old else re.escape(old)
        begin, end = self._end(left), self._start(right)
        match = re.search(pattern, self.source[begin:end].decode())
        if match:
            yield kind, begin + match.start(), begin + match.end(), new, of

    def _start(self, node: Any) -> int:
        return self.offsets[node.lineno - 1] + int(node.col_offset)

    def _end(self, node: Any) -> int:
        return self.offsets[node.end_lineno - 1] + int(node.end_col_offset)

    def _text(self, node: Any) -> str:
        return self.source[self._start(node) : self._end(node)].decode()


def _other(value: int | float | bool) -> str:
    if isinstance(value, bool):
        return str(not value)
    return str(value + 1) if isinstance(value, int) else repr(value * 2 if value else 1.0)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_of_types(node: ast.AST) -> bool:
    named = node.func if isinstance(node, ast.Call) else node.value if isinstance(node, ast.Subscript) else None
    return _name(named) in OF_TYPES or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))


def _is_text(node: Any) -> bool:
    """Whether text is put together, as in messages."""
    operands = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.value,)
    return any(
        isinstance(o, ast.JoinedStr) or (isinstance(o, ast.Constant) and isinstance(o.value, str)) for o in operands
    )


def _has_an_order(call: ast.Call) -> bool:
    """Whether its first two arguments are two, and mean something by their places."""
    return (
        len(call.args) >= 2
        and not any(isinstance(a, ast.Starred) for a in call.args[:2])
        and (_name(call.func) not in COMMUTATIVE)
    )


def _name(node: ast.AST | None) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _can_be_left_out(node: ast.AST) -> bool:
    """Calls for what they do, and writes to something that is there already."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.AugAssign):
        return True
    return isinstance(node, ast.Assign) and all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets)
