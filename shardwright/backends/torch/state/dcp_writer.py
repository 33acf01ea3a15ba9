"""Saved states written as folders of `torch.distributed.checkpoint` (DCP), by torch's own writer."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.backends.torch.state.dcp_metadata import METADATA
from shardwright.backends.torch.state.plain_states import optimizer_states, state_value
from shardwright.backends.torch.state.saved_parts import MODEL, NUMBER, dtype_of, read_whole
from shardwright.core.checkpoint.saved_tensors import SavedState
from shardwright.core.errors import CheckpointError


def write_dcp(state: SavedState, path: Path) -> None:
    """Write a saved state as a DCP folder, by torch's own writer, in the layout of
    `torch.distributed.checkpoint.state_dict.get_state_dict`: ``{"model": …, "optim": …}``, further optimizers as
    ``optim1`` and so on. No more than one tensor is in memory at a time.

    Raises CheckpointError where the state has the names of another framework, the folder holds a checkpoint already, or
    cannot be written.
    """
    if state.framework != "torch":
        raise CheckpointError(
            f"{state} has the names of a {state.framework} run, and DCP those of a torch model: translate it first, by "
            f"a map of names"
        )
    if (path / METADATA).exists():
        raise CheckpointError(f"{path} holds a DCP checkpoint already: name another folder")
    labels: dict[str, str] = {}
    content = state.content(lambda name: read_whole(state, name))
    labelled = {name: f"{MODEL}/{name}" for name in state.names(MODEL)}
    ties = content.get("ties", {})
    labelled |= {alias: labelled[name] for alias, name in ties.items() if name in labelled}
    model: dict[str, Any] = {name: _stand_in(state, label) for name, label in labelled.items()}
    labels |= {f"model.{name}": label for name, label in labelled.items()}
    model |= content.get("extra") or {}
    tree: dict[str, Any] = {"model": model}
    for number, told in enumerate(content["optimizers"]):
        key = f"optim{number or ''}"
        states: dict[str, dict[str, Any]] = {}
        for name, held in optimizer_states(state, number).items():
            for kind, label in held.items():
                if kind.endswith(NUMBER):
                    states.setdefault(name, {})[kind.removesuffix(NUMBER)] = state_value(state, label)
                else:
                    states.setdefault(name, {})[kind] = _stand_in(state, label)
                    labels[f"{key}.state.{name}.{kind}"] = label
        tree[key] = {"state": states, "param_groups": [dict(group) for group in told["groups"]]}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            # A file for each value: of one file the writer keeps all tensors until it ends.
            writer = FileSystemWriter(path, single_file_per_rank=False, overwrite=False)
            save(tree, storage_writer=writer, planner=_Streamed(state, labels), no_dist=True)
    except (OSError, RuntimeError, CheckpointException) as failed:
        raise CheckpointError(f"{path}: the DCP folder cannot be written: {failed}") from failed


class _Streamed(DefaultSavePlanner):
    """A planner that reads each tensor when it is its turn to be written."""

    def __init__(self, state: SavedState, labels: Mapping[str, str]) -> None:
        super().__init__()
        self._state, self._labels = state, labels

    def lookup_object(self, index: Any) -> Any:
        label = self._labels.get(index.fqn)
        return super().lookup_object(index) if label is None else read_whole(self._state, label)


def _stand_in(state: SavedState, label: str) -> torch.Tensor:
    """A tensor without memory, of a saved one's dtype and shape."""
    told = state.tensor(label)
    return torch.empty(told.shape, dtype=dtype_of(told.dtype, label), device="meta")
