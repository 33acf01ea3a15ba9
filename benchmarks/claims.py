"""Figures that are claimed in `docs/claims.md`, and whether what a benchmark measured reaches them: its exit code.

A benchmark hands what it measured to its function below, prints `verdict()` and ends with `exit_code`, which is 0 only
where every figure holds. What is not a number holds nowhere, and a benchmark that judged nothing has failed. The limits
are those of its table; where they leave room for noise, the line says how much.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ZOO_CLASSES, ZOO_INEXACT = 431, 1
"""Of `transformers` that are built and run plainly; and those whose own gradients rounding takes beyond the bound."""


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


def pipeline_speed(cases: Mapping[str, Mapping[str, float]]) -> Claims:
    """1F1B within 3% of its bound, and no slower than torch's own: of each case both as ratios of times."""
    claims = Claims()
    for case, ratios in cases.items():
        claims.at_most(f"{case}: 1F1B over its bound", ratios["bound"], 1.03)
        claims.at_most(f"{case}: 1F1B over torch's", ratios["torch"], 1.0)
    return claims


def large_job(figures: Mapping[str, float]) -> Claims:
    """6 billion parameters or more on one device of 16 GB, planned within a minute: as shares of the budget and of the
    host's memory, and the share of the copies' time that is hidden at the largest batch."""
    claims = Claims()
    claims.at_least("parameters", figures["parameters"], 6e9)
    claims.at_least("hidden share of copies", figures["hidden"], 0.95)
    claims.at_most("device, over its budget", figures["device"], 1.0)
    claims.at_most("host, over its memory", figures["host"], 1.0)
    claims.at_most("seconds of planning", figures["planning_s"], 60.0)
    return claims


def data_parallel(cases: Mapping[tuple[str, int], Mapping[str, float]], *, timed: bool) -> Claims:
    """Beside torch's own, by model and level, as ratios: whole replicas send as much, in no more memory but for a flag
    for each parameter, and in 5% less time; sharded parameters take at most the time."""
    claims = Claims()
    for (model, level), ratios in cases.items():
        if level == 0:
            claims.at_most(f"{model}, whole: bytes sent, off by", abs(ratios["sent"] - 1), 0.01)
            claims.at_most(f"{model}, whole: memory", ratios["memory"], 1.001)
        if timed:
            what = "sharded: time over FSDP2's" if level else "whole: time over DDP's"
            claims.at_most(f"{model}, {what}", ratios["time"], 1.0 if level else 0.95)
    return claims


def pipeline_fidelity(errors: Mapping[str, float]) -> Claims:
    """Predictions of other schedules within 5%: the relative error of each."""
    claims = Claims()
    for name, error in errors.items():
        claims.at_most(f"{name}: error", abs(error), 0.05)
    return claims


def jax_pipeline(cases: Mapping[str, Mapping[str, float]]) -> Claims:
    """Bound over step of each way, by stage time: 1.02 and more of 1F1B and GPipe, no less than of those by hand."""
    claims = Claims()
    for case, shares in cases.items():
        for name in ("ours, 1f1b", "ours, gpipe"):
            if name in shares:
                claims.at_least(f"{case}: bound over step, {name}", shares[name], 1.02)
                for by_hand in ("ppermute", "praxis"):
                    claims.at_least(f"{case}: {name}, over {by_hand} by hand", shares[name] / shares[by_hand], 1.0)
    return claims


def jax_first_step(ratios: Mapping[int, float], same: Sequence[str]) -> Claims:
    """The first step over that of one jit, by stages: two as long, four 1.2 times, each with a tenth of room, as the
    same process takes 2.7 to 3.6 s from start to start. ``same``: losses that differ."""
    claims = Claims()
    for stages, ratio in ratios.items():
        claims.at_most(f"{stages} stages: first step over that of one jit", ratio, 1.1 * (1.0 if stages <= 2 else 1.2))
    claims.holds(f"losses are those of one jit {'; '.join(same)}".strip(), not same)
    return claims


