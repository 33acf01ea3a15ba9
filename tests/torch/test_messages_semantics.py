"""What message passing promises beyond equality: dataflow, randomness, the choice of mode, failure on every rank."""

import re

import pytest

from tests.torch.launch import Outcome, on_ranks, torchrun, without_an_agent

CHECKS = (
    "owners_call_each_other",
    "a_weight_is_used_where_it_is_not_held",
    "structures_and_writes_go_around",
    "large_messages_arrive_whole",
    "checkpointing_calls_again",
    "batch_statistics_follow_the_order_of_microbatches",
    "dropout_follows_the_rule",
    "every_generator_follows_the_rule",
    "a_last_batch_may_be_smaller",
    "results_reach_every_rank",
    "autocast_goes_along",
    "the_mode_is_chosen_and_said",
    "errors_are_told_on_every_rank",
    "wrong_inputs",
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("messages_semantics.py", 3, timeout_s=200)


@pytest.mark.parametrize("check", CHECKS)
def test_on_three_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


def test_the_launch_ends_well(outcome: Outcome) -> None:
    assert outcome.code == 0, outcome.text[-4000:]


@pytest.mark.parametrize("how", ["exit", pytest.param("stuck", marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_ends_the_others(how: str) -> None:
    """Without a launcher that kills them: a dead rank closes its connections, a stuck one is caught by the timeout.
    Each says what it waited for, and a rank that waits for an answer names module, microbatch and peer."""
    survivors = without_an_agent("messages_dying.py", how)
    texts = survivors.texts
    assert survivors.seconds < 60
    assert survivors.codes == [1, 1], "".join(texts)[-3000:]
    assert all("PeerError" in text for text in texts)
    driver = re.search(r"rank 0 \(pp 0\): step 1, by messages: waited .*", texts[0])
    assert driver is not None, texts[0][-3000:]
    assert re.search(r"the answer of '(layers\.\d|head)' of microbatch \d from rank 2", driver[0]), driver[0]
    assert "rank 1 (pp 1): step 1, by messages: waited" in texts[1]
    assert "calls from the driver, rank 0" in texts[1]


@pytest.mark.slow
def test_under_torchrun_the_survivors_say_what_they_waited_for() -> None:
    outcome = torchrun("messages_dying.py", 3, "exit", "1", timeout_s=100)
    assert outcome.code != 0
    for rank in (0, 2):
        assert re.search(rf"\[shardwright\] rank {rank} \(pp {rank}\): step 1, by messages", outcome.text), (
            outcome.text[-3000:]
        )
