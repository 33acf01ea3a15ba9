"""How models of other libraries fared, as a table in a file, which keeps what stands before it and all other rows."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

EQUAL, BY_MESSAGES, REFUSED, WRONG, FAILED, MISSING = (
    "equal", "equal, by messages", "refused", "WRONG", "failed", "not here"
)  # fmt: skip
HEAD = "| model | version | parameters | case | outcome | | seconds |\n|---|---|---|---|---|---|---|"
_ROW = re.compile(r"^\| (.+?) \| (.*?) \| (.*?) \| (.+?) \| (.+?) \| (.*?) \| (.*?) \|$")


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one case.

    Attributes:
        model: ``package:model``.
        version: of the package.
        parameters: how many numbers they are.
        case: what it was split over.
        outcome: one of the constants above. What raises another error than this library's is FAILED, and so is what
            takes too long; WRONG is another result than the plain model's.
        detail: the largest distance in units of what is allowed, the reason, or the package that lacks.
        seconds: of the case, start of the processes included.
    """

    model: str
    version: str
    parameters: int
    case: str
    outcome: str
    detail: str
    seconds: float

    @property
    def is_equal(self) -> bool:
        return self.outcome in (EQUAL, BY_MESSAGES)

    def __str__(self) -> str:
        said = " ".join(self.detail.replace("|", "/").split())
        return (
            f"| {self.model} | {self.version} | {self.parameters} | {self.case} | {self.outcome} | {said} | "
            f"{self.seconds:.0f} |"
        )


class Table:
    """The rows of a file. One that comes again replaces the one before; each is written when it is known."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        self.path, self.before = path, text.partition(HEAD.splitlines()[0])[0].rstrip()
        self.rows: dict[tuple[str, str], Row] = {}
        for line in text.splitlines():
            found = _ROW.match(line)
            if found and found[3].isdigit():
                model, version, parameters, case, outcome, detail, seconds = found.groups()
                self.rows[model, case] = Row(model, version, int(parameters), case, outcome, detail, float(seconds))

    def add(self, row: Row) -> None:
        self.rows[row.model, row.case] = row
        lines = [HEAD, *map(str, sorted(self.rows.values(), key=lambda r: (r.case, r.model)))]
        self.path.write_text("\n".join([*([self.before, ""] if self.before else []), *lines, ""]), encoding="utf-8")


def counts(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """By case and outcome, how many rows there are."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        of_case = found.setdefault(row.case, {})
        of_case[row.outcome] = of_case.get(row.outcome, 0) + 1
    return found


def version_of(package: str) -> str:
    """Of what is installed under an import name; empty where it cannot be told."""
    try:
        names = metadata.packages_distributions().get(package, [package])
        return metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return ""
