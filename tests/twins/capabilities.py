"""Twins are planned for what both frameworks can run: a plan that drives both uses nothing else."""

from dataclasses import replace

import shardwright as sw


def common(*graphs: sw.Graph) -> tuple[sw.Graph, ...]:
    """The graphs with the schedules and memory policies that all of their frameworks can run."""
    able = [graph.capabilities for graph in graphs]
    shared = {
        "split_backward": all(a.split_backward for a in able),
        "split_with_recompute": all(a.split_with_recompute for a in able),
        "shard_levels": tuple(level for level in able[0].shard_levels if all(level in a.shard_levels for a in able)),
        "recomputes": tuple(mode for mode in able[0].recomputes if all(mode in a.recomputes for a in able)),
    }
    return tuple(replace(g, capabilities=replace(g.capabilities, **shared)) for g in graphs)