def tensor_parallel(ratio: float) -> Claims:
    """PyTorch: blocks within 5% of those split by hand."""
    claims = Claims()
    claims.at_most("shardwright over by hand", ratio, 1.05)
    return claims


def jax_tensor_parallel(ratio: float) -> Claims:
    """JAX: blocks within 2% of those split by hand."""
    claims = Claims()
    claims.at_most("shardwright over by hand", ratio, 1.02)
    return claims


def tensor_parallel_zoo(results: Sequence[Mapping[str, Any]], asked: Sequence[str], is_whole: bool) -> Claims:
    """Every class equal to the plain model; of all 44, half with 97% or more of their parameters in pieces, and every
    other with reasons."""
    claims = Claims()
    lacking = sorted(set(asked) - {result["class"] for result in results})
    claims.holds(f"{len(asked)} classes have a result {', '.join(lacking)}".strip(), bool(asked) and not lacking)
    for result in results:
        if not result["equal"]:
            claims.holds(f"{result['class']} is the plain model", False)
    claims.at_least("classes that are the plain model", sum(bool(r["equal"]) for r in results), len(asked))
    silent = [r["class"] for r in results if not r["split"] > 0.95 and not r["reasons"]]
    claims.holds(f"what is whole has a reason {', '.join(silent)}".strip(), not silent)
    if is_whole:
        shares = sorted(r["split"] for r in results)
        claims.at_least("classes", len(results), 44)
        claims.at_least("median share in pieces", shares[len(shares) // 2] if shares else float("nan"), 0.97)
    return claims


def sharded_zoo(results: Sequence[Mapping[str, Any]], asked: Sequence[str], is_whole: bool) -> Claims:
    """Every class equal to the plain model, of all 60 or more."""
    claims = Claims()
    off = sorted(set(asked) - {result["class"] for result in results if result["equal"]})
    claims.holds("classes were asked for", bool(asked))
    claims.at_least(f"classes that are the plain model {', '.join(off)}".strip(), len(asked) - len(off), len(asked))
    if is_whole:
        claims.at_least("classes", len(results), 60)
    return claims


def never_whole(built: float, cut: float, share: float, largest: float) -> Claims:
    """In bytes: while a model is built no more than a block and a half, and until its pieces are cut no more than this
    rank's share and a block beside it."""
    claims = Claims()
    claims.at_most("peak while it is built, in blocks", built / largest, 1.5)
    claims.at_most("above its share until pieces are cut, in blocks", (cut - share) / largest, 1.0)
    return claims


def zoo(found: Mapping[int, Mapping[str, bool]], is_whole: bool) -> Claims:
    """By ranks and class, whether it trains as the plain model: of all classes all but one, of a few all."""
    claims = Claims()
    for ranks, exact in found.items():
        inexact = sorted(name for name, is_exact in exact.items() if is_exact is not True)
        named = f" ({', '.join(inexact[:8])})" if inexact else ""
        claims.at_most(f"{ranks} ranks: inexact classes{named}", len(inexact), ZOO_INEXACT if is_whole else 0)
        claims.at_least(f"{ranks} ranks: classes", len(exact), ZOO_CLASSES if is_whole else 1)
    return claims


def mixed_clusters(times: Mapping[str, tuple[float, Sequence[float | None]]]) -> Claims:
    """By case, seconds of the plan for unlike devices, and of those that take them for alike or leave some out (None:
    does not fit). It is no slower than any."""
    claims = Claims()
    for case, (aware, others) in times.items():
        fit = [time for time in others if time is not None]
        ratio = aware / min(fit) if fit else float("nan")
        claims.at_most(f"{case}: over the best of the others", ratio, 1 + 1e-6)
    return claims


def memory_ranks(ratios: Mapping[str, Sequence[float]]) -> Claims:
    """Predicted over measured peaks, by plan and rank: never too low, and within 3%."""
    claims = Claims()
    for plan, of_ranks in ratios.items():
        claims.holds(f"{plan}: ranks were measured", bool(of_ranks))
        for rank, ratio in enumerate(of_ranks):
            claims.at_least(f"{plan}, rank {rank}: predicted over measured", ratio, 1.0)
            claims.at_most(f"{plan}, rank {rank}: predicted over measured", ratio, 1.03)
    return claims


def bf16_losses(models: Mapping[str, Mapping[str, float]]) -> Claims:
    """By model: losses in bf16 within 2⁻⁸ of FSDP2's at every step, and no farther from those in float32 than its own
    are, within the standard error over seeds and the rounding of losses. The peer, in float32, is the plain model."""
    claims = Claims()
    for model, found in models.items():
        claims.at_most(f"{model}: FSDP2 in float32, off the plain model", found["peer in float32"], 1e-5)
        claims.at_most(f"{model}: ours off FSDP2's, at any step", found["apart"], 2**-8)
        claims.at_most(f"{model}: farther from float32 than FSDP2 is", found["farther"], found["error"] + 1e-6)
    return claims


def gpu(ranks: Mapping[int, Mapping[str, Any]], *, timed: bool) -> Claims:
    """By the number of ranks: a step at most 1% longer than the plain model's, compiled units at 0.95 of its speed or
    more; memory never too low and within 3%. None stands for what was not asked for. Without ``timed``, which is for
    tiny models, times only have to be there, and memory, most of which is a bucket that is taken for full, within a
    quarter."""
    claims = Claims()
    for count, found in ranks.items():
        limits = (1.01, 0.95, 1.03) if timed else (1e6, 1e-6, 1.25)
        if found["overhead"] is not None:
            claims.at_most(f"{count} ranks: step over the plain model's", found["overhead"], limits[0])
        if found["compiled"] is not None:
            claims.at_least(f"{count} ranks: compiled, speed over the plain model's", found["compiled"], limits[1])
        if count > 1 and found["hidden"] is not None:
            claims.holds(f"{count} ranks: what is hidden was measured", set(found["hidden"]) == {"shard 0", "shard 3"})
        if found["memory"] is not None:
            claims.holds(f"{count} ranks: memory was measured", bool(found["memory"]))
        for case, ratios in (found["memory"] or {}).items():
            claims.holds(f"{count} ranks, {case}: every rank", len(ratios) == count)
            for rank, ratio in enumerate(ratios):
                claims.at_least(f"{count} ranks, {case}, rank {rank}: predicted over measured", ratio, 1.0)
                claims.at_most(f"{count} ranks, {case}, rank {rank}: predicted over measured", ratio, limits[2])
    return claims


def gpu_steps(plans: Mapping[str, Mapping[str, float]], failed: Sequence[str], *, timed: bool) -> Claims:
    """Predicted over measured of every plan: time within 10% by the profile that ships, within 5% by one taken on the
    device; memory never too low and within 3%. Without ``timed`` nothing but that every plan ran."""
    claims = Claims()
    for plan in failed:
        claims.holds(f"{plan}: runs", False)
    for plan, ratios in plans.items():
        if not timed:
            claims.holds(f"{plan}: runs", all(ratio > 0 for ratio in ratios.values()))
            continue
        claims.at_most(f"{plan}: error of the time, by the profile that ships", abs(ratios["shipped"] - 1), 0.10)
        claims.at_most(f"{plan}: error of the time, by a profile taken here", abs(ratios["here"] - 1), 0.05)
        claims.at_least(f"{plan}: memory, predicted over measured", ratios["memory"], 1.0)
        claims.at_most(f"{plan}: memory, predicted over measured", ratios["memory"], 1.03)
    return claims


def gpu_offload(over: Mapping[str, float], *, timed: bool) -> Claims:
    """A step over the larger of its computing and its transfers, at most 1.05; without ``timed``, that plans ran."""
    claims = Claims()
    claims.at_least("plans with something on the host", len(over), 1)
    for plan, ratio in over.items():
        if timed:
            claims.at_most(f"{plan}: step over the larger of computing and transfers", ratio, 1.05)
        else:
            claims.holds(f"{plan}: runs", ratio > 0)
    return claims


def host_time(errors: Mapping[str, float], ratios: Mapping[str, float], constant: float) -> Claims:
    """Relative errors of fitted host times, within 30%; ratios of an op to a product, within a factor of three of the
    cost model's constant."""
    claims = Claims()
    for which, error in errors.items():
        claims.at_most(f"{which}: error", abs(error), 0.30)
    for which, ratio in ratios.items():
        claims.at_least(f"{which}: an op over a product, over the constant", ratio / constant, 1 / 3)
        claims.at_most(f"{which}: an op over a product, over the constant", ratio / constant, 3.0)
    return claims


def few_microbatches(slower: Sequence[float], cases: int, limit: float) -> Claims:
    """By how much the plan of each case is slower than the best, at most the limit; every case was measured."""
    claims = Claims()
    claims.at_least("cases measured", len(slower), max(1, cases))
    for number, share in enumerate(slower):
        if not share <= limit:
            claims.at_most(f"case {number}: slower than exhaustive search by", share, limit)
    return claims


def jobs(parts: Mapping[str, Mapping[str, float]]) -> Claims:
    """The simulator of jobs, by part: Hydra's bound kept by every list; no policy below the proven optimum; the gain
    over model parallelism within 1% of the closed form; copies of half a unit hidden to 95%, and, not hidden, a loss
    within 2% of the predicted one; 1.5 million units in 60 s and 1 GiB."""
    claims = Claims()
    if (bound := parts.get("bound")) is not None:
        claims.at_least("lists", bound["lists"], 5000)
        claims.at_most("makespan over the bound", bound["worst"], 1.0)
        claims.at_most("lists with a unit left out or out of order", bound["broken"], 0)
    for name, ratio in parts.get("optimum", {}).items():
        if name.endswith("least"):
            claims.at_least(f"{name}: over the optimum", ratio, 1 - 1e-5)
        elif name.startswith("sharded-lrtf"):
            claims.at_most(f"{name}: over the optimum", ratio, 1.25 if name.endswith("worst") else 1.03)
    for name, error in parts.get("gain", {}).items():
        claims.at_most(f"{name}: gain, off the closed form by", abs(error), 0.01)
    for name, ratio in parts.get("pipelines", {}).items():
        claims.at_least(name, ratio, 1.0)
    for name, figure in parts.get("copies", {}).items():
        if name.endswith("hidden"):
            claims.at_least(name, figure, 0.95)
        else:
            claims.at_most(f"{name}, off the predicted by", abs(figure), 0.02)
    for name, figure in parts.get("speed", {}).items():
        claims.at_most(name, figure, 1024 if name.endswith("MiB") else 60.0)
    return claims


def slice_lengths(rows: Mapping[str, Mapping[str, float | None]]) -> Claims:
    """Of each table: the search's processor time, at most 10 s; the step over that of the best equal lengths, and over
    that of TeraPipe's planner where it was asked, at most 1."""
    claims = Claims()
    for name, row in rows.items():
        claims.at_most(f"{name}: seconds of the search", row["search"] or float("nan"), 10.0)
        claims.at_most(f"{name}: step over the best of equal lengths", row["uniform"] or float("nan"), 1.0)
        if row["peer"] is not None:
            claims.at_most(f"{name}: step over that of TeraPipe's planner", row["peer"], 1.0 + 1e-9)
    return claims


def token_slices(ratios: Mapping[str, float]) -> Claims:
    """Of TeraPipe's settings, the step of whole sequences over that in slices: of 175B from 4 to 6 (5.0 was measured),
    13B in slices, 1B of 72 microbatches on 24 stages not, for which its code names one step for both ways."""
    claims = Claims()
    claims.at_least("175B: whole over sliced", ratios.get("175B", float("nan")), 4.0)
    claims.at_most("175B: whole over sliced", ratios.get("175B", float("nan")), 6.0)
    claims.holds("13B: slices are chosen", ratios.get("13B", 1.0) > 1.0)
    claims.holds("1B: slices are declined", ratios.get("1B") == 1.0)
    return claims


def sliced_steps(times: Mapping[str, float], predicted: Mapping[str, float]) -> Claims:
    """Seconds of steps of one sequence on two ranks, by form: in the planner's slices at least 1.3 times as fast as
    whole, and at most 3% slower than the best other slices; both predicted within 10%; one slice at most 1% slower than
    none."""
    claims, nothing = Claims(), float("nan")
    planned, whole = times.get("the planner's", nothing), times.get("whole", nothing)
    others = [taken for name, taken in times.items() if "+" in name]
    claims.at_least("whole over the planner's slices", whole / planned, 1.3)
    claims.at_most("the planner's slices over the best others", planned / min(others, default=nothing), 1.03)
    claims.at_most("one slice over none", times.get("one slice", nothing) / whole, 1.01)
    for name in ("whole", "the planner's"):
        error = abs(predicted.get(name, nothing) / times.get(name, nothing) - 1)
        claims.at_most(f"{name}: error of the prediction", error, 0.10)
    return claims


def sliced_memory(ratios: Mapping[str, Sequence[float]], lowered: float) -> Claims:
    """Of each form that ran, predicted over tracked bytes by rank: at least 1 and at most 1.03. ``lowered``: the
    activations of the fullest rank at 32 thousand tokens in slices over those of whole sequences, at most half."""
    claims = Claims()
    claims.at_least("forms measured", len(ratios), 1)
    for name, ranks in ratios.items():
        claims.at_least(f"{name}: predicted over tracked, lowest rank", min(ranks, default=float("nan")), 1.0)
        claims.at_most(f"{name}: predicted over tracked, highest rank", max(ranks, default=float("nan")), 1.03)
    claims.at_most("activations in slices over those of whole sequences", lowered, 0.5)
    return claims


def sliced_zoo(rows: Mapping[str, Mapping[str, Any]], least: float) -> Claims:
    """No class is said to run in slices whose outputs depend on later tokens; of the causal ones a share does."""
    claims = Claims()
    for name, row in rows.items():
        if row["sliced"] and not row["causal"]:
            claims.holds(f"{name}: said to run in slices, and depends on later tokens", False)
    causal = [row for row in rows.values() if row["causal"]]
    share = sum(row["sliced"] for row in causal) / len(causal) if causal else float("nan")
    claims.at_least("share of the causal classes that run in slices", share, least)
    return claims


def step_time(
    two: Mapping[str, float],
    four: Mapping[str, float],
    memory: Mapping[str, Sequence[float]],
    failed: Sequence[str],
) -> Claims:
    """Relative errors of plans on two ranks, nine in ten within 5% and all within 10%, and on four, within 15%;
    predicted over measured memory of every rank, never too low and within 3%. ``failed``: plans that did not run."""
    claims = Claims()
    for plan in failed:
        claims.holds(plan, False)
    if two:
        close = sum(abs(error) <= 0.05 for error in two.values()) / len(two)
        claims.at_least(f"share of {len(two)} plans on two ranks within 5%", close, 0.9)
    for errors, limit in ((two, 0.10), (four, 0.15)):
        for plan, error in errors.items():
            claims.at_most(f"{plan}: error", abs(error), limit)
    for plan, ratios in memory.items():
        claims.holds(f"{plan}: memory of ranks was measured", bool(ratios))
        for rank, ratio in enumerate(ratios):
            claims.at_least(f"{plan}, rank {rank}: memory, predicted over measured", ratio, 1.0)
            claims.at_most(f"{plan}, rank {rank}: memory, predicted over measured", ratio, 1.03)
    return claims


def planning(cases: Mapping[str, Mapping[str, float]]) -> Claims:
    """Seconds of capture and search, and GiB at the peak: Llama 70B under 10 s and 0.6 GiB, GPT of a trillion
    parameters under 60 s and 2 GiB."""
    claims = Claims()
    for case, found in cases.items():
        limit_s, limit_gib = {"llama": (10.0, 0.6), "gpt-1t": (60.0, 2.0)}[case]
        claims.at_most(f"{case}: seconds of capture and search", found["time_s"], limit_s)
        claims.at_most(f"{case}: peak memory, GiB", found["peak_gib"], limit_gib)
    return claims


def large_runs(rows: Mapping[str, tuple[float, float]]) -> Claims:
    """By run, how far the published figure is from the predicted one, or from the nearer end of its range: 10%; and how
    wide the range is: 15%. All nine runs."""
    claims = Claims()
    for run, (off, width) in rows.items():
        claims.at_most(f"{run}: error", abs(off), 0.10)
        claims.at_most(f"{run}: width of the range", width, 0.15)
    claims.at_least("runs", len(rows), 9)
    return claims


def constants(
    base: Mapping[str, float], without: Mapping[str, Mapping[str, float]], origins: Mapping[str, str]
) -> Claims:
    """Errors by table with all constants of the time model, and without each: 6.5% of 1,440 runs, 6% of those held out,
    4% of the larger ones; where planned, 10% of steps on T4, ranked with 0.95, and 6% of large runs. Each constant has
    an origin."""
    claims = Claims()
    for table, limit in {"one node": 0.065, "held out": 0.06, "22B to 1T": 0.04}.items():
        claims.at_most(f"{table}: MAPE", base.get(table, float("nan")), limit)
    if "T4" in base:
        claims.at_most("T4: MAPE", base["T4"], 0.10)
        claims.at_least("T4: rank correlation", base["T4 ranks"], 0.95)
        claims.at_most("large: MAPE", base["large"], 0.06)
    claims.at_least("constants", len(without), 28)
    for name, found in without.items():
        claims.holds(f"{name}: an error on every table", all(value == value for value in found.values()))
        kinds = ("fitted", "prior", "data sheet", "paper", "derived", "measured", "source")
        claims.holds(f"{name}: its origin", any(f"{kind}:" in origins.get(name, "").lower() for kind in kinds))
    return claims


def accuracy(errors: Mapping[str, float]) -> Claims:
    """The mean relative error of 1,440 published runs on one node and of those that no fit saw, 6%."""
    claims = Claims()
    for runs, limit in {"all": 0.06, "held out": 0.06}.items():
        claims.at_most(f"{runs}: MAPE", errors.get(runs, float("nan")), limit)
    return claims


def horovod(off: Mapping[str, float]) -> Claims:
    """By kind of scaling, weak and strong, the predicted efficiency less the published one: within 5 points."""
    claims = Claims()
    for scaling in ("weak", "strong"):
        claims.at_most(f"{scaling} scaling: efficiency off by", abs(off.get(scaling, float("nan"))), 0.05)
    return claims


def sharding_levels(rows: Mapping[str, tuple[float, float]]) -> Claims:
    """By devices, link and level: the seconds that a port needs for the bytes over those of the step, and computing,
    exposed traffic and optimizer over the step, which they make up."""
    claims = Claims()
    for row, (port, parts) in rows.items():
        claims.at_most(f"{row}: port over step", port, 1.0 + 1e-9)
        claims.at_most(f"{row}: parts of the step off its whole", abs(parts - 1), 1e-6)
    return claims


def out_of_core(planned: Mapping[str, tuple[float, float]], least: int, *others: tuple[str, float]) -> Claims:
    """By model that has a plan for its budget, the peak over the budget, and the largest relative difference of what a
    step leaves (gradients, running statistics); of ``others`` the latter. ``least``: as many models have a plan."""
    claims = Claims()
    claims.at_least("models with a plan for the budget", len(planned) if least else float("nan"), least)
    for model, (share, _) in planned.items():
        claims.at_most(f"{model}: peak over budget", share, 1.0)
    for model, differs in [*((model, differs) for model, (_, differs) in planned.items()), *others]:
        claims.at_most(f"{model}: gradients and statistics differ by", differs, 1e-4)
    return claims


def host_states(alone: Mapping[str, float], ranks: Mapping[str, tuple[float, float]]) -> Claims:
    """Of a model at a quarter of its memory (``alone``, empty where it was left out): the peak over the budget, how far
    the first losses are apart, the last loss over the first, and how far the last ones are apart. Of ``ranks``, by
    plan: the largest peak over that of the plan without the host, and how far losses are apart."""
    claims = Claims()
    most = {"peak over budget": 1.0, "first losses apart": 1e-4, "last loss over the first": 0.9, "last apart": 0.1}
    for name, limit in most.items() if alone or not ranks else ():
        claims.at_most(name, alone.get(name, float("nan")), limit)
    for plan, (share, apart) in ranks.items():
        claims.at_most(f"{plan}: losses apart", apart, 1e-4)
        if "on the host" in plan:
            claims.at_most(f"{plan}: peak over that of shard 3", share, 1.0)
    return claims


def loading(shares: Mapping[str, tuple[float, bool]], ratios: Mapping[str, float]) -> Claims:
    """By plan, the most that a rank held above its share while it loaded, in tensors of the largest size, and whether
    what it loaded is right; and the time of a load over that of each peer."""
    claims = Claims()
    for plan, (above, is_right) in shares.items():
        claims.at_most(f"{plan}: held above the share, in largest tensors", above, 1.0)
        claims.holds(f"{plan}: what was loaded is what the files hold", is_right)
    for peer, ratio in ratios.items():
        claims.at_most(f"time over that of {peer}", ratio, 1.3)
    return claims


def loading_jax(ratio: float) -> Claims:
    """The time of a load in JAX over that of Orbax."""
    return loading({}, {"Orbax": ratio})


def twins(alike: Mapping[str, bool], is_whole: bool) -> Claims:
    """By model and cluster, whether both frameworks' graphs get one plan: 28 of all 30."""
    claims = Claims()
    same = sum(is_so is True for is_so in alike.values())
    claims.at_least(f"of {len(alike)} cases, one plan", same, 28 if is_whole else max(1, len(alike)))
    return claims


def found_plans(cases: Mapping[str, Mapping[str, Any]]) -> Claims:
    """By case: losses of both frameworks, and predicted over measured memory of every rank. PyTorch's never too low and
    within 3%; JAX's plan within 15% (20% above, where all is recomputed), its compiled step within 3%."""
    claims = Claims()
    for case, found in cases.items():
        pairs = list(zip(found["torch_losses"], found["jax_losses"], strict=True))
        apart = [abs(a - b) / abs(a) for a, b in pairs] or [float("nan")]
        claims.holds(f"{case}: losses within 1e-5 of each other", all(error <= 1e-5 for error in apart))
        for name, low, high in (("torch", 1.0, 1.03), ("jax", 0.85, 1.2), ("jax_compiled", 0.97, 1.03)):
            claims.holds(f"{case}: ranks were measured, {name}", bool(found[name]))
            for rank, ratio in enumerate(found[name]):
                claims.at_least(f"{case}, {name}, rank {rank}: predicted over measured", ratio, low)
                claims.at_most(f"{case}, {name}, rank {rank}: predicted over measured", ratio, high)
    return claims


def adversaries(reasons: Mapping[str, str], longest_s: float, asked: int) -> Claims:
    """By trial, why it is wrong, empty where every rank was told or nothing differed; none may take over 70 s."""
    claims = Claims()
    for trial, reason in reasons.items():
        if reason:
            claims.holds(f"{trial}: {reason}", False)
    claims.at_least(
        "trials that are refused on all ranks, or give the same", sum(not r for r in reasons.values()), asked
    )
    claims.at_most("seconds of the longest", longest_s, 70.0)
    return claims


def annealing(recordings: int, off: float, shares: Mapping[str, float]) -> Claims:
    """Steps with values that change in each are recorded twice and lose as the plain model does; looking for changes
    takes a hundredth of a step of 200 ms."""
    claims = Claims()
    claims.at_most("recordings of steps whose values change", recordings, 2)
    claims.at_most("losses off by", off, 1e-5)
    claims.holds("values were looked at", bool(shares))
    for what, share in shares.items():
        claims.at_most(f"{what}: share of a step of 200 ms", share, 0.01)
    return claims


def recording_time(cases: Mapping[str, Mapping[str, float]]) -> Claims:
    """By model and ranks, CPU seconds to record a new sequence length, under 0.3, and how many of the lengths were not
    recorded at all, as all must be."""
    claims = Claims()
    for case, found in cases.items():
        claims.at_most(f"{case}: seconds for a new sequence length", found["new_s"], 0.3)
        claims.holds(f"{case}: every length was recorded", found["missed"] <= 0)
    return claims


def faults(complaints: Mapping[str, Sequence[str]], left: Sequence[str], asked: int) -> Claims:
    """By case, what did not end as it should. All cases ran, and nothing is left behind."""
    claims = Claims()
    for case, said in complaints.items():
        if said:
            claims.holds(f"{case}: {'; '.join(said)}", False)
    claims.at_least("cases that ended as they should", sum(not said for said in complaints.values()), asked)
    claims.holds(f"nothing is left behind {', '.join(left)}".strip(), not left)
    return claims


def checkpoint_kills(kills: int, inside: int, wrong: Sequence[str], asked: int) -> Claims:
    """How many kills there were, how many of them inside of saving, and what was wrong after one of them."""
    claims = Claims()
    claims.at_least("kills", kills, asked)
    claims.at_least("share of them inside of saving", inside / kills if kills else float("nan"), 0.3)
    claims.holds(
        f"after every kill all is readable, and runs end as if left alone {'; '.join(wrong)}".strip(), not wrong
    )
    return claims


def background_saving(delays: Mapping[str, float], memory: Mapping[str, float]) -> Claims:
    """By plan, what a checkpoint in the background delays training by, over a step; and the memory that it takes over
    the bytes that the rank writes."""
    claims = Claims()
    for plan, delay in delays.items():
        claims.at_most(f"{plan}: delay over a step", delay, 0.05)
        claims.at_most(f"{plan}: memory over the bytes written", memory[plan], 1.05)
    return claims


def fuzz(found: Mapping[str, tuple[int, Sequence[str]]], asked: int) -> Claims:
    """By kind, how many cases ran, and what was wrong in them."""
    claims = Claims()
    claims.at_least("cases", sum(count for count, _ in found.values()), asked)
    for kind, (count, wrong) in found.items():
        claims.holds(f"{kind}: {count} cases without a fault {'; '.join(wrong)}".strip(), not wrong)
    return claims


def real_models(outcomes: Mapping[tuple[str, str], str], is_whole: bool) -> Claims:
    """By model of a PyTorch library and case, how it ended: at least 45 in each case."""
    claims = Claims()
    claims.models(outcomes, 45 if is_whole else 1)
    return claims


def real_models_jax(outcomes: Mapping[tuple[str, str], str], is_whole: bool) -> Claims:
    """By model of a JAX library and case, how it ended: at least 15 in each case."""
    claims = Claims()
    claims.models(outcomes, 15 if is_whole else 1)
    return claims


def edited_plans(counts: Mapping[tuple[str, str], Mapping[str, int]]) -> Claims:
    """1,000 random edits over models in both frameworks: none is wrong, of every model some are refused and some are
    counted anew, and some of all went through the command line."""
    claims = Claims()
    outcomes = ("refused", "rescored", "wrong")
    claims.at_least("edits", sum(count.get(kind, 0) for count in counts.values() for kind in outcomes), 1000)
    claims.at_least("of them by command line", sum(count.get("commands", 0) for count in counts.values()), 200)
    claims.at_most("edits that are wrong", sum(count.get("wrong", 0) for count in counts.values()), 0)
    for (name, framework), count in counts.items():
        for kind in ("refused", "rescored"):
            claims.at_least(f"{name} in {framework}: {kind}", count.get(kind, 0), 10)
    return claims
