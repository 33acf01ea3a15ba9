"""Claims of what is held: predicted memory, offload and out of core."""

from collections.abc import Mapping, Sequence

from claims.verdict import Claims


def memory_ranks(ratios: Mapping[str, Sequence[float]]) -> Claims:
    """Predicted over measured peaks, by plan and rank: never too low, and within 3%."""
    claims = Claims()
    for plan, of_ranks in ratios.items():
        claims.holds(f"{plan}: ranks were measured", bool(of_ranks))
        for rank, ratio in enumerate(of_ranks):
            claims.at_least(f"{plan}, rank {rank}: predicted over measured", ratio, 1.0)
            claims.at_most(f"{plan}, rank {rank}: predicted over measured", ratio, 1.03)
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
