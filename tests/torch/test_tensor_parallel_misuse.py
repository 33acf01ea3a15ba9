"""What users get wrong on the tensor axis is named, with the fix; what cannot run on pieces runs whole."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw
from shardwright.core.errors import LayoutError, PlanError
from shardwright.core.layout.placements import Layout, Split
from tests.torch.launch import on_ranks


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out: Path = tmp_path_factory.mktemp("misuse") / "said.json"
    outcome = on_ranks("tp_misuse.py", 2, str(out), timeout_s=150)
    assert outcome.code == 0, outcome.text[-4000:]
    return json.loads(out.read_text())


def test_a_hook_that_would_be_lost_is_refused(said: dict[str, str]) -> None:
    assert said["hook"].startswith("ShardwrightError: transformer.h.1 has a hook (hooked.<locals>.<lambda>)")
    assert "handle.remove()" in said["hook"]


def test_a_hook_on_one_rank_is_told_on_the_other_before_it_cuts_its_parameters(said: dict[str, str]) -> None:
    assert re.match(
        r"DisagreementError: .* failed on rank 1: ShardwrightError: transformer\.h\.1 has a hook",
        said["hook on one rank"],
    ), said["hook on one rank"]


def test_peers_with_different_batches_are_told_apart(said: dict[str, str]) -> None:
    assert "the ranks disagree on the contents of the batch" in said["inputs"]
    assert "shard and seed the data by sw.rdp_rank() of sw.rdp_size()" in said["inputs"]


def test_all_start_from_the_weights_of_the_first(said: dict[str, str]) -> None:
    assert said["seeds"] == ""


def test_a_model_with_gradients_of_its_own_runs_whole_and_right(said: dict[str, str]) -> None:
    reason = "Scaled has a gradient of its own (torch.autograd.Function)"
    assert json.loads(said["own gradient"]) == {f"layers.{i}": reason for i in range(3)}


def test_a_model_from_the_meta_device_runs_by_messages_on_whole_weights(said: dict[str, str]) -> None:
    assert said["by messages from meta"] == ""


def test_units_beside_one_that_runs_whole_are_on_pieces(said: dict[str, str]) -> None:
    split = [f"layers.{i}.{name}" for i in (0, 2) for name in ("down.weight", "up.bias", "up.weight")]
    assert said["mixed"] == f"{split} ['layers.1']"


def test_seeds_of_dropout_that_differ_are_named(said: dict[str, str]) -> None:
    assert "the ranks disagree on the seed in the step train_step: 0 on rank 0, 1 on rank 1" in said["dropout seeds"]
    assert "sw.set_seed" in said["dropout seeds"]


def test_widths_that_do_not_divide_stay_whole_with_the_reason(said: dict[str, str]) -> None:
    assert said["odd widths"].startswith("{} ")
    assert "2 does not divide 7: pad it to 8, or use a degree that divides it" in said["odd widths"]


def test_a_model_changed_after_planning_is_refused(said: dict[str, str]) -> None:
    assert "transformer.drop was replaced by Sequential after the model was wrapped" in said["changed module"]


def test_evaluation_at_another_length_runs_on_the_same_pieces(said: dict[str, str]) -> None:
    assert said["evaluation"] == ""


def test_a_registered_form_takes_the_place_of_its_class(said: dict[str, str]) -> None:
    assert said["registered"] == "InterleavedApart"
    assert "was built before Early was registered: register first" in said["built before"]


def test_a_rank_with_samples_of_its_own_gets_their_results(said: dict[str, str]) -> None:
    assert said["own results"] == ""
    assert "it cannot be told which part of leaf 0 of what the step pairs returns" in said["own parts"]
    assert "what every microbatch gets whole" in said["other scales"]
    assert "scale" in said["other scales"]
    assert "brings every sample together with every other" in said["own parts"]


def test_units_on_pieces_are_compiled(said: dict[str, str]) -> None:
    assert said["compiled"] == "4 {'OptimizedModule'}"
    assert "draws random numbers" in said["compiled with dropout"]
    assert "set its dropout to 0" in said["compiled with dropout"]


def test_a_tied_weight_with_two_layouts(tmp_path: Path) -> None:
    """Asked for by its two names, and in a plan file where the slots of its two uses disagree."""
    ids = torch.zeros(4, 8, dtype=torch.long)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=16, use_cache=False))
    graph = sw.capture(model, {"input_ids": ids, "labels": ids})
    cluster = sw.Cluster("cpu", devices_per_node=2)
    pins = {"batch": 4, "microbatch": 2, "pp": 1, "tp": 2, "dp": 1, "sequence_parallel": False}
    asked = [(r"wte\.weight", Layout.of(tp=Split(0))), (r"lm_head\.weight", Layout.of(tp=Split(1)))]
    with pytest.raises(LayoutError, match=r"puts transformer\.wte\.weight at S0, .* lm_head\.weight at S1: keep one"):
        sw.plan(graph, cluster, layouts=asked, **pins)
    plan = sw.plan(graph, cluster, layouts=asked[:1], **pins)
    file = tmp_path / "plan.json"
    plan.save(file)
    said = json.loads(file.read_text())
    (slot,) = {f"{plan.model.unit_classes[int(unit)]}/{role}" for unit, role in [plan.model.ties[0][1].split("/")]}
    del said["decision"]["layouts"][slot]
    file.write_text(json.dumps(said))
    with pytest.raises(PlanError, match=rf"tied parameter transformer\.wte\.weight has two layouts: .* for {slot}, or"):
        sw.Plan.load(file)
