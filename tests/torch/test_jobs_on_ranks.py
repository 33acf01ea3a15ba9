"""Jobs on two ranks: every weight, buffer and state as of training alone, and what ends one job or all."""

import pytest

from tests.torch.launch import Outcome, checks_in, on_ranks, without_an_agent


@pytest.fixture(scope="module")
def launched() -> Outcome:
    return on_ranks("jobs.py", 2, timeout_s=90)


@pytest.mark.parametrize("check", checks_in("jobs.py"))
def test_jobs_on_two_ranks(launched: Outcome, check: str) -> None:
    assert f"ok {check}" in launched.text, launched.text[-6000:]


@pytest.mark.slow  # three interpreters, and a wait until nothing is heard any more
@pytest.mark.parametrize("how", ["exit", "stuck"])
def test_ranks_stop_by_name_where_one_is_gone(how: str) -> None:
    found = without_an_agent("jobs_dying.py", how)
    assert found.codes == [3, 3], found.texts
    for text in found.texts:
        assert "rank 2" in text[text.index("PeerError") :], text[-3000:]
    assert found.seconds < 60.0
