"""RaNNC's cut: tasks join into atoms, atoms into blocks, blocks into stages (arXiv 2103.16063, section 3).

Atoms are the tasks that depend on the model's input, each with the constant tasks that feed it. Blocks grow from atoms,
the cheapest first. A block joins the neighbour that saves most communication, as long as the union is convex, fits the
memory and is no slower than mean + 2 standard deviations. Then the cheapest neighbours in topological order join until
few enough are left. Stages come from a dynamic programme over those (`partition.pareto`).
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwright.core.errors import PlanError
from shardwright.core.partition.exact import range_sums
from shardwright.core.partition.pareto import StageTimes, masked, pareto_cut
from shardwright.core.partition.tasks import Tasks

MOST_BLOCKS = 32
MEMORY_SHARE = 0.9
"""The share of the device's memory that a stage may fill, as in RaNNC."""


@dataclass(slots=True)
class Block:
    """Tasks that stay together."""

    tasks: list[int]
    seconds: float
    bytes: float
    first: int
    """The first of the block's tasks in the order of the graph; it names the block."""
    before: dict[int, int] = field(default_factory=dict)
    """The bytes from each block before this one."""
    after: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BlockCut:
    """The result of RaNNC's method."""

    blocks: tuple[tuple[int, ...], ...]
    """The tasks of every block, in topological order."""
    stage_of: tuple[int, ...]
    """The stage of every task."""
    objective_s: float
    """The largest forward + largest backward over the stages, transfers included."""


def block_cut(
    tasks: Tasks,
    stages: int,
    *,
    send_s_per_byte: float,
    limit_bytes: float,
    live: Sequence[int] = (),
    most_blocks: int = MOST_BLOCKS,
) -> BlockCut | None:
    """The cut of tasks into ``stages`` stages, one device each.

    Args:
        send_s_per_byte: the seconds per byte of a message between two devices.
        limit_bytes: a device's memory for parameters, their states and activations; a `MEMORY_SHARE` of it is used.
        live: the number of microbatches of each stage whose activations are kept at once; empty: one each.
        most_blocks: the number of blocks in the dynamic programme; at least the number of stages is used.

    Returns None where no cut fits. Raises PlanError for fewer tasks than stages.
    """
    limit = limit_bytes * MEMORY_SHARE
    live = tuple(live) or (1,) * stages
    blocks = blocks_of(tasks, max(stages, most_blocks), limit, min(live))
    if len(blocks) < stages:
        raise PlanError(f"{stages} stages need as many blocks: the model has {len(blocks)}; use at most that many")
    block_of = {task: index for index, held in enumerate(blocks) for task in held}
    n = len(blocks)
    forward = range_sums([sum(tasks.forward_s[t] for t in held) for held in blocks])
    backward = range_sums([sum(tasks.backward_s[t] for t in held) for held in blocks])
    state = range_sums([sum(tasks.state_bytes[t] for t in held) for held in blocks])
    kept = range_sums([sum(tasks.kept_bytes[t] for t in held) for held in blocks])
    crossing = np.zeros(n + 1)
    for made, used, size in tasks.edges:
        crossing[block_of[made] + 1 : block_of[used] + 1] += size
    sent = send_s_per_byte * crossing
    leaving = sent.copy()
    leaving[-1] = 0.0
    plain = StageTimes(forward + leaving[None, :], backward + sent[:, None])
    times = [masked(plain, state + count * kept <= limit) for count in live]
    cut = pareto_cut(lambda device, width: times[device], n, stages, stages, one_state=True)
    if cut is None:
        return None
    stage_of_block = np.searchsorted(np.asarray(cut.starts), np.arange(n), side="right") - 1
    stage_of = tuple(int(stage_of_block[block_of[task]]) for task in range(len(tasks)))
    return BlockCut(tuple(tuple(held) for held in blocks), stage_of, cut.objective_s)


def blocks_of(tasks: Tasks, most: int, limit_bytes: float, live: int = 1) -> list[tuple[int, ...]]:
    """At most ``most`` convex blocks, in topological order; more where the memory does not let them join."""
    blocks = _atoms(tasks, live)
    _grow(blocks, limit_bytes, most)
    order = _topological(blocks)
    return _few([blocks[name] for name in order], most, limit_bytes)


def _atoms(tasks: Tasks, live: int) -> dict[int, Block]:
    """The atoms, as blocks: tasks that depend on the input, each with the constant tasks it is first to use."""
    users: list[list[int]] = [[] for _ in range(len(tasks))]
    for made, used, _ in tasks.edges:
        users[made].append(used)
    atom_of = list(range(len(tasks)))
    for task in reversed(range(len(tasks))):
        if tasks.constant[task] and users[task]:
            atom_of[task] = min(atom_of[user] for user in users[task])
    blocks: dict[int, Block] = {}
    members: dict[int, list[int]] = {}
    for task, atom in enumerate(atom_of):
        members.setdefault(atom, []).append(task)
    for atom, held in members.items():
        seconds = sum(tasks.forward_s[t] + tasks.backward_s[t] for t in held)
        size = sum(tasks.state_bytes[t] + live * tasks.kept_bytes[t] for t in held)
        blocks[atom] = Block(held, seconds, size, atom)
    for made, used, size in tasks.edges:
        a, b = atom_of[made], atom_of[used]
        # A constant that a later atom uses too is made again there, as RaNNC clones it.
        if a != b and not tasks.constant[made]:
            blocks[a].after[b] = blocks[a].after.get(b, 0) + size
            blocks[b].before[a] = blocks[b].before.get(a, 0) + size
    return blocks


