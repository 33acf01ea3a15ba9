"""Labels of blocks that do not fit, against every labelling there is, and against closed forms."""

from itertools import pairwise, product

import numpy as np
import pytest

from shardwright.core.errors import ShardwrightError
from shardwright.core.out_of_core.blocks import LABELS, Block
from shardwright.core.out_of_core.chain_run import ChainRun, Span, run_chain
from shardwright.core.out_of_core.labels import SAME, _Search, best_labels


def drawn(rng: np.random.Generator, count: int, *, some_stay: bool = False) -> tuple[list[Block], int]:
    """Unequal blocks, and a limit between the largest of them and all of them. ``some_stay``: some may not be computed
    again."""
    blocks = []
    for _ in range(count):
        kept = int(rng.integers(1, 100))
        forward = float(rng.uniform(0.1, 2))
        each = float(rng.uniform(0.01, 0.1)) * kept
        blocks.append(
            Block(
                forward, forward * float(rng.uniform(1, 3)), each, each * float(rng.uniform(0.7, 1.4)), kept,
                int(rng.integers(0, kept // 2 + 1)), int(rng.integers(0, 20)),
                may_recompute=not some_stay or bool(rng.integers(0, 2)),
            )
        )  # fmt: skip
    least = max(b.kept_bytes + b.passing_bytes for b in blocks)
    return blocks, int(rng.uniform(least, sum(b.kept_bytes for b in blocks) + 20))


def every_labelling(blocks: list[Block], memory_bytes: int, *, copies_beside: bool = True) -> float | None:
    """The shortest makespan of all labellings that the blocks may have."""
    may = [LABELS if block.may_recompute else ("keep", "offload") for block in blocks]
    runs = (run_chain(blocks, labels, memory_bytes, copies_beside=copies_beside) for labels in product(*may))
    return min((run.makespan_s for run in runs if run is not None), default=None)


def require_best(rng: np.random.Generator, count: int) -> None:
    blocks, memory_bytes = drawn(rng, count)
    found, wanted = best_labels(blocks, memory_bytes), every_labelling(blocks, memory_bytes)
    assert (found is None) == (wanted is None)
    if found is not None:
        assert found.run.makespan_s == pytest.approx(wanted, rel=1e-9)
        assert found.is_best
        again = run_chain(blocks, found.labels, memory_bytes)
        assert again == found.run


@pytest.mark.parametrize("case", range(60))
def test_labels_are_the_best_of_all(case: int) -> None:
    rng = np.random.default_rng(case)
    require_best(rng, int(rng.integers(1, 6)))


@pytest.mark.parametrize("case", range(30))
@pytest.mark.parametrize("beside", [True, False])
def test_labels_are_the_best_where_copies_take_the_devices_time_and_some_blocks_stay(case: int, beside: bool) -> None:
    rng = np.random.default_rng(5000 + case)
    blocks, memory_bytes = drawn(rng, int(rng.integers(2, 6)), some_stay=True)
    found = best_labels(blocks, memory_bytes, copies_beside=beside)
    wanted = every_labelling(blocks, memory_bytes, copies_beside=beside)
    assert (found is None) == (wanted is None)
    if found is not None:
        assert found.run.makespan_s == pytest.approx(wanted, rel=1e-9)
        assert all(b.may_recompute for b, label in zip(blocks, found.labels, strict=True) if label == "recompute")
        assert best_labels(blocks * 4, memory_bytes, copies_beside=beside).bound_s >= 0  # more than are enumerated


def test_copies_that_take_the_devices_time_are_part_of_passes() -> None:
    block = Block(1.0, 2.0, 0.25, 0.5, 10)
    run = run_chain([block, block], ["offload", "keep"], 20, copies_beside=False)
    assert run.makespan_s == pytest.approx(2 * 3.0 + 0.75)
    assert run_chain([block, block], ["offload", "keep"], 20).makespan_s == pytest.approx(6.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(300))
def test_labels_are_the_best_of_all_for_up_to_8_blocks(case: int) -> None:
    rng = np.random.default_rng(1000 + case)
    require_best(rng, int(rng.integers(5, 9)))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", range(10))
def test_labels_are_the_best_of_all_for_12_blocks(case: int) -> None:
    require_best(np.random.default_rng(2000 + case), 12)


def alive_bytes(blocks: list[Block], labels: tuple[str, ...], spans: tuple[Span, ...], at: float) -> int:
    """What is on the device at a moment inside spans, by the definition of each label."""
    total = 0
    of = {(s.lane, s.what, s.block): s for s in spans}
    for number, (block, label) in enumerate(zip(blocks, labels, strict=True)):
        ahead, back = of["compute", "F", number], of["compute", "B", number]
        if label == "keep":
            total += block.kept_bytes * (ahead.start_s < at < back.end_s)
        elif label == "recompute":
            again = of["compute", "R", number]
            total += block.entering_bytes * (ahead.start_s < at < back.end_s)
            total += (block.kept_bytes - block.entering_bytes) * (again.start_s < at < back.end_s)
        else:
            out, into = of["out", "S", number], of["in", "S", number]
            total += block.kept_bytes * ((ahead.start_s < at < out.end_s) + (into.start_s < at < back.end_s))
        for what in ("F", "R", "B"):
            span = of.get(("compute", what, number))
            if span is not None and span.start_s < at < span.end_s:
                total += block.passing_bytes
    return total


@pytest.mark.parametrize("case", range(40))
def test_a_run_keeps_the_order_and_the_limit(case: int) -> None:
    rng = np.random.default_rng(case)
    blocks, memory_bytes = drawn(rng, int(rng.integers(2, 9)))
    labels = tuple(LABELS[int(n)] for n in rng.integers(0, 3, len(blocks)))
    run = run_chain(blocks, labels, memory_bytes)
    if run is None:
        return
    ends = sorted({time for span in run.spans for time in (span.start_s, span.end_s)})
    moments = [(a + b) / 2 for a, b in pairwise(ends)]
    held = [alive_bytes(blocks, labels, run.spans, at) for at in moments]
    assert max(held) <= run.peak_bytes <= memory_bytes
    for lane in ("compute", "out", "in"):
        spans = [span for span in run.spans if span.lane == lane]
        assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(spans))
    of = {(s.lane, s.what, s.block): s for s in run.spans}
    for number, label in enumerate(labels):
        if label == "offload":
            chain = [
                of["compute", "F", number],
                of["out", "S", number],
                of["in", "S", number],
                of["compute", "B", number],
            ]
            assert all(a.end_s <= b.start_s + 1e-12 for a, b in pairwise(chain))


def equal(count: int, forward: float, backward: float, swap: float) -> list[Block]:
    return [Block(forward, backward, swap, swap, 1)] * count


@pytest.mark.parametrize(
    ("forward", "backward", "swap", "each"),
    [
        (1.0, 2.0, 4.0, 3.75),  # both phases bind: r = 1 - F/S
        (1.0, 2.0, 1.0, 3.0),  # copies hide
        (1.0, 2.0, 1.5, 3.0 + 1 / 3),
        (1.0, 1.0, 2.0, 2.5),
    ],
)
def test_many_equal_blocks_meet_the_closed_form(forward: float, backward: float, swap: float, each: float) -> None:
    """Per block max(F, (1 - r) S) + max(B + r F, (1 - r) S), at the best share r that is computed again."""
    shares = np.linspace(0, 1, 10001)
    closed = np.maximum(forward, (1 - shares) * swap) + np.maximum(backward + shares * forward, (1 - shares) * swap)
    assert closed.min() == pytest.approx(each, rel=1e-3)
    found = best_labels(equal(64, forward, backward, swap), 5)
    assert found is not None
    assert found.bound_s <= found.run.makespan_s
    assert found.run.makespan_s / 64 <= each * 1.04


def test_where_the_backward_alone_binds() -> None:
    """Copies to the host take no time: of the blocks that do not stay, r = (S - B) / (S + F) are computed again."""
    forward, backward, swap, count = 1.0, 2.0, 4.0, 10
    found = best_labels([Block(forward, backward, 0.0, swap, 1)] * count, 3)
    assert found is not None
    going = count - found.labels.count("keep")
    share = (swap - backward) / (swap + forward)
    assert found.labels.count("recompute") / going == pytest.approx(share, abs=0.5 / going)


def makespans(blocks: list[Block], memory_bytes: int) -> list[float]:
    """Of all offloaded, all recomputed, and offloading what alone does not fit."""
    count = len(blocks)
    plain = [("offload",) * count, ("recompute",) * count]
    plain += [("offload",) * (count - kept) + ("keep",) * kept for kept in range(1, count + 1)]
    runs = (run_chain(blocks, labels, memory_bytes) for labels in plain)  # type: ignore[arg-type]
    return [run.makespan_s for run in runs if run is not None]


@pytest.mark.parametrize("case", range(4))
@pytest.mark.parametrize("count", [9, 24])
def test_never_worse_than_one_policy_for_all(count: int, case: int) -> None:
    blocks, memory_bytes = drawn(np.random.default_rng(case), count)
    found = best_labels(blocks, memory_bytes)
    others = makespans(blocks, memory_bytes)
    if others:
        assert found is not None
        assert found.run.makespan_s <= min(others) * (1 + SAME)
        assert found.bound_s <= found.run.makespan_s


@pytest.mark.parametrize("case", range(20))
def test_the_bound_is_below_the_best(case: int) -> None:
    rng = np.random.default_rng(case)
    blocks, memory_bytes = drawn(rng, 6)
    found = best_labels(blocks, memory_bytes)
    if found is not None:
        assert _Search(blocks, memory_bytes, LABELS).least_s() <= found.run.makespan_s * (1 + SAME)


def test_what_fits_is_kept() -> None:
    blocks = equal(8, 1.0, 2.0, 4.0)
    found = best_labels(blocks, 8)
    assert found is not None
    assert found.labels == ("keep",) * 8
    assert found.run.makespan_s == 24.0
    assert isinstance(found.run, ChainRun)


def test_without_offloading_what_does_not_fit_is_computed_again() -> None:
    found = best_labels(equal(8, 1.0, 2.0, 0.1), 4, may_offload=False)
    assert found is not None
    assert found.labels.count("recompute") == 4
    assert "offload" not in found.labels


def test_bad_input_is_named() -> None:
    with pytest.raises(ShardwrightError, match=r"block 1 alone takes 12 bytes .* the limit is 11"):
        best_labels([Block(1, 1, 1, 1, 2), Block(1, 1, 1, 1, 10, 0, 2)], 11)
    with pytest.raises(ShardwrightError, match="no blocks"):
        best_labels([], 1)
    with pytest.raises(ShardwrightError, match=r"Block\(out_s=nan\)"):
        Block(1, 1, float("nan"), 1, 1)
    with pytest.raises(ShardwrightError, match="entering_bytes=3, kept_bytes=2"):
        Block(1, 1, 1, 1, 2, 3)
