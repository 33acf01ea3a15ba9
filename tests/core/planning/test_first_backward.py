"""The first backward of a stage, whose gradients come call by call: by hand."""

from dataclasses import replace

from shardwright.core.cost.unit_seconds import UnitCost
from shardwright.core.cost.working_memory import PhaseBytes
from shardwright.core.tables.call_entries import CallEntries
from shardwright.core.tables.stage_memory import stage_memories
from shardwright.core.tables.unit_table import Tie, UnitTable

# A unit that keeps 100 bytes and calls two modules, of 5 and of 20 parameters of 4 bytes. Its backward holds 60 bytes
# beside what it keeps before it comes to the second call, whose 80 bytes of gradients are made while 30 are held; then
# it has given up 70 of what it keeps.
UNIT = UnitCost(
    forward_s=1.0, input_grad_s=1.0, weight_grad_s=1.0, selective_s=0.0, collective_s=0.0, saved_bytes=100,
    saved_selective_bytes=100, entering_bytes=10, passing_bytes=60, parameter_elements=25, trained_elements=25,
    phases=(PhaseBytes(60, 60, 20), PhaseBytes(30, 35, -50), PhaseBytes(-40, -40, -70), PhaseBytes(-70, -70, -80)),
)  # fmt: skip
TABLE = UnitTable(
    (UNIT,) * 2, (0, 0), (0.0,) * 2, (), 20, "none", (True,) * 2,
    calls=((CallEntries(5, trained=5), CallEntries(20, trained=20)),) * 2,
)  # fmt: skip


def first_backward(table: UnitTable, ends: tuple[int, int]) -> int:
    return stage_memories(table, {0: ends}, [0], 4)[0].first_backward


def test_gradients_of_a_call_are_there_from_its_own_phase_on() -> None:
    """Before the second call 100 + 60; in it 100 + 35, with its own among them; behind it 100 - 40 + 80."""
    assert first_backward(TABLE, (0, 1)) == 160
    # Of two units the last one's is the fullest, and the first one's is beside the 100 bytes of gradients behind it.
    assert first_backward(TABLE, (0, 2)) == max(200 + 60, 100 + 60 + 100)


def test_a_unit_whose_phases_are_not_known_has_all_gradients_at_its_fullest_moment() -> None:
    unknown = replace(TABLE, units=(replace(UNIT, phases=()),) * 2)
    assert first_backward(unknown, (0, 1)) == 100 + 60 + 100
    tied = replace(TABLE, ties=(Tie((0, 1), 5, True),))
    assert first_backward(tied, (0, 1)) == 100 + 60 + 100


def test_large_weights_are_added_at_once_behind_the_first_microbatch() -> None:
    table = replace(TABLE, units=(replace(UNIT, backward_again_bytes=25),) * 2)
    found = stage_memories(table, {0: (0, 1)}, [0], 4, adds_at_once=True)[0]
    assert (found.working, found.backward_again) == (60, 25)
    assert stage_memories(table, {0: (0, 1)}, [0], 4)[0].backward_again is None
