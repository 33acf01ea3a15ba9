"""Causal models run in slices of their sequences: losses and gradients are those of whole sequences."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwright.backends.torch.slices.slice_ops import (
    SlicePlace,
    require_causal,
    require_hides,
    require_low,
    require_mild,
    require_seen,
    so_far,
)
from shardwright.core.errors import CaptureError
from tests.comparison import Comparison
from tests.torch.launch import on_ranks

CASES = ("gpt2:2.1.1:1f1b:5+4+3", "gpt2@0.2:2.1.1:zb-h1:7+5", "llama+padded:2.1.1:1f1b:5+4+3:full",
         "gpt2@0.2:1.1.2:gpipe:5+4+3", "gpt2-eager@0.2:2.1.1:1f1b:5+4+3",
         "windows@0.2:2.1.1:1f1b:2+2+5+3", "mixtral-balanced:2.1.1:1f1b:5+4+3")  # fmt: skip
MORE = {
    2: (
        "gpt2:2.1.1:gpipe:12", "gpt2:2.1.1:1f1b:6+6", "gpt2:2.1.1:1f1b:3+2+3+2+2", "gpt2:2.1.1:interleaved-1f1b:5+4+3",
        "llama:2.1.1:eager-1f1b:5+4+3", "llama@0.2:2.1.1:1f1b:5+4+3", "gpt2+padded:2.1.1:zb-h1:2+2+2+2+4",
        "llama:1.2.1:gpipe:2+3+3+4", "gpt2:1.2.1:gpipe:5+4+3", "gpt2:1.1.2:gpipe:5+4+3",
        "llama+padded:1.1.2:gpipe:7+5:full", "gpt2-eager:1.1.2:gpipe:5+4+3", "gpt2-eager+padded:2.1.1:1f1b:6+6:full",
        "windows:2.1.1:gpipe:12", "windows:2.1.1:zb-h1:3+2+3+2+2", "windows:1.1.2:gpipe:5+4+3:full",
        "mixtral:2.1.1:zb-h1:3+2+3+2+2", "mixtral@0.2:2.1.1:gpipe:5+7", "mixtral+padded:1.1.2:gpipe:7+5:full",
        "sinks:2.1.1:1f1b:5+4+3",
    ),
    4: ("gpt2:4.1.1:1f1b:5+4+3", "llama:4.1.1:zb-h1:3+2+3+2+2", "gpt2:2.2.1:1f1b:5+4+3", "llama@0.2:2.2.1:1f1b:6+6",
        "gpt2@0.2:2.1.2:zb-h1:5+4+3", "llama:2.1.2:1f1b:5+4+3", "gpt2:1.2.2:gpipe:3+2+3+2+2"),
}  # fmt: skip
REFUSED = {
    "a sum": "slice_lengths=[5, 4] add up to 9 tokens, and the captured sequence has 12: give 3 more",
    "a schedule": "schedule='zbv' and slices: it runs microbatches whole; take one of gpipe, 1f1b",
    "too many": "slices=13 of 12 tokens in steps of 1: expected at most 12",
    "another length": "the plan's slices 5 + 4 + 3 have 12 tokens in all, and the model is given 10",
    "a number of its length": "computes with numbers that follow from the length of the sequence",
    "padded on the left": "pad sequences on the right",
    "a cache": "uses a cache of keys and values that the model returns",
}


def run(folder: Path, ranks: int, *given: str) -> dict[str, dict[str, Any]]:
    out = folder / "out.json"
    options = [text for text in given if text.startswith("--")]
    cases = [text for text in given if not text.startswith("--")]
    outcome = on_ranks("slices.py", ranks, *options, str(out), *cases, timeout_s=400)
    assert outcome.code == 0, outcome.text[-4000:]
    return {result["case"]: result for result in json.loads(out.read_text())}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run(tmp_path_factory.mktemp("slices"), 2, *CASES, "evaluation", "misuse")


@pytest.mark.parametrize("case", CASES)
def test_slices_train_as_whole_sequences(results: dict[str, dict[str, Any]], case: str) -> None:
    Comparison.of_ranks(results[case]["same"]).require("losses", "gradients")


def test_steps_return_logits_and_run_without_gradients(results: dict[str, dict[str, Any]]) -> None:
    Comparison.of_ranks(results["evaluation"]["same"]).require("losses", "logits", "gradients")


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_run_in_slices_is_refused(results: dict[str, dict[str, Any]], what: str) -> None:
    assert REFUSED[what] in results["misuse"]["said"].get(what, "")


def test_masks_are_looked_at() -> None:
    causal = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
    require_causal(causal, "a layer")
    require_causal(torch.zeros(6, 6).masked_fill(~causal[0, 0], -torch.inf), "a layer")
    with pytest.raises(CaptureError, match="a layer attends by a mask that shows tokens later ones"):
        require_causal(torch.ones(6, 6, dtype=torch.bool), "a layer")
    with pytest.raises(CaptureError, match="pad sequences on the right"):
        require_causal(causal & torch.tensor([False, True, True, True, True, True]), "a layer")


@pytest.mark.parametrize(("samples", "heads"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_slices_write_their_keys_into_one_memory(samples: int, heads: int) -> None:
    """Also where views give dims of one entry another stride; and all of them are there."""
    own = [torch.randn(samples, heads, length, 4) for length in (5, 1, 3)]
    first, start, found = 0, 0, None
    for slice_ in own:
        before = None if found is None else found.view_as(found)
        found = so_far(before, slice_, 2, SlicePlace(start, slice_.shape[2], 9))
        start += slice_.shape[2]
        first = first or found.untyped_storage().data_ptr()
        assert found.untyped_storage().data_ptr() == first
    assert found is not None
    assert torch.equal(found, torch.cat(own, 2))


def test_scores_are_looked_at() -> None:
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    require_hides(later[None], 1, 2, "masked_fill", "a layer")
    require_hides(~later[:, None], 0, 2, "where", "a layer")
    require_hides(torch.zeros(6, 6).masked_fill(later, -torch.inf), 0, 1, "add", "a layer")
    high = torch.zeros(6, 6).masked_fill(later, -1e4)
    for mask, op in ((later, "where"), (~later, "masked_fill"), (high, "add")):
        with pytest.raises(CaptureError, match="a layer attends by a mask that shows tokens later ones"):
            require_hides(mask, 0, 1, op, "a layer")
    for mask, op in ((later, "add"), (later.int(), "masked_fill")):
        with pytest.raises(CaptureError, match=f"takes a mask of {mask.dtype} in {op}: expected one of low numbers"):
            require_hides(mask, 0, 1, op, "a layer")
    require_low(torch.tensor(-1e30), torch.float32, "a layer")
    with pytest.raises(CaptureError, match=r"a layer puts -10000 in the place of the scores that its mask hides"):
        require_low(-1e4, torch.float32, "a layer")
    require_mild(8.0, "a layer")
    with pytest.raises(CaptureError, match=r"a layer scales the scores of its attention by 1e-05"):
        require_mild(1e-5, "a layer")
    require_seen(torch.tensor([[-torch.inf, 0.0]]), 1, "a layer")
    with pytest.raises(CaptureError, match="a layer attends by a mask that hides all tokens up to its own"):
        require_seen(torch.tensor([[0.0, 0.0], [-1e30, -1e30]]), 1, "a layer")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", MORE)
def test_all_forms_over_all_steps(tmp_path: Path, ranks: int) -> None:
    for result in run(tmp_path, ranks, "--all", *MORE[ranks]).values():
        Comparison.of_ranks(result["same"]).require("losses", "gradients")
