"""Placements of stages on the ranks of a pipeline: the rank that holds each stage."""


def looped(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The placement of stage s on rank s mod ranks: round the ranks (Narayanan et al., 2104.04473, section 2.2)."""
    return tuple(stage % ranks for stage in range(ranks * virtual_stages))


def vee(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """The placement down the ranks and back up: the first and last stage share rank 0 (2401.10241, section 6)."""
    down = list(range(ranks))
    return tuple(rank for turn in range(virtual_stages) for rank in (down if turn % 2 == 0 else reversed(down)))
