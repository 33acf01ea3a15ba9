"""Measured step times and memory of plans on two and four ranks against what profiles of this machine predict.

    python benchmarks/step_time.py [--models gpt2 lstm] [--write benchmarks/results/step_time.md]
    python benchmarks/step_time.py --framework jax
    python benchmarks/step_time.py --models gpt2 bert t5 resnet ncf --plans profiled

Every plan runs alone in its processes (`step_launch.py`), as plans that share them slow each other. Profiles (as those
of `shardwright profile --model`, on all ranks at once) and rounds take turns; a round runs every plan. Four ranks are
slow to profile: there all rounds are between two profiles.

How fast the machine is changes within minutes (products that stay in the cache take up to 1.7 times as long, while
nothing else runs): a profile tells what plans take about when it was taken. So the plain model runs beside every
profile and between the steps of every plan (`step_reference.py`), and a plan is predicted to take as many times the
plain model as the profile says. What was measured in a round is held against the mean of what the profiles before and
after it predict, and what counts is the median over the rounds. The error of the seconds as they are stands beside it.

The plans are of forms that the profile does not run itself (`step_plans.py`); ``--plans profiled`` takes those that it
does run. Memory is followed in a step after the timed ones of the first round: in PyTorch by torch's own MemTracker, in
JAX by the compiled program and live arrays; what is held against it is the plan's, before anything is compiled.

Aims: nine in ten plans on two ranks within 5% and all within 10%; on four ranks, which share the two cores of the
machine that this was written for, within 15%; memory of every rank never too low, at most 3% too high.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import claims
import step_run
from step_launch import Failed, Launcher
from step_plans import COMPOSED, FORMS, PROFILED, planned, ranks_of, too_few_units, width_of

import shardwright as sw
from shardwright.core.errors import ShardwrightError
from shardwright.core.plan.record import Predicted

MODELS = ("gpt2", "llama", "vit", "mixer", "lstm")
OTHERS = ("bert", "t5", "resnet", "ncf")
WIDTH = 256
MIB = 2**20
HEADER = (
    "| framework | model | plan | measured | predicted | pipeline | gradients | optimizer | error | of rounds | "
    "in seconds as they are | peak, MiB by rank | predicted / measured |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass
class Rounds:
    """What one plan was measured to take, each with the number of the profile before it, and predicted to take by every
    profile, each with the plain model's seconds beside it; why it has no figures, if it has none, and whether that
    counts."""

    measured: list[tuple[int, float, float]] = field(default_factory=list)
    predicted: list[tuple[Predicted, float]] = field(default_factory=list)
    peak_bytes: Sequence[int] = ()
    lacks: str = ""
    has_failed: bool = False

    @property
    def errors(self) -> list[float]:
        """Of every round, at the speed that the machine had in it."""
        said = [one.step_time_s / plain_s for one, plain_s in self.predicted]
        return [
            (said[before] + said[before + 1]) / 2 * plain_s / measured_s - 1
            for before, measured_s, plain_s in self.measured
        ]

    @property
    def raw_errors(self) -> list[float]:
        """The same of the seconds as they are."""
        said = [one.step_time_s for one, _ in self.predicted]
        return [(said[before] + said[before + 1]) / 2 / measured_s - 1 for before, measured_s, _ in self.measured]

    @property
    def error(self) -> float:
        return statistics.median(self.errors)

    @property
    def memory(self) -> list[float]:
        """Predicted over measured peak, of every rank."""
        return [p / m for p, m in zip(self.predicted[0][0].peak_memory_bytes, self.peak_bytes, strict=True)]

    def row(self) -> str:
        """Of the table: medians over the rounds, of the error too."""
        if self.lacks:
            return self.lacks + " |" * 10
        parts = ("step_time_s", "pipeline_s", "data_parallel_s", "optimizer_s")
        of_parts = (statistics.median(getattr(one, part) for one, _ in self.predicted) for part in parts)
        cells = [f"{1e3 * seconds:.1f}" for seconds in (statistics.median(s for _, s, _ in self.measured), *of_parts)]
        cells += [f"{self.error:+.1%}"]
        cells += [", ".join(f"{error:+.1%}" for error in errors) for errors in (self.errors, self.raw_errors)]
        cells += [" ".join(f"{size / MIB:.1f}" for size in self.peak_bytes)]
        return " | ".join([*cells, " ".join(f"{ratio:.3f}" for ratio in self.memory)])


class Model:
    """A model of the benchmark, whose plans are measured form by form."""

    def __init__(self, name: str, launcher: Launcher, folder: Path, options: argparse.Namespace) -> None:
        self.name, self.launcher, self.folder, self.options = name, launcher, folder, options
        self.began = time.perf_counter()
        self.graphs: dict[int, sw.Graph] = {}
        self.size = 0

    def graph(self, form: str) -> sw.Graph:
        width = width_of(form, WIDTH)
        if width not in self.graphs:
            model, sample, loss = step_run.given(self.launcher.framework, self.name, width)
            self.graphs[width], self.size = sw.capture(model, sample, loss), len(next(iter(sample.values())))
        return self.graphs[width]

    def _tell(self, what: str) -> None:
        print(f"{time.perf_counter() - self.began:6.0f} s  {self.name}, {what}", file=sys.stderr, flush=True)

    def measured(self, forms: Sequence[str]) -> Iterator[tuple[str, Rounds]]:
        """The forms with their rounds, those of two ranks first."""
        for ranks in sorted(set(map(ranks_of, forms))):
            own = {form: Rounds() for form in forms if ranks_of(form) == ranks}
            for form, rounds in own.items():
                if too_few_units(form, self.graph(form)):
                    rounds.lacks = "fewer units than stages"
            try:
                self._measure(ranks, own)
            except Failed as error:
                for rounds in own.values():
                    rounds.lacks, rounds.has_failed = rounds.lacks or f"the profile failed: {error}", True
            yield from own.items()

    def _measure(self, ranks: int, rows: dict[str, Rounds]) -> None:
        options, file = self.options, str(self.folder / "plan.json")
        plans = self._planned(ranks, rows, {})
        for number in range(options.rounds):
            for form in plans if number % 2 == 0 else reversed(plans):
                rounds = rows[form]
                if rounds.lacks:
                    continue
                plans[form].save(file)
                try:
                    ran = self.launcher.run(
                        ranks, step_run.timed, self.name, width_of(form, WIDTH), WIDTH, file, options.steps, number == 0
                    )
                except Failed as error:
                    rounds.lacks, rounds.has_failed = f"failed: {error}", True
                    continue
                rounds.measured.append((len(rounds.predicted) - 1, ran.step_s, ran.reference_s))
                rounds.peak_bytes = rounds.peak_bytes or ran.peak_bytes
                said = f"{1e3 * ran.step_s:.1f} ms, predicted {1e3 * plans[form].predicted.step_time_s:.1f}"
                said += f", plain model {1e3 * ran.reference_s:.1f}, then {1e3 * rounds.predicted[-1][1]:.1f}"
                self._tell(f"{form}, round {number + 1}: {said}")
            if ranks == 2 or number == options.rounds - 1:
                plans = self._planned(ranks, rows, plans)

    def _planned(self, ranks: int, rows: dict[str, Rounds], before: dict[str, sw.Plan]) -> dict[str, sw.Plan]:
        """The plans by a new profile, cut as those ``before``."""
        profile = str(self.folder / f"{ranks}.toml")
        degrees = sorted({1, *(FORMS[form]["tp"] for form in rows)})
        plain_s = self.launcher.run(ranks, step_run.profiled, self.name, WIDTH, self.options.budget, degrees, profile)
        self._tell(f"profile of {ranks} ranks")
        plans: dict[str, sw.Plan] = {}
        for form, rounds in rows.items():
            if rounds.lacks:
                continue
            try:
                plans[form] = planned(self.graph(form), self.size, profile, form, before.get(form))
            except ShardwrightError as error:
                rounds.lacks, rounds.has_failed = f"refused: {' '.join(str(error).split())[:300]}", True
            else:
                rounds.predicted.append((plans[form].predicted, plain_s))
        return plans


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--models", nargs="+", choices=(*MODELS, *OTHERS), default=list(MODELS))
    parser.add_argument("--plans", nargs="+", choices=(*FORMS, "profiled", "composed"), default=["composed"])
    parser.add_argument("--steps", type=int, default=6, help="timed, of every plan in every round")
    parser.add_argument("--rounds", type=int, default=2, help="of a launch of every plan and a profile")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for the profile's own measurements")
    parser.add_argument("--others", type=float, default=0.04, help="of the cores, what other work may take")
    parser.add_argument("--write", type=Path, help="append the table to this file, model by model")
    options = parser.parse_args()
    sets = {"profiled": PROFILED, "composed": COMPOSED}
    forms = list(dict.fromkeys(form for kind in options.plans for form in sets.get(kind, {kind: None})))
    found: dict[str, Rounds] = {}

    def say(*lines: str) -> None:
        print("\n".join(lines), flush=True)
        if options.write:
            with options.write.open("a") as file:
                file.write("\n".join(lines) + "\n")

    say(*HEADER)
    with tempfile.TemporaryDirectory() as folder:
        launcher = Launcher(options.framework, options.others, Path(folder))
        for name in options.models:
            model = Model(name, launcher, Path(folder), options)
            for form, rounds in model.measured(forms):
                found[f"{name}, {form}"] = rounds
                say(f"| {options.framework} | {name} | {form} | {rounds.row()} |")
    say("", summary([rounds for rounds in found.values() if not rounds.lacks]), "")
    judged = verdict(found)
    print(judged.verdict())
    return judged.exit_code


def summary(rows: Sequence[Rounds]) -> str:
    """How many rows and rounds are within 5 and 10%."""
    if not rows:
        return "Nothing was measured."
    errors = [abs(rounds.error) for rounds in rows]
    single = [abs(error) for rounds in rows for error in rounds.errors]
    within = " and ".join(
        f"{sum(e <= limit for e in errors)} of {len(errors)} rows, {sum(e <= limit for e in single)} of {len(single)} "
        f"rounds within {limit:.0%}"
        for limit in (0.05, 0.10)
    )
    return f"{within}; mean error of a row {statistics.mean(errors):.1%}, of a round {statistics.mean(single):.1%}."


def verdict(found: dict[str, Rounds]) -> claims.Claims:
    done = {plan: rounds for plan, rounds in found.items() if not rounds.lacks}
    errors = {plan: rounds.error for plan, rounds in done.items()}
    four = [plan for plan in done if ranks_of(plan.split(", ", 1)[1]) == 4]
    return claims.step_time(
        two={plan: error for plan, error in errors.items() if plan not in four},
        four={plan: errors[plan] for plan in four},
        memory={plan: rounds.memory for plan, rounds in done.items()},
        failed=[f"{plan}: {rounds.lacks}" for plan, rounds in found.items() if rounds.has_failed],
    )


if __name__ == "__main__":
    sys.exit(main())
