"""The comparison of everything that must be the same on all ranks, made whenever ranks begin something together.

Each rank makes claims: a name of something, and a digest of the rank's value. The digests travel in one row of numbers.
Where rows differ, every rank sees that they do, and all tell each other the values: so all raise one error, and none
waits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from shardwright.backends.torch.machine.control_channel import ControlChannel, by_value, different_calls, ranks_text
from shardwright.backends.torch.machine.digests import digest_of
from shardwright.backends.torch.machine.mesh import BoundMesh
from shardwright.backends.torch.machine.watchdog import Watchdog
from shardwright.core.errors import DisagreementError, UnrecordableError

Said = str | Mapping[str, str]
"""A value in words; or several values by name, of which an error gives those that differ."""
Among = Literal["all", "replica", "pipeline", "holders"]
"""The ranks that must have the same: all ranks; those of one replica, which share a batch; those of one pipeline; those
that hold the same parameters."""
AMONG: tuple[Among, ...] = ("all", "replica", "pipeline", "holders")
NOTES = 4
"""The number of notes, whole numbers, that a rank may send beside its claims."""
SHOWN = 3
"""The number of names that an error lists."""
_HEAD = 3
"""The numbers of a row before the digests: the call, the number of ranks that take part, whether this rank failed."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One rank's value of something that must be the same on other ranks.

    Attributes:
        what: a noun for errors.
        digest: the same number where ranks have the same.
        said: gives the value in words.
        fix: a sentence.
    """

    what: str
    digest: int
    said: Callable[[], Said]
    fix: str
    among: Among = "all"

    @classmethod
    def of(cls, what: str, value: Said, fix: str, among: Among = "all") -> "Claim":
        """A claim of a value that is in words already."""
        parts = sorted(f"{k}: {v}" for k, v in value.items()) if isinstance(value, Mapping) else [value]
        return cls(what, digest_of(*parts), lambda: value, fix, among)


class Agreement:
    """One rank's part of all comparisons. Every rank of the run makes one at the same time."""

    def __init__(self, bound: BoundMesh, watchdog: Watchdog) -> None:
        self.bound = bound
        self.channel = ControlChannel(bound, watchdog) if bound.mesh.size > 1 else None
        self.replicas = bound.mesh.groups("pp", "tp")
        """The ranks of each dp coordinate, in order."""
        everyone = (tuple(range(bound.mesh.size)),)
        self._groups = {
            "all": everyone, "replica": self.replicas, "pipeline": bound.mesh.groups("pp"),
            "holders": bound.mesh.groups("dp"),
        }  # fmt: skip

    def meet(
        self,
        call: str,
        claims: Sequence[Claim] = (),
        *,
        failure: Exception | None = None,
        notes: Sequence[int] = (),
        in_replica: bool = False,
    ) -> dict[int, tuple[int, ...]]:
        """Go on only when every rank has come here, with the same claims, and none has failed. Every rank calls this.

        Args:
            call: the name of the step or function that comes next: the same text on all ranks.
            failure: the reason why this rank cannot do it.
            notes: up to four numbers that the others want to know.
            in_replica: only the ranks of this replica take part.

        Returns:
            the notes of every rank that takes part.

        Raises:
            DisagreementError: on every rank: ranks differ, or are in different calls, or another one has failed.
            UnrecordableError: another rank has failed with that.
            Exception: ``failure``, on this rank.
        """
        own_notes = (*notes, *[0] * (NOTES - len(notes)))
        channel = self.channel
        if channel is None or (in_replica and len(channel.replica) == 1):
            if failure is not None:
                raise failure
            return {self.bound.rank: own_notes}
        ranks = channel.replica if in_replica else channel.everyone
        digests = [digest_of(*(c.digest for c in claims if c.among == among)) for among in AMONG]
        row = [digest_of(call), len(ranks), int(failure is not None), *digests, *own_notes]
        table = channel.exchange(row, ranks, call)
        if not self._alike(table):
            self._refuse(channel, table, ranks, call, claims, failure)
        return {rank: tuple(entries[-NOTES:]) for rank, entries in table.items()}

    def _alike(self, table: Mapping[int, Sequence[int]]) -> bool:
        if len({tuple(entries[:_HEAD]) for entries in table.values()}) > 1 or next(iter(table.values()))[2]:
            return False
        for column, among in enumerate(AMONG, start=_HEAD):
            for ranks in self._groups[among]:
                if len({table[rank][column] for rank in ranks if rank in table}) > 1:
                    return False
        return True

    def _refuse(
        self, channel: ControlChannel, table: Mapping[int, Sequence[int]], ranks: tuple[int, ...], call: str,
        claims: Sequence[Claim], failure: Exception | None,
    ) -> NoReturn:  # fmt: skip
        if len({entries[1] for entries in table.values()}) > 1:
            raise DisagreementError(channel.why_apart(ranks, call)) from failure
        own = {
            "call": call,
            "kind": "" if failure is None else type(failure).__name__,
            "failure": "" if failure is None else f"{type(failure).__name__}: {failure}",
            "claims": [
                {"what": c.what, "digest": c.digest, "said": c.said(), "fix": c.fix, "among": c.among} for c in claims
            ],
        }
        every = channel.tell(own, ranks)
        if failure is not None:
            raise failure
        text = self._difference(every)
        kinds = {said["kind"] for said in every.values()} - {""}
        if kinds == {UnrecordableError.__name__}:
            raise UnrecordableError(text)
        raise DisagreementError(text)

    def _difference(self, every: Mapping[int, Any]) -> str:
        """The text of the difference between ranks, made from what each rank says. It is the same on all of them."""
        calls = {rank: said["call"] for rank, said in every.items()}
        if len(set(calls.values())) > 1:
            return different_calls(calls)
        call = next(iter(calls.values()))
        failures = {rank: said["failure"] for rank, said in every.items() if said["failure"]}
        if failures:
            said = "; ".join(f"{ranks_text(ranks)}: {text}" for text, ranks in by_value(failures).items())
            return f"{call} failed on {said}. No rank goes on without the others"
        found, others = "", []
        for number, claim in enumerate(next(iter(every.values()))["claims"]):
            for group in self._groups[claim["among"]]:
                claims = {rank: every[rank]["claims"][number] for rank in group if rank in every}
                if len({c["digest"] for c in claims.values()}) <= 1:
                    continue
                if found:
                    others.append(claim["what"])
                else:
                    values = values_text({rank: c["said"] for rank, c in claims.items()})
                    found = f"the ranks disagree on {claim['what']} in {call}: {values}. {claim['fix']}"
                break
        return found + (f" They differ also in: {', '.join(others)}." if others else "")

    def leave(self, why: str) -> None:
        """Tell ranks that still wait for this one that it makes no more calls."""
        if self.channel is not None:
            self.channel.leave(why)

    def close(self) -> None:
        """Close the channel. No comparisons are made afterwards."""
        if self.channel is not None:
            self.channel.close()


