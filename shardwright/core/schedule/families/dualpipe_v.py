"""DualPipeV: two stages per rank, down and back up, forwards and backwards of different microbatches overlapped.

DeepSeek-AI, arXiv 2412.19437, section 3.2.1 (DualPipe), and its cut in half, of which each rank keeps one copy of two
stages. Overlapped pairs let one microbatch compute while the other exchanges.
"""

from shardwright.core.schedule.families.two_stage_phases import Tape
from shardwright.core.schedule.family import Family, Order, Sizes, by_rank, two_stages_per_rank
from shardwright.core.schedule.placement import vee


def refusal(sizes: Sizes) -> str | None:
    if reason := two_stages_per_rank(sizes):
        return reason
    if sizes.microbatches < sizes.stages:
        given = f"microbatches={sizes.microbatches}"
        return f"it fills its two directions with {given}: at least 2 * ranks = {sizes.stages} would do"
    return None


def rank_order(rank: int, sizes: Sizes) -> Order:
    ranks, last = sizes.ranks, sizes.ranks - 1
    tape = Tape((rank, 2 * ranks - 1 - rank))
    tape.play(2 * (last - rank), "F0")
    tape.play(rank + 1, "F0 F1")
    tape.play(last - rank, "I1 W F1")
    steady = sizes.microbatches - 2 * ranks + rank + 1
    if rank == last:
        # Its two stages follow one another: the first pair would wait for itself.
        tape.play(1, "F0 B1 F1+B0")
        steady -= 1
    tape.play(steady, "F0+B1 F1+B0")
    tape.play(last - rank, "B1 F1+B0")
    # From half way on the backwards are split, so that weight gradients are left to fill the end; odd ranks start the
    # split one backward before even ones.
    whole, split = (rank + 1) // 2, rank // 2
    tape.play(whole, "B1 B0")
    tape.play(1, "I1 I0" if rank % 2 else "B1 I0")
    tape.play(split, "I1 I0")
    tape.play(last - rank, "W I0")
    tape.play(rank + 1, "W")
    return tape.finish(sizes.microbatches)


DUALPIPE_V = Family("dualpipev", "arXiv 2412.19437, section 3.2.1", vee, by_rank(rank_order), refusal)
