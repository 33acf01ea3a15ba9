"""Ranks that disagree: what they compare, and what each is told."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from shardwright.backends.torch.machine.agreement import values_text
from shardwright.backends.torch.machine.digests import SMALL_BYTES, code_of, digest_of_file, fingerprint
from shardwright.backends.torch.machine.handshake import shake_hands
from shardwright.backends.torch.state.model_agreement import LiveFlags, model_claims
from shardwright.core.errors import ClusterError, DisagreementError
from tests.torch.launch import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))

from adversaries import Ended, judged
from adversary_trials import BATCHES, CALLS, CONFIGURATIONS, MODELS, PLANS, STATES, draw

TRIALS = 8


def test_a_sample_of_random_disagreements_is_refused_on_every_rank_or_without_effect() -> None:
    script = str(ROOT / "benchmarks" / "adversaries.py")
    outcome = run([sys.executable, script, "--trials", str(TRIALS), "--seed", "20"], timeout_s=300)
    assert outcome.code == 0, outcome.text[-6000:]
    assert f"\n{TRIALS} trials (seed 20)" in outcome.text
    refused = outcome.text.count(": refused on every rank (")
    assert refused >= TRIALS * 3 // 4, outcome.text


def test_trials_are_of_every_kind_on_every_rank_and_mesh() -> None:
    trials = draw(0, 300)
    kinds = {*CONFIGURATIONS, *PLANS, *MODELS, *BATCHES, *STATES, *CALLS}
    assert {trial.kind for trial in trials} == kinds
    assert len(kinds) > 80
    assert {trial.odd for trial in trials} == {0, 1, 2, 3}
    assert len({trial.mesh for trial in trials}) == 5
    assert {trial.at for trial in trials} == {0, 1, 2, 3}
    assert {trial.mode for trial in trials} == {"auto", "messages"}


@pytest.mark.parametrize(
    ("kinds", "texts", "seconds", "wrong"),
    [
        (["trained"] * 4, ["a"] * 4, 1.0, ""),
        (["refused"] * 4, ["a"] * 4, 1.0, ""),
        (["refused", "own error", "refused", "refused"], ["a", "b", "a", "a"], 1.0, ""),
        (["refused"] * 4, ["a", "b", "a", "a"], 1.0, "the ranks were told different things"),
        (["trained otherwise"] * 4, ["a"] * 4, 1.0, "it trained to another result"),
        (["refused", "trained", "trained", "trained"], ["a"] * 4, 1.0, "only some ranks were told"),
        (["refused"] * 3 + ["hung"], ["a"] * 4, 1.0, "a rank hung"),
        (["refused"] * 3 + ["other error"], ["a"] * 4, 1.0, "an error of another kind"),
        (["refused"] * 4, ["a"] * 4, 71.0, "it took 71 s"),
        (["own error"] * 4, ["a", "b", "c", "d"], 1.0, "no rank was told of the others"),
    ],
)
def test_a_trial_is_judged_by_all_of_its_ranks(kinds: list[str], texts: list[str], seconds: float, wrong: str) -> None:
    ended = [Ended(kind, text, seconds) for kind, text in zip(kinds, texts, strict=True)]
    assert judged(draw(0, 1)[0], ended) == wrong


# Fingerprints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [3, 1001, SMALL_BYTES // 4 + 1, SMALL_BYTES + 3])
@pytest.mark.parametrize("in_full", [False, True])
def test_a_fingerprint_changes_with_one_entry_and_with_the_order(entries: int, in_full: bool) -> None:
    made = torch.Generator().manual_seed(entries)
    tensor = torch.randn(entries, generator=made)
    first = fingerprint(tensor, in_full=in_full)
    assert fingerprint(tensor.clone(), in_full=in_full) == first
    for position in (0, entries // 2, entries - 1):
        other = tensor.clone()
        other[position] += 1e-6 + other[position].abs() * 1e-6
        assert fingerprint(other, in_full=in_full) != first
    swapped = tensor.clone()
    swapped[[0, entries - 1]] = tensor[[entries - 1, 0]]
    assert fingerprint(swapped, in_full=in_full) != first
    assert fingerprint(tensor.view(1, -1), in_full=in_full) != first


def test_rows_that_change_places_change_the_fingerprint_of_a_large_batch() -> None:
    images = torch.randn(16, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert images.nbytes > SMALL_BYTES
    order = list(range(16))
    order[3], order[11] = order[11], order[3]
    assert fingerprint(images[order]) != fingerprint(images)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([True, False, True]),
        torch.tensor([1 + 2j, 3.0]),
        torch.zeros(0, 3),
        torch.tensor(3),
        torch.ones(5, dtype=torch.bfloat16)[1:],
        torch.arange(12).view(3, 4).T,
        torch.empty(4, device="meta"),
        torch.tensor([1 + 2j, 3.0]).conj(),
    ],
)
def test_any_tensor_has_a_fingerprint(tensor: torch.Tensor) -> None:
    assert fingerprint(tensor) == fingerprint(tensor.clone())


def test_files_that_differ_in_one_block_have_other_digests(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    data = bytearray(os.urandom(300_000))
    one.write_bytes(data)
    data[200_000] ^= 1
    other.write_bytes(data)
    assert digest_of_file(one) != digest_of_file(other)


def test_code_is_the_same_wherever_its_source_is() -> None:
    def made(text: str) -> Callable[..., object]:
        space: dict[str, Callable[..., object]] = {}
        exec(text, space)
        return space["f"]

    assert code_of(made("def f(x): return x + 1")) == code_of(made("\n\ndef f(x): return x + 1"))
    assert code_of(made("def f(x): return x + 1")) != code_of(made("def f(x): return x + 2"))
    inner = "def f(x): return [y for y in x if y in {'a', 'b'}]"
    assert code_of(made(inner)) == code_of(made(inner))
    assert code_of(made(inner)) != code_of(made(inner.replace("'b'", "'c'")))


# Claims -------------------------------------------------------------------------------------------------------------


def _changed(change: Callable[[nn.Module], object]) -> set[str]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 4))

    plain, other = build(), build()
    change(other)
    claims = zip(model_claims(plain), model_claims(other), strict=True)
    return {one.what for one, two in claims if one.digest != two.digest}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda m: m[0].weight.requires_grad_(False), {"the parameters of the model"}),
        (lambda m: m[0].double(), {"the parameters of the model"}),
        (lambda m: setattr(m[3], "weight", m[0].weight), {"the parameters of the model"}),
        (lambda m: m[1].register_buffer("more", torch.zeros(2)), {"the buffers of the model"}),
        (lambda m: m.eval(), {"the modules of the model"}),
        (lambda m: setattr(m[2], "p", 0.2), {"attributes of the model's modules"}),
        (lambda m: setattr(m[2], "rank", 3), set()),
        (lambda m: None, set()),
    ],
)
def test_what_a_model_is_compared_by(change: Callable[[nn.Module], object], what: set[str]) -> None:
    assert _changed(change) == what


def test_what_is_set_on_a_model_later_is_seen_in_every_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    flags = LiveFlags(dict(model.named_modules()))
    seen = {tuple(claim.digest for claim in flags.claims())}
    for change in (model.eval, model[0].bias.requires_grad_, lambda: model[0].bias.requires_grad_(False), model.double):
        change()
        seen.add(tuple(claim.digest for claim in flags.claims()))
    assert len(seen) == 4  # requires_grad_() changes nothing


def test_values_are_said_with_the_ranks_that_have_them() -> None:
    assert values_text({0: "4", 1: "5", 2: "4"}) == "4 on ranks 0 and 2, 5 on rank 1"
    said = {0: {"a": "1", "b": "2"}, 1: {"a": "1"}}
    assert values_text(said) == "b is 2 on rank 0, not there on rank 1"


# Before there are process groups ------------------------------------------------------------------------------------


def _shake(*ranks: tuple[int, dict[str, str], Exception | None], timeout_s: float = 20.0) -> list[Exception | None]:
    """What each rank (its number of ranks, what it says, why it failed) is told."""
    store, found = HashStore(), [None] * len(ranks)

    def one(rank: int, world_size: int, said: dict[str, str], failure: Exception | None) -> None:
        try:
            shake_hands(store, rank, world_size, said, failure, timeout_s)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank, *given)) for rank, given in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_ranks_that_say_the_same_start() -> None:
    assert _shake(*[(3, {"the mesh": "pp 3"}, None)] * 3) == [None] * 3


def test_different_degrees_are_named_on_every_rank() -> None:
    mesh = "the mesh is pp 2 × dp 2 on ranks 0 and 2, pp 4 × dp 1 on rank 1"
    told = _shake((3, {"the mesh": "pp 2 × dp 2"}, None), (3, {"the mesh": "pp 4 × dp 1"}, None),
                  (3, {"the mesh": "pp 2 × dp 2"}, None))  # fmt: skip
    assert [type(error) for error in told] == [DisagreementError] * 3
    assert all(mesh in str(error) for error in told)


def test_a_rank_that_cannot_start_says_so_to_the_others() -> None:
    own = ValueError("no such key")
    told = _shake((2, {}, None), (2, {}, own))
    assert told[1] is own
    assert "sw.init failed on rank 1: ValueError: no such key" in str(told[0])


def test_a_rank_that_was_started_in_another_world_is_told() -> None:
    begun = time.monotonic()
    told = _shake((2, {}, None), (2, {}, None), (3, {}, None))
    assert told[:2] == [None, None]
    assert "rank 0 was started as one of 2 ranks, and this one, rank 2, as one of 3" in str(told[2])
    assert time.monotonic() - begun < 10


def test_a_rank_that_does_not_come_is_named() -> None:
    told = _shake((3, {}, None), (3, {}, None), timeout_s=1.0)
    assert [type(error) for error in told] == [ClusterError] * 2
    assert all("rank 2 of 3 did not come to sw.init within 1 s" in str(error) for error in told)
