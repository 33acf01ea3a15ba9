"""Twins are planned for what both frameworks can run: a plan that drives both uses nothing else."""

from dataclasses import replace

import shardwright as sw


def common(*graphs: sw.Graph) -> tuple[sw.Graph, ...]:
    """The graphs with the schedules that all of their frameworks can run."""
    split = all(graph.capabilities.split_backward for graph in graphs)
    return tuple(replace(g, capabilities=replace(g.capabilities, split_backward=split)) for g in graphs)
