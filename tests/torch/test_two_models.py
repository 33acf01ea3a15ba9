"""Several distributed models in one process: a teacher and a student, a generator and a discriminator; see
`workers/two_models.py`."""

import re
from pathlib import Path

import pytest

from tests.comparison import Comparison
from tests.torch.launch import on_ranks

BY_TURNS = ("a_teacher_and_a_student", "a_teacher_in_the_step_of_its_student", "a_generator_and_a_discriminator")
IN_ONE_MODULE = "adversaries_in_one_module"
RECORDED = "adversaries_in_one_module_that_call_the_same_parts"
CHAINED = ("a_generator_through_its_discriminator", "gradients_of_inputs")
CALLED_TWICE = "a_discriminator_that_is_called_twice"
OWN_BATCHES = "statistics_of_batches_of_their_own"
BESIDE = (
    CALLED_TWICE, "a_cycle_of_two", "one_mask_in_both_passes", "what_the_body_writes",
    "a_teacher_and_a_student_by_messages", "dropout_of_each_model", "checkpoints_of_both", "hooks_of_each_model",
    "a_scaler_of_both", "a_plan_for_each", "misuse",
)  # fmt: skip


def ran(how: str, processes: int, folder: Path) -> tuple[list[str], list[float]]:
    """The checks that a launch passed, and the losses with dropout that it printed."""
    outcome = on_ranks("two_models.py", processes, how, str(folder), timeout_s=300)
    assert outcome.code == 0, outcome.text[-6000:]
    printed = re.search(r"losses with dropout (.*)", outcome.text)
    losses = [float(one) for one in printed[1].split()] if printed else []
    return re.findall(r"^ok (\w+)$", outcome.text, re.MULTILINE), losses


def test_over_stages_each_model_is_by_itself(tmp_path: Path) -> None:
    passed, losses = ran("pp:2", 2, tmp_path)
    assert passed == [*BY_TURNS, IN_ONE_MODULE, RECORDED, *CHAINED, *BESIDE]
    alone, expected = ran("one", 1, tmp_path)
    assert alone == ["dropout_of_each_model"]
    Comparison("dropout, split and not").losses(losses, expected, moving=0.01).require()


@pytest.mark.parametrize(
    ("how", "checks"),
    [
        ("tp:2", (*BY_TURNS, IN_ONE_MODULE, RECORDED, *CHAINED, CALLED_TWICE, OWN_BATCHES)),
        ("dp:2:1", (*BY_TURNS, RECORDED, *CHAINED)),
        pytest.param("dp:2:2", (*BY_TURNS, RECORDED, *CHAINED), marks=pytest.mark.slow),
        ("dp:2:3", (*BY_TURNS, RECORDED, *CHAINED)),
    ],
)
def test_two_models_train_as_each_would_alone(how: str, checks: tuple[str, ...], tmp_path: Path) -> None:
    passed, _ = ran(how, 2, tmp_path)
    assert passed == list(checks)
