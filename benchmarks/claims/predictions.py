"""Claims of what plans say: seconds, answers of the search, and how long that takes."""

from collections.abc import Mapping, Sequence
from typing import Any

from claims.verdict import Claims


def mixed_clusters(times: Mapping[str, tuple[float, Sequence[float | None]]]) -> Claims:
    """By case, seconds of the plan for unlike devices, and of those that take them for alike or leave some out (None:
    does not fit). It is no slower than any."""
    claims = Claims()
    for case, (aware, others) in times.items():
        fit = [time for time in others if time is not None]
        ratio = aware / min(fit) if fit else float("nan")
        claims.at_most(f"{case}: over the best of the others", ratio, 1 + 1e-6)
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
