"""Optimizer states, gradients and parameters divided over replicas (ZeRO 1 to 3, in groups too), in 32 and 16 bits:
losses, norms, every gradient and the weights at the end are those of the unsplit run."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from shardwright.backends.torch.state.flat_layout import FlatLayout
from tests.comparison import Comparison
from tests.torch.launch import beside_unsplit, on_ranks, torchrun

CASES = {
    2: (
        "vit:1:2:1:z3",
        "gpt2:1:2:1:z2",
        "gpt2:1:2:1:bf16-z3",
        "llama:2:1:1:bf16",
        "llama:1:2:1:z3-stages",
    ),
    4: ("gpt2:2:2:1:z3-looped", "gpt2:2:2:1:z3-split", "llama:1:2:2:z3", "t5:2:2:1:z1", "images:1:4:1:z3-groups"),
}
SLOW = {
    2: ("llama:1:2:1:z3-recompute", "gpt2:1:2:1:z1", "gpt2:1:2:1:z3",
        "gpt2:1:2:1:bf16", "gpt2:1:2:1:bf16-z1", "t5:1:2:1:z3", "bert:1:2:1:z2",
        "gpt2:1:2:1:z3-last", "gpt2:1:2:1:z2-last", "gpt2:1:2:1:bf16-z3-stages", "mixtral:1:2:1:z3", "ncf:1:2:1:z3",
        "fused:1:2:1:z3"),
    4: ("gpt2:2:2:1:z3-ahead", "gpt2:2:2:1:z3-weights", "t5:2:2:1:z3-last", "gpt2:2:2:1:z1", "gpt2:2:2:1:z3",
        "llama:1:2:2:z1", "gpt2:1:4:1:z3-groups", "t5:2:2:1:z2", "bert:1:2:2:z3"),
    8: ("gpt2:2:2:2:z3", "gpt2:2:2:2:z1", "llama:2:2:2:z2"),
}  # fmt: skip
SMALL = (
    "same:adamw:1", "same:adamw:3", "same:sgd:2", "same:adafactor:1", "same:lamb:3", "frozen:1", "frozen:3",
    "same:adamw:0:gloo", "same:adamw:1:gloo", "same:adamw:3:gloo",
    "moved:3:1", "moved:0:2", "moved:1:3", "evaluated:1", "evaluated:3",
    "assigned:0", "assigned:1", "assigned:3", "exact:0", "exact:3", "freed:3", "watched:0", "watched:3",
    "muon:1:adamw", "muon:2:frozen", "muon:3:adamw",
    "limited:free", "limited:live", "limited:buckets", "limited:whole",
    "clipped:shard 3", "clipped:two optimizers", "clipped:scaler", "dropped:2",
)  # fmt: skip
REFUSED = {
    "refused:coupled": "Coupled computes its step on one parameter from the others too",
    "refused:written": "embedding.weight was written to in a step",
    "refused:late": "Lamb needs whole parameters",
    "refused:unwrapped": "Lamb may need whole parameters",
    "refused:hooked": "AdamW has a hook around its step",
    "refused:clipped": "call model.clip_grad_norm_",
    "refused:scaler": "wrap the optimizer",
    "refused:outside": "trains inside a function decorated with @sw.step",
    "refused:reassigned": "was written to in a step",
    "refused:group": "choose a divisor of 2",
    "refused:both": "bf16 and fp16 are both True",
    "refused:twice": "keep one of them",
    "refused:messages": "does not do sharded state",
    "clipped:unwrapped": "SGD is not wrapped: wrap it",
}


TRAFFIC = {
    "z3": (4, 2), "z3-recompute": (4, 2), "z3-last": (4, 1), "z3-stages": (1, 1), "bf16-z3-stages": (1, 2),
    "z3-looped": (1, 1), "z2-last": (1, 1),
}  # fmt: skip
"""The gathers of a group of parameters in a step, and the sums of its gradients, with two microbatches: at most, as a
pass begins with what the one before has left."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return beside_unsplit(tmp_path_factory.mktemp("sharded"), CASES, 280)


@pytest.fixture(scope="module")
def slowly_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    return beside_unsplit(tmp_path_factory.mktemp("sharded"), SLOW, 1200)


def require_same(result: dict) -> None:
    Comparison.of_ranks(result["same"]).require("losses", "norms", "gradients", "weights")
    Comparison.of_ranks(result["reload"]).require()
    assert result["names"]
    _, _, dp, _, how = result["case"].split(":")
    if how in TRAFFIC:
        gathers, sums = TRAFFIC[how]
        assert all(0 < found["gathers"] <= gathers and found["sums"] == sums for found in result["traffic"])
    ways = {"bf16": 1, "z3-groups": 2}.get(how, int(dp))
    assert result["held"] <= 1.15 * result["whole"] * result["share"] / ways


@pytest.mark.parametrize("case", [case for held in CASES.values() for case in held])
def test_a_run_with_shared_state_is_the_unsplit_run(trained: dict[str, dict], case: str) -> None:
    require_same(trained[case])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", [case for held in SLOW.values() for case in held])
def test_other_models_and_degrees(slowly_trained: dict[str, dict], case: str) -> None:
    require_same(slowly_trained[case])


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    out = tmp_path_factory.mktemp("sharded") / "small.json"
    outcome = on_ranks("sharded_state.py", 2, str(out), *SMALL, *REFUSED, timeout_s=200)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("case", SMALL)
