"""Activation checkpointing that the user asks for: in the model, by marks, or by patterns of module paths."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardwright
import shardwright.torch as sw
from shardwright.backends.torch.capture.own_checkpoints import plain_checkpoints
from shardwright.backends.torch.compat import CHECKPOINTS
from shardwright.core.errors import CaptureError, PlanError, PlanWarning, ShardwrightError
from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("own_checkpoints.py", 2, timeout_s=150)


@pytest.mark.parametrize("check", checks_in("own_checkpoints.py"))
def test_on_two_stages(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
        self.part = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = checkpoint(self.up, x, use_reentrant=False) if self.part else self.up(x)
        return x + self.down(up.relu())


class Rows(nn.Module):
    def __init__(self, around: Any = lambda block, x: block(x)) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.around(block, x)
        return self.leave(x).square().mean()


def plan_of(model: nn.Module, **asked: Any) -> shardwright.Plan:
    graph = shardwright.capture(model, torch.zeros(2, 4))
    return shardwright.plan(graph, shardwright.Cluster("cpu"), batch=8, microbatch=4, **asked)


def test_torch_has_the_names_that_stand_ins_replace() -> None:
    assert all(hasattr(torch_checkpoint, name) for name in CHECKPOINTS)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_plan_recomputes_what_the_model_checkpoints(reentrant: bool) -> None:
    model = Rows(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    plan, plain = plan_of(model), plan_of(Rows())
    assert (plan.decision.recompute, plain.decision.recompute) == ("full", "none")
    assert [mode == "full" for mode in plan.unit_modes] == [False, True, True, True, True, False]
    assert plan.predicted.memory[0].activations_bytes < plain.predicted.memory[0].activations_bytes
    assert plan.predicted.step_time_s > plain.predicted.step_time_s
    pinned = plan_of(Rows(), recompute={"blocks": "full"})
    assert pinned.decision == plan.decision
    assert pinned.predicted == plan.predicted


def test_marks_are_pins() -> None:
    model = Rows()
    sw.set_activation_checkpointing(model.blocks[2])
    assert plan_of(model).unit_modes == ("none", "none", "none", "full", "none", "none")
    row = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(3)))
    with pytest.warns(
        PlanWarning, match="strategy='group_2': each module of the Sequential is computed again by itself"
    ):
        sw.set_activation_checkpointing(row[1:], strategy="group_2")
    with pytest.raises(
        PlanError, match=r"recompute='none' keeps units that are to be recomputed: blocks\.2 and 0 other"
    ):
        plan_of(model, recompute="none")
    assert plan_of(model, recompute="full").unit_modes.count("full") == 4


def test_marks_of_rows_of_layers_and_of_the_whole_model() -> None:
    class Row(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))

    model = Rows()
    model.blocks = nn.ModuleList([Row() for _ in range(4)])
    sw.set_activation_checkpointing(model.blocks[1])  # each of its layers, which is all of it
    assert plan_of(model).unit_modes == ("none", "none", "full", "none", "none", "none")
    whole = Rows()
    sw.set_activation_checkpointing(whole)
    with pytest.raises(CaptureError, match=r"the whole Rows is marked .*: mark its blocks"):
        plan_of(whole)


def test_units_that_are_never_recomputed_are_named() -> None:
    model = Rows()
    sw.set_activation_checkpointing(model.enter)
    with pytest.warns(PlanWarning, match="enter and 0 other units, which have no others like them, are checkp") as said:
        assert plan_of(model).decision.recompute == "none"
    assert [each.filename for each in said] == [__file__]
    with pytest.raises(PlanError, match=r"'enter': 'full'}: units that have no others like them"):
        plan_of(Rows(), recompute={"enter": "full"})


def test_checkpoints_are_plain_in_one_thread_alone() -> None:
    runs = []

    def function(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x.sin()

    def count() -> int:
        runs.clear()
        checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
        return len(runs)

    first, second = plain_checkpoints(), plain_checkpoints()
    first.__enter__()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(count).result() == 2
        other.submit(second.__enter__).result()
        assert count() == 1
        first.__exit__(None, None, None)
        assert count() == 2
        assert other.submit(count).result() == 1
        other.submit(second.__exit__, None, None, None).result()
    assert count() == 2


def test_patterns_name_units() -> None:
    asked = {"blocks.[01]": "full", "blocks.3": "offload", "blocks": "none"}
    assert plan_of(Rows(), recompute=asked).unit_modes == ("none", "full", "full", "none", "offload", "none")
    assert plan_of(Rows(), recompute={"*": "none"}).decision.recompute == "none"
    asked = {"blocks.[01]": "full", "blocks.2": "elementwise"}
    assert plan_of(Rows(), recompute=asked).unit_modes == ("none", "full", "full", "elementwise", "none", "none")
    asked = {"blocks.1": "offload", "blocks": "elementwise"}
    assert plan_of(Rows(), recompute=asked).unit_modes == (
        "none",
        "elementwise",
        "offload",
        *["elementwise"] * 2,
        "none",
    )


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"block.1": "full"}, r"matches no module of Rows: did you mean 'blocks\.1'\?"),
        ({"blocks.1.up": "full"}, r"blocks\.1\.up is a part of the unit blocks\.1, .* name 'blocks\.1'"),
        ({"blocks": "selective"}, "by module there is 'none', 'offload', 'elementwise', 'alternate', 'full' or 'prod"),
        (
            {"blocks.0": "full", "blocks.1": "elementwise", "blocks": "alternate"},
            "in two modes at most, .* given 'full",
        ),
        ({"blocks.0": "offload", "blocks.1": "elementwise", "blocks": "alternate"}, "'full' one of them where others"),
        ({"blocks.0": "full", "blocks": "products:uq"}, "'uq' is no module of a unit that makes a product"),
        ({}, "expected a policy for each pattern"),
        ({"blocks": "none", "blocks.3": "offload"}, "'blocks.3': 'offload'} decides nothing: patterns before it"),
    ],
)
def test_bad_patterns(asked: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(Rows(), recompute=asked)


def test_maxtexts_names() -> None:
    assert plan_of(Rows(), recompute="minimal").decision.recompute == "selective"
    with pytest.raises(PlanError, match=r"recompute='save_qkv_proj' is a policy of MaxText's .* take 'selective'"):
        plan_of(Rows(), recompute="save_qkv_proj")


def test_patterns_and_numbers_do_not_go_together() -> None:
    with pytest.raises(PlanError, match=r"recompute by module and kept_units=\[1\] both name units"):
        plan_of(Rows(), recompute={"blocks": "full"}, kept_units=[1])


def test_what_is_no_whole_unit_is_said() -> None:
    parts = Rows()
    for block in parts.blocks:
        block.part = True
    with pytest.warns(PlanWarning, match=r"blocks\.0\.up and 3 other modules are parts of units"):
        assert plan_of(parts).decision.recompute == "none"
    with pytest.warns(PlanWarning, match="Rows: what is checkpointed here is no single call of a module") as said:
        plan_of(Rows(lambda block, x: checkpoint(torch.sin, block(x), use_reentrant=False)))
    assert [each.filename for each in said] == [__file__]
    with pytest.warns(PlanWarning, match="Rows: what is checkpointed here is no single call of a module"):
        plan_of(Rows(lambda block, x: checkpoint(lambda y: block(y).sin(), x, use_reentrant=False)))

    def policy(*_: Any, **__: Any) -> Any:
        return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    by_policy = Rows(lambda block, x: checkpoint(block, x, use_reentrant=False, context_fn=contexts))
    with pytest.warns(PlanWarning, match="by a policy"):
        assert plan_of(by_policy).decision.recompute == "none"


def test_bad_marks() -> None:
    for given, said in (
        ({"module": "blocks"}, "takes a torch.nn.Module, not a str"),
        ({"module": Rows(), "preserve_rng_state": False}, "draws the same random numbers again"),
        ({"module": Rows(), "strategy": "group_0"}, "expected 'each', 'contiguous' or 'group_N'"),
        ({"module": Rows(), "pack_args_as_tuple": 1}, "expected True or False"),
    ):
        with pytest.raises(ShardwrightError, match=said):
            sw.set_activation_checkpointing(**given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sw.set_activation_checkpointing(nn.Sequential(nn.Linear(2, 2)), strategy="each")
