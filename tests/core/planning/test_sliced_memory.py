"""The memory of slices from action to action: by hand."""

from shardwright.core.schedule.actions import Action
from shardwright.core.search.sliced_walk import SliceMemory, peaks, walk

FIRST = SliceMemory(
    kept=10, handed_on=3, waiting=5, joined=0, gradients=0, forward=4, backward=6, first_backward=9, made=100,
)  # fmt: skip
LAST = SliceMemory(
    kept=20, handed_on=0, waiting=5, joined=10, gradients=16, forward=2, backward=7, first_backward=40, made=100,
)  # fmt: skip


def test_slices_keep_hand_on_and_wait() -> None:
    """Forwards add what is kept, handed on and waiting; what waits is put together with the last one's, which lasts to
    its backward; gradients of what was handed on last until the slice before has read them."""
    order = [Action.parse(text) for text in ("0F0s0", "0F0s1", "0B0s1", "0B0s0", "0F1s0", "0F1s1", "0B1s1", "0B1s0")]
    live, beside, most, early = peaks(walk(order, {0: (FIRST, LAST)}, [1, 0, 0, 0, 0, 0, 0, 2], [0] * 8))
    kept = [10 + 3 + 5, 10 + 3 + 20 + 5 + 5, 10 + 3 + 20, 10]
    moments = [kept[0] + 4 + 1, kept[1] + 2, kept[2] + 40, kept[3] + 16 + 100 + 6]
    later = [100 + kept[0] + 4, 100 + kept[1] + 2, 100 + kept[2] + 7, 100 + kept[3] + 16 + 6 + 2]
    assert live == kept[1]
    assert beside == 16 + 6 + 2
    assert most == max(moments + later)
    assert early == max(100 + kept[0] + 4 + 1, 100 + kept[1] + 2, 100 + kept[2] + 7, 100 + kept[3] + 16 + 6 + 2)
    # When the first backward behind it begins, 10 are kept and 16 wait, beside the gradients of parameters.
    *_, begun, _ = peaks(walk(order, {0: (FIRST, LAST)}, [0] * 8, [0] * 3 + [900] + [0] * 4))
    assert begun == 10 + 16 + 100 + 900


def test_an_input_gradient_gives_up_what_is_kept_and_leaves_factors() -> None:
    """What it has computed again among them; the first weight gradient makes gradients beside what is left to it."""
    only = SliceMemory(
        kept=10, handed_on=0, waiting=0, joined=0, gradients=0, forward=4, backward=6, first_backward=9, made=100,
        left=50, input_grad=60, weight_grad=2, first_weight_grad=90,
    )  # fmt: skip
    order = [Action.parse(text) for text in ("0F0s0", "0F1s0", "0I0s0", "0I1s0", "0W0s0", "0W1s0")]
    moments = [*walk(order, {0: (only,)}, [0] * 6, [0] * 6)]
    assert [one.ends for one in moments] == [10, 20, 60, 100, 150, 100]
    assert [one.most for one in moments] == [14, 24, 80, 120, 190, 152]
    assert moments[-1].activations == 50


def test_gradients_leave_for_other_replicas() -> None:
    """Where they add up whole, with the last backward; else with every one: the bucket of the one before is there until
    the first of its own has left, and a forward outlasts it."""
    sizes = {"handed_on": 0, "waiting": 0, "joined": 0, "gradients": 0, "forward": 4, "kept": 10}
    whole = SliceMemory(**sizes, backward=6, first_backward=50, made=40, leaving=30)
    order = [Action.parse(text) for text in ("0F0s0", "0F1s0", "0B0s0", "0F2s0", "0B1s0", "0B2s0")]
    moments = [*walk(order, {0: (whole,)}, [0] * 6, [0] * 6)]
    assert [one.most for one in moments] == [14, 24, 70, 64, 66, 80]
    each = SliceMemory(**sizes, backward=20, first_backward=25, made=5, tail=18, under_way=7)
    moments = [*walk(order, {0: (each,)}, [0] * 6, [0] * 6)]
    assert [one.most for one in moments] == [14, 24, 45, 36, 45, 40]
    assert [one.ends for one in moments] == [10, 20, 22, 25, 22, 12]