def test_small_models_train_as_torch_alone_trains_them(small: dict[str, list[dict]], case: str) -> None:
    """Optimizers that need whole matrices, clipping in steps, layers that one replica leaves out, frozen parts, unused
    parameters, whole state dicts, other levels after a while, evaluation between steps."""
    Comparison.of_ranks([result["same"] for result in small[case]]).require("losses")
    for result in small[case]:
        if case.startswith("muon"):  # one of the eight matrices more than its share, at most
            assert result["entries"] <= result["all"] / 2 + 64 * 64
            assert result["states"] <= result["all_states"] / 2 + 64 * 64
            assert result["held"] <= 4 * result["entries"]
        if case.startswith("same") and ":0" not in case:
            assert result["held"] <= (0.6 if case != "same:lamb:3" else 0.7) * result["all"]


def test_sagemakers_limits_bound_what_is_whole_and_what_is_summed_at_once(small: dict[str, list[dict]]) -> None:
    """Layers of 4,160 parameters: without a limit one is gathered ahead of the one that runs. The largest group is the
    head with the norm."""
    free, live, buckets, whole = (small[f"limited:{case}"] for case in ("free", "live", "buckets", "whole"))
    for rank in range(2):
        largest = free[rank]["largest"]
        assert largest < free[rank]["live"] <= 2 * largest
        assert live[rank]["live"] == largest
        assert buckets[rank]["largest"] <= 4_200 < largest
        assert buckets[rank]["groups"] > free[rank]["groups"]
        assert free[rank]["staying"] == 0 < 7 * 4_160 <= whole[rank]["staying"]


def test_what_a_call_alone_used_is_freed_behind_it(small: dict[str, list[dict]]) -> None:
    """Whatever others were given too: of six layers one, the one ahead, and one that has read what an earlier layer
    left. Tables are gathered once for each microbatch, from their lookup to the backward of the head."""
    for result in small["freed:3"]:
        assert (result["layers"], result["tables"]) == (3, 1)


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_be_done_is_refused_on_every_rank(small: dict[str, list[dict]], case: str) -> None:
    for result in small[case]:
        assert REFUSED[case] in result["error"]


def test_a_write_through_data_stops_the_run(tmp_path: Path) -> None:
    """It shows on the ranks alone whose own part it changes; the others hear of it, or lose their connection."""
    out = tmp_path / "data.json"
    outcome = on_ranks("sharded_state.py", 2, str(out), "refused:data", timeout_s=60)
    assert "was written to in a step" in outcome.text
    if outcome.code == 0:  # every rank has caught an error
        assert all("Error: " in result["error"] for result in json.loads(out.read_text())["refused:data"])


@pytest.mark.parametrize("ways", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [(1,), (5, 7, 11), (1000, 1, 1, 64), (17,) * 9])
@pytest.mark.parametrize("whole", [False, True])
def test_every_entry_lies_in_one_shard(whole: bool, sizes: tuple[int, ...], ways: int) -> None:
    layout = FlatLayout.whole_parameters(sizes, [0] * ways) if whole else FlatLayout.cut(sizes, ways)
    assert layout.borders[0] == 0
    assert len(layout.borders) == ways + 1
    assert layout.entries == sum(layout.shard_entries(rank) for rank in range(ways))
    assert whole or len({layout.shard_entries(rank) for rank in range(ways)}) == 1
    for index, size in enumerate(sizes):
        spans = [layout.span(index, rank) for rank in range(ways)]
        held = sorted(entry for first, end in spans for entry in range(first, end))
        assert held == list(range(size))
        assert not whole or sum(end > first for first, end in spans) == 1
    taken = sorted((offset, offset + size) for offset, size in zip(layout.offsets, sizes, strict=True))
    assert all(end <= begin for (_, end), (begin, _) in pairwise(taken))


@pytest.mark.slow
def test_the_checks_for_gpus_hold_on_cpus(tmp_path: Path) -> None:
    """What `test_cuda.py` runs on every number of GPUs, over Gloo."""
    out = tmp_path / "out.json"
    outcome = torchrun("on_device.py", 2, "cpu", str(out))
    assert outcome.code == 0, outcome.text[-4000:]
    reports = json.loads(out.read_text())
    assert len(reports) == 18
    for report in reports:
        Comparison.of_ranks([report]).require("losses", "gradients")


@pytest.mark.parametrize("ways", [2, 3, 8])
@pytest.mark.parametrize("matrices", [[1024] * 12, [4096, 1024] * 7, [50_000, *[1024] * 30], [16, 32, 48, 64]])
@pytest.mark.parametrize("together", [1, 4])
def test_whole_matrices_are_balanced_over_all_buffers(matrices: list[int], ways: int, together: int) -> None:
    """With one matrix in each buffer, as of a linear layer, or several: no rank has more than its share and one."""
    held = [0] * ways
    for first in range(0, len(matrices), together):
        layout = FlatLayout.whole_parameters(matrices[first : first + together], held)
        held = [entries + layout.shard_entries(rank) for rank, entries in enumerate(held)]
    assert sum(held) == sum(matrices)
    assert max(held) <= sum(matrices) / ways + max(matrices)
