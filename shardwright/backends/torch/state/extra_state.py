"""The extra state of modules (`get_extra_state`, `set_extra_state`), which lies where each module runs."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from shardwright.backends.torch.compat import EXTRA_STATE_KEY
from shardwright.backends.torch.state.ownership import Ownership, extra_state_paths
from shardwright.core.errors import MissingCapabilityError


def key_of(path: str) -> str:
    """The key in a state dict of the extra state of the module at a path."""
    return f"{path}.{EXTRA_STATE_KEY}" if path else EXTRA_STATE_KEY


def is_extra(key: str) -> bool:
    """Whether a key of a state dict is of extra state."""
    return key.rpartition(".")[2] == EXTRA_STATE_KEY


def extra_keys(model: nn.Module) -> list[str]:
    """The keys of the extra states of all modules, under each of their names."""
    return [key_of(path) for paths in extra_state_paths(model).values() for path in paths]


def held_extra(ownership: Ownership) -> dict[str, Any]:
    """The extra states of the modules that this pipeline rank is the home of, by their keys.

    Raises MissingCapabilityError for a module that runs on several ranks of the pipeline, each of which has a state of
    its own.
    """
    found: dict[str, Any] = {}
    for first, paths in extra_state_paths(ownership.model).items():
        ranks = _ranks_of(ownership, first)
        if len(ranks) > 1:
            raise MissingCapabilityError(
                f"module {first!r} has extra state (get_extra_state) and runs on the pipeline ranks "
                f"{', '.join(map(str, ranks))}, each of which has a state of its own: which one is to be saved is not "
                f"known. Let it run on one stage, or keep that state in a buffer"
            )
        if ownership.rank == ranks[0]:
            state = ownership.modules[first].get_extra_state()
            found |= {key_of(path): state for path in paths}
    return found


def keys_elsewhere(ownership: Ownership) -> set[str]:
    """The keys of the extra states of modules that do not run on this pipeline rank."""
    paths = extra_state_paths(ownership.model).items()
    return {key_of(one) for first, every in paths if ownership.rank not in _ranks_of(ownership, first) for one in every}


def set_extra(ownership: Ownership, states: Mapping[str, Any]) -> None:
    """Give extra states, by their keys, to the modules that run on this pipeline rank."""
    for first, paths in extra_state_paths(ownership.model).items():
        given = [states[key] for key in map(key_of, paths) if key in states]
        if given and (ownership.placement is None or ownership.rank in _ranks_of(ownership, first)):
            ownership.modules[first].set_extra_state(given[0])


def _ranks_of(ownership: Ownership, first: str) -> tuple[int, ...]:
    placement = ownership.placement
    return (ownership.rank,) if placement is None else placement.modules.get(first, (0,))
