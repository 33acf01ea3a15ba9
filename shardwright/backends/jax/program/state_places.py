"""The stages on which a cut keeps the model's state, and runs equations on nothing but state and the batch.

A stage keeps an entry from microbatch to microbatch, so all equations that read it or make its next value are on one
stage. Those that also read activations or weights have their stage by them; the rest follows.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.backends.jax.program.equations import FlatProgram
from shardwright.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Carried:
    """An entry of the model's state that changes."""

    name: str
    output: int
    """The position among the program's outputs of the entry's next value."""


@dataclass(slots=True)
class _Entry:
    home: int
    readers: set[int] = field(default_factory=set)
    """The positions of the equations that read the entry."""
    writer: int | None = None
    """The position of the equation that makes the entry's next value; None where that is an argument or a literal."""


def follow(
    flat: FlatProgram, placed: dict[int, int], following: Iterable[int], state: Mapping[int, Carried], stages: int
) -> dict[int, int]:
    """Place the ``following`` equations, and find the stage of every entry of the state.

    Every equation starts on the last stage and is brought forward to the first that uses what it makes, and to the
    entries that it reads or makes; an entry is brought forward to all that reads or makes it. The result is the latest
    place of each, and if there still are two for one entry, no other places would do.

    placed: position of an equation → its stage, for those that run once; the following ones are added. Those read no
        results but each other's and those of equations that every stage can run, which need no state.

    Raises PlanError for an entry that is read or made on several stages.
    """
    entries = _entries(flat, state, stages)
    users: dict[int, list[int]] = {}
    for index, equation in enumerate(flat.equations):
        for value in equation.values:
            users.setdefault(value, []).append(index)
    tied: dict[int, list[_Entry]] = {}
    for entry in entries.values():
        for index in {*entry.readers, *([] if entry.writer is None else [entry.writer])}:
            tied.setdefault(index, []).append(entry)
    # An entry that becomes what another one was is with it.
    shifted = [
        (entries[value], entries[atom])
        for value, carried in state.items()
        if isinstance(atom := flat.outputs[carried.output], int) and atom in entries
    ]
    order = sorted(following, reverse=True)
    placed.update(dict.fromkeys(order, stages - 1))
    moved = True
    while moved:
        before = [*placed.values(), *(entry.home for entry in entries.values())]
        for index in order:
            reading = [i for value in flat.equations[index].outputs for i in users.get(value, ())]
            homes = [entry.home for entry in tied.get(index, ())]
            placed[index] = min([placed[index], *(placed[i] for i in reading), *homes])
        for entry in entries.values():
            entry.home = min([entry.home, *_stages(placed, entry)])
        for one, other in shifted:
            one.home = other.home = min(one.home, other.home)
        moved = before != [*placed.values(), *(entry.home for entry in entries.values())]
    for value, entry in entries.items():
        if set(_stages(placed, entry)) - {entry.home}:
            becoming = {entries[v].home for v, carried in state.items() if flat.outputs[carried.output] == value}
            raise PlanError(_conflict(flat, placed, value, state[value].name, entry, becoming))
    return {value: entry.home for value, entry in entries.items()}


def _entries(flat: FlatProgram, state: Mapping[int, Carried], stages: int) -> dict[int, _Entry]:
    entries = {value: _Entry(stages - 1) for value in state}
    made_by = {value: index for index, equation in enumerate(flat.equations) for value in equation.outputs}
    for index, equation in enumerate(flat.equations):
        for value in equation.values:
            if value in entries:
                entries[value].readers.add(index)
    for value, carried in state.items():
        atom = flat.outputs[carried.output]
        entries[value].writer = made_by.get(atom) if isinstance(atom, int) else None
    return entries


def _stages(placed: Mapping[int, int], entry: _Entry) -> list[int]:
    """The stages that read or make an entry."""
    return [placed[index] for index in (*entry.readers, entry.writer) if index is not None and index in placed]


def _conflict(
    flat: FlatProgram, placed: Mapping[int, int], value: int, name: str, entry: _Entry, becoming: set[int]
) -> str:
    """A text on an entry that lies on several stages. becoming: the stages of entries whose next value this one was."""
    reading = {placed[index] for index in entry.readers} | becoming
    written = entry.home if entry.writer is None else placed.get(entry.writer, entry.home)
    return (
        f"the model's state {name}, {flat.avals[value].shape}, is read on stages {sorted(reading)} and written on "
        f"stage {written}: a later microbatch would read it too early; read and write it inside one block, "
        "or plan a cut that keeps both together"
    )
