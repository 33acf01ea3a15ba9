"""``torch.sagemaker.distributed.checkpoint.state_dict_saver``, by torch's own savers."""

import os
from concurrent.futures import Future
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver

from shardwright.compat.torch_sagemaker.distributed.checkpoint.settings import require_no_effect

_ITS_OWN = {"coordinator_rank": 0, "wait_error_handling": True, "force_check_all_plans": True}
_ITS_OWN_ASYNC = {**_ITS_OWN, "queue": None, "sharded_strategy": None}
_pending: list[tuple[int, Future[Any]]] = []
_calls = 0


def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    **its_own: Any,
) -> None:
    """Save a state dict, as `torch.distributed.checkpoint.save`. Every rank calls this.

    Raises MissingCapabilityError for what belongs to S3.
    """
    require_no_effect("state_dict_saver.save", its_own, _ITS_OWN)
    state_dict_saver.save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner,
        process_group=process_group, no_dist=not dist.is_initialized(),
    )  # fmt: skip


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: Any = None,
    planner: Any = None,
    process_group: dist.ProcessGroup | None = None,
    **its_own: Any,
) -> None:
    """Save a copy of a state dict in the background, as `torch.distributed.checkpoint.async_save`, once the saves that
    were begun before are done. Every rank calls this; `maybe_finalize_async_calls` waits.

    Raises MissingCapabilityError for what belongs to S3.
    """
    global _calls
    require_no_effect("state_dict_saver.async_save", its_own, _ITS_OWN_ASYNC)
    for _, future in _pending:
        future.result()
    saved: Any = state_dict_saver.async_save(
        state_dict, checkpoint_id=checkpoint_id, storage_writer=storage_writer, planner=planner,
        process_group=process_group,
    )  # fmt: skip
    _pending.append((_calls, saved))
    _calls += 1


def maybe_finalize_async_calls(blocking: bool = True, process_group: dist.ProcessGroup | None = None) -> list[int]:
    """The numbers of the calls of `async_save` that are done, with ``blocking`` of all that were begun. Raises what one
    of them failed with."""
    done = [(number, future) for number, future in _pending if blocking or future.done()]
    for entry in done:
        _pending.remove(entry)
    for _, future in done:
        future.result()
    return [number for number, _ in done]
