"""Modules placed by hand on the ranks of the pipeline, under ``auto_partition=False``."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from shardwright.backends.torch.capture.partition_marks import place, placing
from shardwright.core.errors import ShardwrightError
from shardwright.torch import session as sessions


@contextmanager
def partition(index: int) -> Iterator[None]:
    """A context in which new modules are placed on rank ``index`` of the pipeline; the innermost context wins. Modules
    that are made in none are in ``default_partition``, but for those of modules that have a place.

    Raises ShardwrightError: there is no such rank, or ``auto_partition`` is on, under which the planner cuts the model.
    """
    with placing(_required(index, "partition")):
        yield


def set_partition(module: nn.Module, index: int) -> None:
    """Place a module, with all below it that has no place of its own, on rank ``index`` of the pipeline. Call it before
    the first step.

    Raises ShardwrightError: as `partition`, and for an argument that is no module.
    """
    place(module, _required(index, "set_partition"))


def _required(index: int, name: str) -> int:
    config = sessions.current().config
    ranks = config.pipeline_parallel_degree
    if type(index) is not int or not 0 <= index < ranks:
        raise ShardwrightError(
            f"{name} was given {index!r}: expected a partition from 0 to {ranks - 1} (pipeline_parallel_degree={ranks})"
        )
    if config.auto_partition:
        raise ShardwrightError(
            f"{name}({index}) places modules by hand, and auto_partition=True lets the planner place them: set "
            f"auto_partition=False, or leave out {name}"
        )
    return index
