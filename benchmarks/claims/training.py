"""Claims of what steps of split models do: that they end as steps of the unsplit model, and how fast."""

from collections.abc import Mapping, Sequence
from typing import Any

from claims.verdict import Claims

ZOO_CLASSES, ZOO_INEXACT = 431, 1
"""Of `transformers` that are built and run plainly; and those whose own gradients rounding takes beyond the bound."""


def pipeline_speed(cases: Mapping[str, Mapping[str, float]]) -> Claims:
    """1F1B within 3% of its bound, and no slower than torch's own: of each case both as ratios of times."""
    claims = Claims()
    for case, ratios in cases.items():
        claims.at_most(f"{case}: 1F1B over its bound", ratios["bound"], 1.03)
        claims.at_most(f"{case}: 1F1B over torch's", ratios["torch"], 1.0)
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


def recording_time(cases: Mapping[str, Mapping[str, float]]) -> Claims:
    """By model and ranks, CPU seconds to record a new sequence length, under 0.3, and how many of the lengths were not
    recorded at all, as all must be."""
    claims = Claims()
    for case, found in cases.items():
        claims.at_most(f"{case}: seconds for a new sequence length", found["new_s"], 0.3)
        claims.holds(f"{case}: every length was recorded", found["missed"] <= 0)
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
