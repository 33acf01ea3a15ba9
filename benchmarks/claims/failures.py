"""Claims of what goes wrong: inputs of all kinds, deaths, and saving beside training."""

from collections.abc import Mapping, Sequence

from claims.verdict import Claims


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
