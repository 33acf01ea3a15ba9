"""What users do wrong on pipeline ranks: each gets an error, and none a hang."""

import pytest

from tests.torch.launch import Outcome, on_ranks

CHECKS = (
    "a_target_on_one_rank_alone",
    "batches_of_different_dtypes",
    "models_of_different_dtypes",
    "different_models",
    "a_call_outside_a_step",
    "a_result_that_no_rank_computes",
    "a_value_read_in_the_body",
    "shapes_that_part_in_mid_run",
)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("misuse.py", 2, timeout_s=150)


@pytest.mark.parametrize("check", CHECKS)
def test_both_ranks_are_told(outcome: Outcome, check: str) -> None:
    for rank in (0, 1):
        assert f"ok {check} on {rank}\n" in outcome.text, outcome.text[-4000:]
