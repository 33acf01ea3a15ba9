"""A pipeline's cut where the user says on which rank each module is."""

from collections.abc import Mapping

from shardwright.core.errors import PlanError
from shardwright.core.model.fold import Folded


def innermost(path: str, given: Mapping[str, int]) -> int:
    """The rank that is given for a module, or for the innermost module around it. ``given`` has one for the root."""
    while path not in given and path:
        path = path.rpartition(".")[0]
    return given[path]


def require_all_ranks(given: Mapping[str, int], ranks: int) -> None:
    """Raise PlanError where a module is given to a rank that there is not, or a rank is given none."""
    for path, rank in given.items():
        if not 0 <= rank < ranks:
            raise PlanError(
                f"{path or 'the model'} is placed in partition {rank}, and there are {ranks}: 0 to {ranks - 1}"
            )
    empty = sorted(set(range(ranks)) - set(given.values()))
    if empty:
        raise PlanError(
            f"no module is placed in partition {empty[0]} of {ranks}: place one there, or leave out "
            f"auto_partition=False and let the planner cut the model"
        )


def placed_starts(folded: Folded, given: Mapping[str, int], ranks: int) -> tuple[int, ...] | str:
    """The first unit of every rank's stage, or in words why no pipeline of units has its modules on those ranks.

    Args:
        given: the rank of each module that has one, by path; all that is inside of a module follows it. That of the
            root, "", is the default.
    """
    graph = folded.graph
    starts: list[int] = []
    for unit in folded.units:
        paths = dict.fromkeys(graph.calls[op.call].path for op in graph.ops[unit.first_op : unit.end_op])
        owners: dict[int, str] = {}
        for path in filter(None, paths):
            owners.setdefault(innermost(path, given), path)
        if len(owners) > 1:
            (one, first), (other, second) = list(owners.items())[:2]
            return f"{first!r} is in partition {one} and {second!r} in {other}, and both are in one unit of the model"
        if not owners:  # ops of the root alone stay with those before them
            continue
        ((owner, path),) = owners.items()
        now = len(starts) - 1
        if owner == now + 1:
            starts.append(unit.index if starts else 0)
        elif owner != now:
            return (
                f"{path!r} is in partition {owner} and runs behind modules of partition {max(now, 0)}"
                if starts
                else f"{path!r} runs first, and is in partition {owner}"
            )
    return tuple(starts) if len(starts) == ranks else f"nothing runs in partition {len(starts)}"
