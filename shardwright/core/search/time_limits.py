"""A deadline or a budget that no plan meets: what the fastest plan takes, what the cheapest costs, what would do."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardwright.core.cluster.cluster import Cluster
from shardwright.core.errors import PlanError
from shardwright.core.plan.training_run import DAY_S, TrainingRun, days_text, usd_per_hour
from shardwright.core.search.devices_in_use import parts
from shardwright.core.search.request import Request

MOST_DEVICES = 4096
"""The most devices that are tried, as where a model does not fit (`refusal.smallest_cluster`). More and more are tried
until they are no faster."""

FastestStep = Callable[[Cluster, Request], float | None]
"""The seconds of the fastest step on all of a cluster; None where nothing fits."""


@dataclass(frozen=True, slots=True)
class Possible:
    """The training on some devices."""

    devices: int
    days: float
    usd: float | None

    def __str__(self) -> str:
        cost = "" if self.usd is None else f" for {self.usd:,.0f} USD"
        return f"{days_text(self.days)}{cost}"


def require_price(cluster: Cluster, request: Request) -> None:
    """Raise PlanError for a budget where a device has no price."""
    if request.budget is not None and usd_per_hour(cluster, request.price) is None:
        unknown = next(g.device.name for g in cluster.groups if g.device.price_usd_per_hour is None)
        raise PlanError(
            f"budget={request.budget:g}: the price of {unknown} is not known: give price=, US dollars for an hour of "
            f"one device"
        )


def out_of_time(
    cluster: Cluster, request: Request, step_s: float, tokens_per_step: int, fastest_step: FastestStep
) -> str:
    """The message of a request whose deadline or budget no plan meets, though plans fit.

    Args:
        step_s: the seconds of the fastest plan's step on the devices that the request lets it use.
        fastest_step: for other devices; the fastest of plain pipelines is near enough.
    """
    run, batch = request.training_run, request.batch

    def possible(on: Cluster, seconds: float) -> Possible:
        priced = replace(run, usd_per_hour=usd_per_hour(on, request.price))
        took = priced.taking(seconds, batch, tokens_per_step)
        assert took is not None
        return Possible(on.world_size, took.days, took.usd)

    free = request.unpinned(schedule="1f1b", virtual_stages=1, placement_order="PDT")
    found, enough, last_s = [possible(cluster, step_s)], None, math.inf
    for on in _sizes(cluster, free):
        seconds = fastest_step(on, free)
        if seconds is None:
            continue
        if on.world_size > cluster.world_size and seconds >= last_s:
            break
        last_s = seconds
        each = possible(on, seconds)
        if on.world_size <= cluster.world_size:
            found.append(each)
        if _meets(run, each):
            enough = each
            break
    said = []
    if run.deadline_s is not None:
        said.append(f"deadline={request.deadline!r} ({days_text(run.deadline_s / DAY_S)})")
    if run.budget_usd is not None:
        said.append(f"budget={run.budget_usd:g} USD")
    quickest = found[0]
    text = (
        f"{' and '.join(said)}: no plan on {cluster} trains on {_amount(run)} so; the fastest of all takes {quickest} "
        f"(a step of {step_s:.4g} s)"
    )
    priced = [each for each in found if each.usd is not None]
    if run.budget_usd is not None and priced:
        cheapest = min(priced, key=lambda each: each.usd or 0.0)
        text += f"; the cheapest found, on {cheapest.devices} of its devices, takes {cheapest}"
    if enough is not None:
        return f"{text}; {enough.devices} devices of this kind would do: {enough}"
    return f"{text}; with batch={batch}, no number of such devices was found that would do"


def _meets(run: TrainingRun, possible: Possible) -> bool:
    in_time = run.deadline_s is None or possible.days * DAY_S <= run.deadline_s
    return in_time and (run.budget_usd is None or (possible.usd is not None and possible.usd <= run.budget_usd))


def _amount(run: TrainingRun) -> str:
    return f"{run.tokens:.4g} tokens" if run.tokens else f"{run.samples:,} samples"


def _sizes(cluster: Cluster, request: Request) -> Iterator[Cluster]:
    """Parts of the cluster, and of one kind of node twice as many again and again; the fewest devices first."""
    yield from sorted((part.cluster for part in parts(cluster, replace(request, devices="auto"))), key=_size)
    group, between = cluster.groups[0], cluster.inter_node
    nodes = 2 * group.nodes
    while len(cluster.groups) == 1 and between is not None and nodes * group.devices_per_node <= MOST_DEVICES:
        yield Cluster.of_groups([replace(group, nodes=nodes)], between)
        nodes *= 2


def _size(cluster: Cluster) -> int:
    return cluster.world_size
