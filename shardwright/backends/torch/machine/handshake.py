"""The exchange between ranks before there is any process group: groups made for different meshes would never meet."""

import json
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from shardwright.backends.torch.compat import Store
from shardwright.backends.torch.machine.agreement import values_text
from shardwright.backends.torch.machine.control_channel import by_value, ranks_text
from shardwright.core.errors import ClusterError, DisagreementError

LOOK_S = 0.005
"""The interval in seconds at which rank 0 looks which ranks have come."""
GRACE_S = 5.0
"""The time in seconds that rank 0 waits for the others once it knows of a difference, so that it can name all of
them."""


def shake_hands(
    store: Store, rank: int, world_size: int, said: Mapping[str, str], failure: Exception | None, timeout_s: float
) -> None:
    """Go on only when every rank has come, says the same, and none has failed. Every rank calls this.

    Args:
        said: the values that must be the same on all ranks, by name.
        failure: the reason why this rank cannot start.

    Raises:
        DisagreementError: on every rank: ranks differ, or another one has failed.
        ClusterError: a rank did not come in time.
        Exception: ``failure``, on this rank.
    """
    round_number = store.add(f"shardwright/handshakes/{rank}", 1)
    prefix = f"shardwright/handshake/{round_number}"
    size = {"the number of ranks": str(world_size)}
    own = {"failure": "" if failure is None else f"{type(failure).__name__}: {failure}", "said": size | dict(said)}
    store.set(f"{prefix}/{rank}", json.dumps(own))
    if rank == 0:
        verdict = _verdict(store, prefix, world_size, timeout_s)
        store.set(f"{prefix}/verdict", f"{world_size}:{verdict or ':'}")
    try:
        store.wait([f"{prefix}/verdict"], timedelta(seconds=timeout_s + 5.0))
    except RuntimeError as error:
        if failure is not None:
            raise failure from error
        raise ClusterError(
            f"rank 0 did not come to sw.init within {timeout_s:g} s: its own output says why; every rank calls sw.init"
        ) from error
    size_of_first, kind, text = store.get(f"{prefix}/verdict").decode().split(":", 2)
    # A store that rank 0 serves must outlive what the others read from it.
    store.set(f"{prefix}/read/{rank}", "")
    if rank == 0 and kind:
        _wait_for_readers(store, prefix, world_size)
    if failure is not None:
        raise failure
    if int(size_of_first) != world_size:
        raise DisagreementError(
            f"rank 0 was started as one of {size_of_first} ranks, and this one, rank {rank}, as one of {world_size}: "
            f"start all of them by one launcher, with the same number"
        )
    if kind == "absent":
        raise ClusterError(text)
    if kind:
        raise DisagreementError(text)


def _wait_for_readers(store: Store, prefix: str, world_size: int) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < GRACE_S:
        if all(store.check([f"{prefix}/read/{other}"]) for other in range(world_size)):
            return
        time.sleep(LOOK_S)


def _verdict(store: Store, prefix: str, world_size: int, timeout_s: float) -> str:
    every: dict[int, Any] = {}
    begun = time.monotonic()
    reason = ""
    limit_s = timeout_s
    while len(every) < world_size and time.monotonic() - begun < limit_s:
        for rank in range(world_size):
            if rank not in every and store.check([f"{prefix}/{rank}"]):
                every[rank] = json.loads(store.get(f"{prefix}/{rank}").decode())
        found = _difference(every)
        if found and not reason:
            limit_s = min(timeout_s, time.monotonic() - begun + GRACE_S)
        reason = found
        if len(every) < world_size:
            time.sleep(LOOK_S)
    if reason or len(every) == world_size:
        return reason
    lacking = [rank for rank in range(world_size) if rank not in every]
    return (
        f"absent:{ranks_text(lacking)} of {world_size} did not come to sw.init within {timeout_s:g} s: the output of "
        f"these processes says why; every rank calls sw.init"
    )


def _difference(every: Mapping[int, Any]) -> str:
    failures = {rank: entry["failure"] for rank, entry in every.items() if entry["failure"]}
    if failures:
        said = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in by_value(failures).items())
        return f"failed:sw.init failed on {said}. No rank starts without the others"
    texts = {rank: entry["said"] for rank, entry in sorted(every.items())}
    if len({json.dumps(said, sort_keys=True) for said in texts.values()}) <= 1:
        return ""
    return (
        f"differ:the ranks disagree in sw.init: {values_text(texts)}. Give every rank the same configuration and the "
        f"same plan, and start all of them with the same versions"
    )
