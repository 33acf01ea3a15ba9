"""Evaluation and `generate` of split models; see `workers/generation.py`."""

import pytest

from tests.torch.launch import on_ranks


@pytest.mark.timeout(600)
def test_split_models_generate_what_plain_ones_do() -> None:
    outcome = on_ranks("generation.py", 2, timeout_s=90)
    assert outcome.code == 0, outcome.text[-4000:]
    assert outcome.text.count("ok ") >= 4, outcome.text[-4000:]