def values_text(said: Mapping[int, Said]) -> str:
    """``4 on ranks 0 and 1, 5 on rank 2``; for values by name, those that differ."""
    named = {rank: value for rank, value in said.items() if isinstance(value, Mapping)}
    if len(named) < len(said):
        return _grouped({rank: str(value) for rank, value in said.items()})
    names = dict.fromkeys(name for value in named.values() for name in value)
    different = [name for name in names if len({value.get(name) for value in named.values()}) > 1]
    if not different:
        return "the order of " + "; ".join(
            f"{ranks_text(ranks)} begins with {text}" for text, ranks in by_value(_beginnings(named)).items()
        )
    shown = [
        f"{name} is {_grouped({rank: value.get(name, 'not there') for rank, value in named.items()})}"
        for name in different[:SHOWN]
    ]
    more = f" (and {len(different) - SHOWN} more)" if len(different) > SHOWN else ""
    return "; ".join(shown) + more


def _beginnings(named: Mapping[int, Mapping[str, str]]) -> dict[int, str]:
    return {rank: ", ".join(list(value)[:SHOWN]) for rank, value in named.items()}


def _grouped(said: Mapping[int, str]) -> str:
    return ", ".join(f"{value} on {ranks_text(ranks)}" for value, ranks in by_value(said).items())