def _grow(blocks: dict[int, Block], limit_bytes: float, most: int) -> None:
    """Join blocks, the cheapest first, until none may join any more or few enough are left."""
    last_of = np.full(max(max(block.tasks) for block in blocks.values()) + 1, -1, dtype=np.int64)
    for name, block in blocks.items():
        last_of[name] = max(block.tasks)
    while len(blocks) > most:
        seconds = [b.seconds for b in blocks.values()]
        longest = float(np.mean(seconds) + 2 * np.std(seconds))
        joined = False
        queue = [(b.seconds, name) for name, b in blocks.items()]
        heapq.heapify(queue)
        while queue and len(blocks) > most:
            took, name = heapq.heappop(queue)
            if name not in blocks or blocks[name].seconds != took:
                continue
            partner = _partner(blocks, last_of, blocks[name], longest, limit_bytes)
            if partner is not None:
                last = int(last_of[[*partner]].max())
                last_of[[*partner]] = -1
                merged = _join(blocks, *partner)
                last_of[merged.first] = last
                heapq.heappush(queue, (merged.seconds, merged.first))
                joined = True
        if not joined:
            return


def _partner(
    blocks: dict[int, Block], last_of: NDArray[np.int64], block: Block, longest: float, limit_bytes: float
) -> tuple[int, int] | None:
    """The edge at a block whose ends are best joined: the one that saves most communication, in either direction."""
    edges = [(size, block.first, name) for name, size in block.after.items()]
    edges += [(size, name, block.first) for name, size in block.before.items()]
    edges.sort(key=lambda edge: (-edge[0], edge[1], edge[2]))
    for _size, a, b in edges:
        one, other = blocks[a], blocks[b]
        fits = one.bytes + other.bytes <= limit_bytes and one.seconds + other.seconds <= longest
        if fits and _is_convex(blocks, last_of, a, b):
            return a, b
    return None


def _is_convex(blocks: dict[int, Block], last_of: NDArray[np.int64], a: int, b: int) -> bool:
    """Whether no path leads from ``a`` out and back to ``b``.

    Edges go to later tasks. Beyond the point where every block that starts earlier has ended, no edge leads back.
    """
    point = int(last_of[b])
    while (further := int(last_of[: point + 1].max())) > point:
        point = further
    seen: set[int] = set()
    ways = [name for name in blocks[a].after if name != b]
    while ways:
        name = ways.pop()
        if name == b:
            return False
        if name in seen or name > point:
            continue
        seen.add(name)
        ways.extend(blocks[name].after)
    return True


def _join(blocks: dict[int, Block], a: int, b: int) -> Block:
    one, other = blocks.pop(a), blocks.pop(b)
    name = min(one.first, other.first)
    merged = Block(one.tasks + other.tasks, one.seconds + other.seconds, one.bytes + other.bytes, name)
    for side, back in (("before", "after"), ("after", "before")):
        mine: dict[int, int] = getattr(merged, side)
        for part in (one, other):
            for neighbour, size in getattr(part, side).items():
                if neighbour not in (a, b):
                    mine[neighbour] = mine.get(neighbour, 0) + size
        for neighbour in mine:
            theirs: dict[int, int] = getattr(blocks[neighbour], back)
            theirs.pop(a, None)
            theirs.pop(b, None)
            theirs[name] = mine[neighbour]
    blocks[name] = merged
    return merged


def _topological(blocks: dict[int, Block]) -> list[int]:
    """The blocks in topological order; of several that may come next, the one that starts first."""
    import networkx as nx  # which nothing else needs to plan: loading it takes a while

    graph = nx.DiGraph({name: block.after.keys() for name, block in blocks.items()})
    return list(nx.lexicographical_topological_sort(graph))


def _few(order: Iterable[Block], most: int, limit_bytes: float) -> list[tuple[int, ...]]:
    """The tasks of the blocks when the cheapest neighbours are joined to at most ``most``, within the memory."""
    held = [(block.seconds, block.bytes, sorted(block.tasks)) for block in order]
    while len(held) > most:
        pairs = [
            (held[i][0] + held[i + 1][0], i) for i in range(len(held) - 1) if held[i][1] + held[i + 1][1] <= limit_bytes
        ]
        seconds, at = min(pairs, default=(math.inf, -1))
        if at < 0:
            break
        held[at : at + 2] = [(seconds, held[at][1] + held[at + 1][1], sorted(held[at][2] + held[at + 1][2]))]
    return [tuple(tasks) for _, _, tasks in held]
