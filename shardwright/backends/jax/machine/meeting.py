"""Meetings of a run's processes outside of steps: each tells how it fared, and hears it of all others.

They go through the key-value service of the run's coordinator, as no computation is under way that could carry them.
"""

import json
import time
from typing import Any

import jax

from shardwright.backends.jax.compat import key_value_service
from shardwright.backends.jax.machine.rendezvous import current
from shardwright.core.errors import DisagreementError, MissingCapabilityError

PART_S = 5.0
"""The seconds of one wait: in between the heartbeat is asked whether the others are alive."""
ALONE_S = 600.0
"""The seconds that processes are waited for in a run without a heartbeat."""


class Meetings:
    """The meetings of one run, in the order in which all processes hold them. With one process they do nothing."""

    def __init__(self) -> None:
        self._held = 0

    def meet(self, call: str, *, failure: Exception | None = None, told: Any = None, same: str = "") -> list[Any]:
        """What each process tells, in their order, once all have come to this call.

        failure: why this process cannot go on: it is raised here, and an error that names it on all others.
        told: JSON that the others need.
        same: a text that must be the same on all processes.

        Raises DisagreementError where another process has failed, made another call, or has another text.
        """
        if jax.process_count() == 1:
            if failure is not None:
                raise failure
            return [told]
        service = key_value_service()
        if service is None:
            raise MissingCapabilityError(
                f"{call}: this JAX has no key-value service, by which processes meet: save from one process"
            )
        self._held += 1
        said = None if failure is None else f"{type(failure).__name__}: {failure}"
        own = {"call": call, "failure": said, "told": told, "same": same}
        service.set(f"shardwright/meeting/{self._held}/{jax.process_index()}", json.dumps(own))
        if failure is not None:
            raise failure
        heard = [self._heard(service, process) for process in range(jax.process_count())]
        for process, other in enumerate(heard):
            if other["failure"] is not None:
                raise DisagreementError(f"{call}: process {process} has failed: {other['failure']}")
            if other["call"] != call:
                raise DisagreementError(f"process {process} calls {other['call']}, and this one {call}")
            if other["same"] != heard[0]["same"]:
                raise DisagreementError(
                    f"{call}: process {process} has {other['same']}, and process 0 has {heard[0]['same']}: give all "
                    f"processes one folder that they share, and the same values"
                )
        return [other["told"] for other in heard]

    def _heard(self, service: Any, process: int) -> dict[str, Any]:
        key = f"shardwright/meeting/{self._held}/{process}"
        until = time.monotonic() + ALONE_S
        while (text := service.get(key, PART_S)) is None:
            if (pulse := current()) is not None:
                pulse.require()
            elif time.monotonic() > until:
                raise DisagreementError(f"process {process} did not come to this call within {ALONE_S:.0f} s")
        found: dict[str, Any] = json.loads(text)
        return found


meetings = Meetings()
"""Those of this process."""
