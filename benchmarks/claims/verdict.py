"""Judged figures of a benchmark, and its exit code."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Claims:
    """Judged figures of one benchmark."""

    rows: list[tuple[bool, str]] = field(default_factory=list)

    def at_most(self, what: str, measured: float, limit: float) -> None:
        self.rows.append((measured <= limit, f"{what}: {measured:.4g}, at most {limit:.4g}"))

    def at_least(self, what: str, measured: float, limit: float) -> None:
        self.rows.append((measured >= limit, f"{what}: {measured:.4g}, at least {limit:.4g}"))

    def holds(self, what: str, is_so: bool) -> None:
        self.rows.append((is_so is True, what))

    def models(self, outcomes: Mapping[tuple[str, str], str], at_least: int) -> None:
        """By model and case, how it ended (`real_outcomes`): of each case nine in ten are equal, of ``at_least`` models
        or more whose package is here; none is wrong, and none ends in another way than by a refusal."""
        for case in sorted({case for _, case in outcomes}):
            of_case = {model: outcome for (model, one), outcome in outcomes.items() if one == case}
            ran = {model: outcome for model, outcome in of_case.items() if outcome != "not here"}
            equal = [model for model, outcome in ran.items() if outcome.startswith("equal")]
            self.at_least(f"{case}: models", len(ran), at_least)
            self.at_least(f"{case}: share that is equal", len(equal) / len(ran) if ran else float("nan"), 0.9)
            for model, outcome in ran.items():
                if model not in equal and outcome != "refused":
                    self.holds(f"{case}: {model}: {outcome}", False)

    @property
    def failed(self) -> list[str]:
        return [text for holds, text in self.rows if not holds]

    def verdict(self) -> str:
        """A line for each figure, and how many hold."""
        lines = [f"{'holds' if holds else 'FAILS'}: {text}" for holds, text in self.rows]
        return "\n".join([*lines, f"{len(self.rows) - len(self.failed)} of {len(self.rows)} figures hold."])

    @property
    def exit_code(self) -> int:
        return 0 if self.rows and not self.failed else 1
