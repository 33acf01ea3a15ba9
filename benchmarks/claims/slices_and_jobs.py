"""Claims of slices of a sequence, and many models on few devices."""

from collections.abc import Mapping, Sequence
from typing import Any

from claims.verdict import Claims


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


def jobs_runtime(times: Mapping[str, float], simulated_s: float, closed_form: float) -> Claims:
    """Six models on two ranks, seconds by form: the makespan of the jobs within 10% of the simulated one, and shorter
    than one after another on two stages without microbatches by at least 0.85 of the gain that the closed form says."""
    claims, nothing = Claims(), float("nan")
    makespan, stages = times.get("jobs", nothing), times.get("two stages, no microbatches", nothing)
    claims.at_most("makespan, off the simulated one by", abs(makespan / simulated_s - 1), 0.10)
    claims.at_least("gain over two stages, of the closed form's", stages / makespan / closed_form, 0.85)
    return claims


def jobs_runtime_jax(figures: Mapping[str, float]) -> Claims:
    """Six models on two devices in JAX: all trained; the measured makespan within 10% of the simulated one; no device
    above its budget."""
    claims = Claims()
    claims.at_least("jobs trained to their end", figures["jobs"], 6)
    claims.at_most("measured makespan, off the simulated by", abs(figures["makespan"] - 1), 0.10)
    claims.at_most("measured makespan, off that of its own passes by", abs(figures["own passes"] - 1), 0.10)
    claims.at_most("most held, over the budget", figures["budget"], 1.0)
    return claims


def jobs_memory(rows: Mapping[str, Mapping[str, float]]) -> Claims:
    """Of each model in shards: the fullest pass within the budget, predicted at most 3% too high, and no pass of more
    bytes than predicted."""
    claims = Claims()
    claims.at_least("models", len(rows), 4)
    for name, row in rows.items():
        claims.at_most(f"{name}: fullest pass over the budget", row["budget"], 1.0)
        claims.at_most(f"{name}: fullest pass, predicted over tracked", row["fullest"], 1.03)
        claims.at_least(f"{name}: any pass, predicted over tracked", row["least"], 1.0)
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
        if row.get("ran", "").startswith("differs"):
            claims.holds(f"{name}: its step in slices {row['ran']}", False)
    causal = [row for row in rows.values() if row["causal"]]
    share = sum(row["sliced"] for row in causal) / len(causal) if causal else float("nan")
    claims.at_least("share of the causal classes that run in slices", share, least)
    return claims
