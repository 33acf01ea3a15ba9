"""The order in which policies are asked about resources, and who waits for what.

A policy is asked whenever a resource becomes free: it starts the work that is next there, and says when to ask again.
There are two kinds of policy, and the engine has a queue for each:

- The next in a list (a schedule) does not depend on what happens elsewhere, only its time does. Such a policy is asked
  as soon as possible (`ask`), not in the order of time: it goes ahead along its list until a time is not known yet,
  waits for that (`wait`), and is asked again when whoever makes it announces it (`announce`).
- A decision (which job next?) depends on what has ended by then. Such a policy is asked in the order of time
  (`ask_at`), with `now_s` as the time.

What has been asked for as soon as possible comes before what is due later, so that both may share resources as long as
those that decide hold nothing that a list has not come to.
"""

from collections import deque
from collections.abc import Hashable
from heapq import heappop, heappush
from typing import Protocol


class Policy(Protocol):
    """What decides which work a resource does next."""

    def advance(self, resource: int) -> None:
        """Start what can be started on a resource that may be free, or wait."""


class Engine:
    """One run of one policy over numbered resources. Of resources that are due at one time the lowest is asked first,
    and each once."""

    __slots__ = ("_due", "_ready", "awaited", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: deque[int] = deque()
        self._due: list[tuple[float, int]] = []
        self.awaited: dict[Hashable, list[int]] = {}
        """The resources that wait, by event. Others need not be announced."""

    def ask(self, resource: int) -> None:
        """Ask about a resource as soon as possible."""
        self._ready.append(resource)

    def ask_at(self, time_s: float, resource: int) -> None:
        """Ask about a resource at a time, in the order of time."""
        heappush(self._due, (time_s, resource))

    def wait(self, event: Hashable, resource: int) -> None:
        """Ask about a resource again when an event is announced."""
        self.awaited.setdefault(event, []).append(resource)

    def announce(self, event: Hashable) -> None:
        """Ask about all resources that wait for an event."""
        waiting = self.awaited.pop(event, None)
        if waiting:
            self._ready.extend(waiting)

    def run(self, policy: Policy) -> None:
        """Ask the policy until nothing is left to ask about."""
        ready, due = self._ready, self._due
        while True:
            while ready:
                policy.advance(ready.popleft())
            if not due:
                return
            self.now_s, resource = asked = heappop(due)
            while due and due[0] == asked:
                heappop(due)
            policy.advance(resource)
