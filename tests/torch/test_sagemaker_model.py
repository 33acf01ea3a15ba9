"""What SageMaker's scripts ask of a distributed model."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["pp2", "tp2"])
def run(request: pytest.FixtureRequest) -> Outcome:
    return on_ranks("sagemaker_model.py", 2, *map(str, request.param), timeout_s=90)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("check", checks_in("sagemaker_model.py"))
def test_a_model_answers(run: Outcome, check: str) -> None:
    assert f"ok {check}" in run.text, run.text[-5000:]
