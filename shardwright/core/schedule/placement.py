"""Placements of stages on the ranks of a pipeline: which rank holds which stage."""


def looped(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Stage s on rank s mod ranks: stages go round the ranks (Narayanan et al., 2104.04473, section 2.2)."""
    return tuple(stage % ranks for stage in range(ranks * virtual_stages))


def vee(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Stages go down the ranks and come back up: the first and the last share rank 0 (2401.10241, section 6)."""
    down = list(range(ranks))
    return tuple(rank for turn in range(virtual_stages) for rank in (down if turn % 2 == 0 else reversed(down)))
