"""The lines of training steps say what the steps did: losses, norms, tokens and FLOPs are those of the whole model."""

import json
from typing import Any

import pytest

from tests.torch.launch import on_ranks

ALONE = (
    "plain", "accumulated", "uneven", "frozen", "sum", "silent", "scaled", "two optimizers", "overflowing", "bf16",
    "off",
)  # fmt: skip
TOGETHER = (
    "plain", "recompute", "pp", "tp", "sharded", "messages", "sum", "uneven", "accumulated", "overflowing", "scaled",
)  # fmt: skip
TOKENS = 6


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    found = {}
    for ranks, cases in ((1, ALONE), (2, TOGETHER)):
        out = tmp_path_factory.mktemp("lines") / f"{ranks}.json"
        outcome = on_ranks("step_lines.py", ranks, str(out), *cases, timeout_s=120)
        assert outcome.code == 0, outcome.text[-4000:]
        found[ranks] = json.loads(out.read_text())
    return found


def same(found: dict[str, float] | None, expected: dict[str, float], times: float) -> None:
    assert found is not None
    assert found == pytest.approx({name: times * flops for name, flops in expected.items()}, rel=1e-6)


@pytest.mark.parametrize(
    ("ranks", "case"),
    [(1, "plain"), (2, "recompute"), (2, "plain"), (2, "pp"), (2, "tp"), (2, "sharded"), (1, "sum"), (2, "sum")],
)
def test_a_line_says_what_its_steps_did(said: dict[int, dict[str, Any]], ranks: int, case: str) -> None:
    result = said[ranks][case]
    assert [line["step"] for line in result["lines"]] == [1, 2, 4]
    samples = 8 // ranks if case in ("plain", "sharded", "sum") else 8
    for line, steps in zip(result["lines"], (1, 1, 2), strict=True):
        number = line["step"] - 1
        assert line["loss"] == pytest.approx(result["losses"][number], rel=1e-5)
        assert line["grad_norm"] == pytest.approx(result["norms"][number], rel=1e-5)
        assert (line["samples"], line["tokens"]) == (steps * samples, steps * samples * TOKENS)
        same(line["flops"], result["flops"], steps)
        assert line["skipped"] == 0
        assert line["mfu"] > 0
    assert "tps counts the entries of tokens" in result["texts"][0]
    assert len(result["texts"]) == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loss_of_an_update_is_of_all_calls_whose_gradients_it_used(said: dict, ranks: int) -> None:
    result = said[ranks]["accumulated"]
    for line, steps in zip(result["lines"], (1, 1, 2), strict=True):
        assert line["loss"] == pytest.approx(result["losses"][line["step"] - 1], rel=1e-5)
        assert line["tokens"] == steps * 3 * 8 // ranks * TOKENS
        assert line["grad_norm"] is None
        same(line["flops"], result["flops"], steps * 3)


def test_a_short_batch_counts_by_its_samples(said: dict) -> None:
    last = said[1]["uneven"]["lines"][-1]
    assert (last["samples"], last["tokens"]) == (15, 15 * TOKENS)
    both = said[1]["uneven"]
    same(last["flops"], {"fp32": both["flops"]["fp32"] + both["short"]["fp32"]}, 1)
    for ranks in (1, 2):
        result = said[ranks]["uneven"]
        for line in result["lines"]:
            assert line["loss"] == pytest.approx(result["losses"][line["step"] - 1], rel=1e-5)


def test_frozen_weights_have_no_gradient_products(said: dict) -> None:
    for line, steps in zip(said[1]["frozen"]["lines"], (1, 1, 2), strict=True):
        same(line["flops"], said[1]["frozen"]["flops"], steps)
    assert said[1]["frozen"]["flops"]["fp32"] < said[1]["plain"]["flops"]["fp32"]


def test_products_count_in_the_precision_that_they_run_in(said: dict) -> None:
    """torch's attention without heads computes in float32 whatever it is given."""
    found = said[1]["bf16"]["lines"][0]["flops"]
    assert sum(found.values()) == said[1]["plain"]["lines"][0]["flops"]["fp32"]
    assert 0 < found["fp32"] < 0.05 * found["bf16"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_updates_that_were_not_made_are_said(said: dict, ranks: int) -> None:
    result = said[ranks]["overflowing"]
    assert result["skipped"][0]
    assert not result["skipped"][-1]
    every = [sum(result["skipped"][first:end]) for first, end in ((0, 1), (1, 2), (2, 4))]
    assert [line["skipped"] for line in result["lines"]] == every
    assert "skipped: 1" in result["texts"][1]
    # The scaler leaves out the second update, which is so no update at all: the third is number 2.
    assert [line["skipped"] for line in said[ranks]["scaled"]["lines"]] == [0, 1]


def test_what_is_not_known_is_left_out(said: dict) -> None:
    for line in said[1]["silent"]["lines"]:
        assert (line["loss"], line["grad_norm"]) == (None, None)
        assert line["flops"]
    messages = said[2]["messages"]
    assert "tflops is left out: steps by messages are not recorded" in messages["texts"][0]
    for line in messages["lines"]:
        assert line["loss"] == pytest.approx(messages["losses"][line["step"] - 1], rel=1e-5)
        assert (line["flops"], line["tokens"]) == (None, TOKENS * line["samples"])


def test_two_optimizers_of_one_model_make_one_line(said: dict) -> None:
    lines = said[1]["two optimizers"]["lines"]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss"] for line in lines] == pytest.approx(said[1]["two optimizers"]["losses"], rel=1e-5)


def test_no_lines_where_none_are_asked_for(said: dict) -> None:
    assert said[1]["off"]["texts"] == []
