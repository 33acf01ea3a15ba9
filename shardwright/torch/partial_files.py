"""`save` and `load` of SageMaker: objects in files of ``torch.save``, whole or one for each model-parallel rank.

Both are of one rank and wait for no other, as scripts call them on some ranks alone. Files hold tensors, numbers, texts
and their lists, tuples and dicts: nothing that is read is run.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from shardwright.backends.torch.state.optimizer_states import LOCAL
from shardwright.core.checkpoint.content import encoded
from shardwright.core.errors import CheckpointError
from shardwright.core.values.text_files import path_of
from shardwright.torch import groups
from shardwright.torch import session as sessions

PARTITION, OBJECT = "partition", "object"
"""The keys of a partial file: the partition that it was written under with this rank's place in it, and the object."""


def save(obj: Any, f: str | Path, partial: bool = True) -> None:
    """Save an object, as ``torch.save`` does.

    Args:
        obj: of tensors, numbers, texts, lists, tuples, sets and dicts, as state dicts are.
        f: the path of a file.
        partial: whether each rank has an object of its own, as `DistributedModel.local_state_dict` gives it: the file
            of a rank is ``f_PP_TP``, its places on the axes, and where replicas share their state ``f_PP_TP_RDP``.
            Replicas that hold the same write one file. False: one file ``f``, written by rank 0; calls on other ranks
            do nothing.

    Raises:
        CheckpointError: the object holds something that only a pickle would, or the file cannot be written: what was
            there before stays.
    """
    place = _place()
    if place["replica"] if partial else place["rank"]:
        return
    encoded(obj, lambda value, _: "tensor" if isinstance(value, torch.Tensor) else None, "the object")
    path = path_of(f, CheckpointError)
    held = obj
    if partial:
        path = _file_of(path, place)
        held = {PARTITION: {key: place[key] for key in _KEYS}, OBJECT: obj}
    aside = path.with_name(path.name + f".part{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(held, aside)
        os.replace(aside, path)
    except (OSError, RuntimeError) as failed:  # torch's writer raises the latter on a full disk
        aside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written: {failed}; what was there before stays") from failed


def load(f: str | Path, map_location: Any = "cpu", partial: bool = True) -> Any:
    """The object that `save` wrote.

    Args:
        f: the path that `save` was given.
        map_location: as in ``torch.load``.
        partial: whether it was saved in parts. Parts of pipeline stages are put together: whole state dicts, which
            ``load_state_dict`` takes at any time and under any partition. Where a tensor axis or replicas divided
            tensors, or stages saved different values in one place, this rank's own part is given, under the same
            partition; ``load_state_dict`` takes it once a step has run.

    Raises:
        CheckpointError: a file is missing, damaged or none of `save`'s, holds what would have to be run, or was saved
            under another partition that divided tensors.
    """
    path = path_of(f, CheckpointError)
    if not partial:
        return _read(path, map_location)
    place = _place()
    own = _file_of(path, place)
    some = own if own.exists() else next(iter(sorted(path.parent.glob(f"{path.name}_0_0*"))), own)
    saved = _part(some, map_location)
    before = saved[PARTITION]
    is_same = some == own and all(before[key] == place[key] for key in _SIZES)
    if before["tp_size"] == 1 and before["shards"] == 1:
        try:
            return _of_stages(path, before, map_location)
        except _StagesDiffer:
            if not is_same:
                raise
    if is_same:
        return saved[OBJECT]
    raise CheckpointError(
        f"{path} was saved under pp {before['pp_size']}, tp {before['tp_size']} and {before['shards']} shards of each "
        f"parameter, and this run has pp {place['pp_size']}, tp {place['tp_size']} and {place['shards']}: divided "
        f"tensors are not put together from such files; sw.save_checkpoint and sw.resume_from_checkpoint do that"
    )


class _StagesDiffer(CheckpointError):
    """Stages saved different values in one place."""


def _of_stages(path: Path, before: Mapping[str, int], map_location: Any) -> Any:
    """The parts of all stages put together."""
    merged: Any = None
    for stage in range(before["pp_size"]):
        part = path.with_name(f"{path.name}_{stage}_0")
        found = _part(part, map_location)
        if any(found[PARTITION][key] != before[key] for key in _SIZES):
            raise CheckpointError(f"{part} is of another partition than the others: the files are of several saves")
        merged = _merged(merged, found[OBJECT], str(path)) if stage else found[OBJECT]
    return merged


_SIZES = ("pp_size", "tp_size", "shards")
_KEYS = (*_SIZES, "pp_rank", "tp_rank", "shard")


def _place() -> dict[str, int]:
    """This rank's place, and whether it is a replica of another that holds the same."""
    flats = [run.runtime.split_model.parts.flat for run in sessions.current().models]
    shared = {(flat.data.ways, flat.data.coordinate) for flat in flats if flat is not None and flat.is_shared}
    if len(shared) > 1:
        ways = " and ".join(str(ways) for ways, _ in sorted(shared))
        raise CheckpointError(
            f"the models of this run have {ways} shards of each parameter, and a file of sw.save(..., partial=True) "
            f"is for one number: sw.save_checkpoint saves each model by itself"
        )
    shards, shard = next(iter(shared), (1, 0))
    return {
        "rank": groups.rank(), "pp_size": groups.pp_size(), "tp_size": groups.tp_size(), "shards": shards,
        "pp_rank": groups.pp_rank(), "tp_rank": groups.tp_rank(), "shard": shard,
        "replica": groups.rdp_rank() // shards,
    }  # fmt: skip


def _file_of(path: Path, place: Mapping[str, int]) -> Path:
    name = f"{path.name}_{place['pp_rank']}_{place['tp_rank']}"
    return path.with_name(f"{name}_{place['shard']}" if place["shards"] > 1 else name)


def _part(path: Path, map_location: Any) -> dict[str, Any]:
    found = _read(path, map_location)
    if not isinstance(found, dict) or found.keys() != {PARTITION, OBJECT} or set(found[PARTITION]) != set(_KEYS):
        raise CheckpointError(f"{path} is no file of sw.save(…, partial=True)")
    return found


def _read(path: Path, map_location: Any) -> Any:
    if not path.exists():
        near = sorted(one.name for one in path.parent.glob(f"{path.name.split('_')[0]}*"))[:6]
        raise CheckpointError(
            f"{path}: there is no such file; there {'is ' + ', '.join(near) if near else 'are none like it'}"
        )
    try:
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception as failed:  # of any class, where bytes are none of torch's
        raise CheckpointError(
            f"{path} cannot be read: {str(failed).partition(chr(10))[0][:200]}; files that hold more than tensors, "
            f"numbers, texts and their containers are not read, as that would run what is in them"
        ) from failed


def _merged(one: Any, other: Any, place: str) -> Any:
    """Two stages' parts of an object put together. Raises CheckpointError where they hold different things in one
    place."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = {
            key: _merged(one[key], other[key], f"{place}/{key}") if key in one and key in other
            else one.get(key, other.get(key))
            for key in (*one, *(key for key in other if key not in one))
        }  # fmt: skip
        both.pop(LOCAL, None)  # the states of all stages are whole
        return both
    if isinstance(one, list) and isinstance(other, list):
        if all(isinstance(name, str) for name in (*one, *other)):
            return list(dict.fromkeys([*one, *other]))
        if len(one) == len(other):
            return [_merged(a, b, f"{place}/{number}") for number, (a, b) in enumerate(zip(one, other, strict=True))]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if torch.equal(one, other):
            return one
    elif type(one) is type(other) and one == other:
        return one
    raise _StagesDiffer(f"{place}: the stages saved different values, so that one of them would be lost")
