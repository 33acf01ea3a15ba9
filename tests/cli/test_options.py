"""Every option of `plan()` on the command line gives the file that Python gives, which says what was pinned."""

from pathlib import Path
from typing import Any

import pytest

import shardwright as sw
from shardwright.commands.model_file import load_model
from shardwright.core.layout.placements import Layout, Split
from shardwright.core.search.options import Options
from shardwright.core.values.fields import fields_of
from tests.cli.conftest import run

OPTIONS: dict[str, tuple[tuple[object, ...], dict[str, Any]]] = {
    "batch": (("--batch", 32), {"batch": 32}),
    "pp": (("--pp", 2), {"pp": 2}),
    "tp": (("--tp", 2), {"tp": 2}),
    "dp": (("--dp", 2), {"dp": 2}),
    "microbatch": (("--microbatch", 2), {"microbatch": 2}),
    "virtual_stages": (("--virtual-stages", 2, "--pp", 2), {"virtual_stages": 2, "pp": 2}),
    "schedule": (("--schedule", "gpipe", "--pp", 2), {"schedule": "gpipe", "pp": 2}),
    "slices": (("--slices", 2, "--pp", 2, "--schedule", "1f1b"), {"slices": 2, "pp": 2, "schedule": "1f1b"}),
    "slice_lengths": (
        ("--slice-lengths", "3,1", "--pp", 2, "--schedule", "gpipe"),
        {"slice_lengths": [3, 1], "pp": 2, "schedule": "gpipe"},
    ),
    "recompute": (("--recompute", "full"), {"recompute": "full"}),
    "kept_units": (("--recompute", "full", "--kept-units", "0, 2"), {"recompute": "full", "kept_units": [0, 2]}),
    "offloaded_units": (
        ("--recompute", "full", "--offloaded-units", "1"),
        {"recompute": "full", "offloaded_units": [1]},
    ),
    "other_recompute": (
        ("--recompute", "full", "--other-recompute", "elementwise", "--other-units", "1"),
        {"recompute": "full", "other_recompute": "elementwise", "other_units": [1]},
    ),
    "other_units": (
        ("--recompute", "elementwise", "--other-recompute", "full", "--other-units", "1,2"),
        {"recompute": "elementwise", "other_recompute": "full", "other_units": [1, 2]},
    ),
    "activation_loading_horizon": (
        ("--recompute", "full", "--offloaded-units", "1", "--activation-loading-horizon", 2),
        {"recompute": "full", "offloaded_units": [1], "activation_loading_horizon": 2},
    ),
    "offload_states": (("--offload-states", "optimizer"), {"offload_states": "optimizer"}),
    "shard": (("--shard", 2, "--dp", 4), {"shard": 2, "dp": 4}),
    "shard_group": (("--shard-group", 2, "--shard", 1, "--dp", 4), {"shard_group": 2, "shard": 1, "dp": 4}),
    "gathered_stages": (
        ("--gathered-stages", 2, "--shard", 3, "--dp", 2, "--pp", 2, "--virtual-stages", 2, "--schedule", "looped-bfs"),
        {"gathered_stages": 2, "shard": 3, "dp": 2, "pp": 2, "virtual_stages": 2, "schedule": "looped-bfs"},
    ),
    "look_ahead": (
        ("--look-ahead", 0, "--gathered-stages", 1, "--shard", 3, "--dp", 4, "--pp", 1),
        {"look_ahead": 0, "gathered_stages": 1, "shard": 3, "dp": 4, "pp": 1},
    ),
    "reduce_after": (
        ("--reduce-after", "last", "--shard", 3, "--dp", 4),
        {"reduce_after": "last", "shard": 3, "dp": 4},
    ),
    "whole_below_bytes": (
        ("--whole-below-bytes", 4096, "--shard", 3, "--dp", 4),
        {"whole_below_bytes": 4096, "shard": 3, "dp": 4},
    ),
    "hierarchical_gathers": (
        ("--no-hierarchical-gathers", "--shard", 3, "--dp", 4),
        {"hierarchical_gathers": False, "shard": 3, "dp": 4},
    ),
    "precision": (("--precision", "fp32"), {"precision": "fp32"}),
    "optimizer": (("--optimizer", "sgd"), {"optimizer": "sgd"}),
    "loss_scope": (("--loss-scope", "global"), {"loss_scope": "global"}),
    "stage_starts": (("--pp", 2, "--stage-starts", "0,3"), {"pp": 2, "stage_starts": (0, 3)}),
    "sequence_parallel": (("--no-sequence-parallel", "--tp", 4), {"sequence_parallel": False, "tp": 4}),
    "gradient_precision": (("--gradient-precision", "fp32"), {"gradient_precision": "fp32"}),
    "layouts": (
        ("--tp", 4, "--layout", "layers.0.weight=whole", "--layout", ".*weight=1"),
        {"tp": 4, "layouts": [("layers.0.weight", Layout()), (".*weight", Layout.of(tp=Split(1)))]},
    ),
    "placement_order": (("--placement-order", "DPT"), {"placement_order": "DPT"}),
    "partitioner": (("--partitioner", "tree", "--pp", 2), {"partitioner": "tree", "pp": 2}),
    "memory_weight": (
        ("--memory-weight", 0.3, "--partitioner", "tree", "--pp", 2),
        {"memory_weight": 0.3, "partitioner": "tree", "pp": 2},
    ),
    "frameworks": (("--framework", "torch"), {"frameworks": ["torch"]}),
    "like": (("--like", "fsdp2"), {"like": "fsdp2"}),
    "devices": (("--devices", 2), {"devices": 2}),
    "offload": (("--offload",), {"offload": True}),
    "answer": (("--answer", "fastest"), {"answer": "fastest"}),
    "headroom": (("--headroom", 0.25), {"headroom": 0.25}),
    "tokens": (("--tokens", "1e9"), {"tokens": 1e9}),
    "samples": (("--samples", 4096), {"samples": 4096}),
    "deadline": (("--samples", 64, "--deadline", "36h"), {"samples": 64, "deadline": "36h"}),
    "price": (("--price", 1.5), {"price": 1.5}),
    "budget": (("--samples", 64, "--budget", 50, "--price", 2), {"samples": 64, "budget": 50.0, "price": 2.0}),
}  # fmt: skip
"""For every option of `plan()`: how it stands on the command line, and in Python."""


def test_the_table_has_every_option() -> None:
    assert list(OPTIONS) == [field.name for field in fields_of(Options) if field.option is not None]


@pytest.mark.parametrize("option", OPTIONS)
def test_the_command_line_gives_the_file_that_python_gives(models: Path, tmp_path: Path, option: str) -> None:
    arguments, asked = OPTIONS[option]
    batch = () if option == "batch" else ("--batch", 16)
    model = "of_tokens" if option in ("tokens", "slices", "slice_lengths") else "with_loss"
    plan = same(f"{models}/torch_models.py:{model}", tmp_path, (*batch, *arguments), {"batch": 16} | asked)
    for name, value in asked.items():
        wanted = tuple(value) if isinstance(value, list) else value
        if hasattr(plan.decision, name) and name != "layouts":
            assert getattr(plan.decision, name) == wanted
        if name not in ("batch", "layouts", "frameworks"):
            assert f"{name}={wanted}" in plan.provenance.pinned


@pytest.mark.parametrize(
    ("model", "source"),
    [("torch_models.py:marked", "set_tensor_parallelism"), ("jax_models.py:partitioned", "logical axes")],
)
def test_what_the_model_itself_says_is_pinned_by_both(models: Path, tmp_path: Path, model: str, source: str) -> None:
    plan = same(f"{models}/{model}", tmp_path, ("--batch", 16, "--tp", 2), {"batch": 16, "tp": 2})
    assert any(source in pin for pin in plan.provenance.pinned), plan.provenance.pinned
    ((slot, by),) = {each for each in plan.provenance.pinned_layouts if "w" in each[0]}
    assert source in by
    names = {
        name
        for unit, bound in enumerate(plan.bindings[0][1].units)
        for role, name, _ in bound.parameters
        if f"{plan.model.unit_classes[unit]}/{role}" == slot
    }
    assert any(f"pinned by {by}" in sw.explain(plan, name) for name in names)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("torch_models.py:without_loss", "torch_models.py:squares"),
        ("torch_models.py:without_loss", "elsewhere.py:squares"),
        ("jax_models.py:without_loss", "jax_models.py:against_targets"),
    ],
)
def test_a_loss_is_named_beside_the_model(models: Path, tmp_path: Path, model: str, loss: str) -> None:
    (models / "elsewhere.py").write_text("def squares(output):\n    return output.square().mean()\n")
    same(f"{models}/{model}", tmp_path, ("--batch", 16, "--pp", 2), {"batch": 16, "pp": 2}, f"{models}/{loss}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("plan", "with_loss", "--batch", 4, "--loss", "squares"),
            "returns a loss, and --loss {file}:squares names one",
        ),
        (("plan", "without_loss", "--batch", 4, "--loss", "sqares"), "did you mean 'squares'?"),
        (("plan", "without_loss", "--batch", 4, "--loss", "torch"), "is a module, not a function"),
        (("partition", "with_loss", "--stages", 2, "--loss", "squares"), "leave out one of them"),
    ],
)
def test_a_loss_that_cannot_be_is_named(models: Path, arguments: tuple[object, ...], said: str) -> None:
    file = models / "torch_models.py"
    command, model, *rest, loss = arguments
    ran = run(command, f"{file}:{model}", "--cluster", "cpu", "--devices-per-node", 2, *rest, f"{file}:{loss}")
    assert ran.code == 2
    assert said.format(file=file) in ran.flat_err


def test_a_loss_is_a_function_in_a_file_and_goes_with_a_model(models: Path, tmp_path: Path) -> None:
    model = f"{models}/torch_models.py:without_loss"
    ran = run("plan", model, "--cluster", "cpu", "--batch", 4, "--loss", "squares")
    assert (ran.code, "a loss is FILE.py:FUNCTION" in ran.flat_err) == (2, True)
    ran = run("profile", tmp_path / "machine.toml", "--loss", f"{models}/torch_models.py:squares")
    assert (ran.code, "without --model: add --model" in ran.flat_err) == (2, True)


def same(
    target: str, folder: Path, arguments: tuple[object, ...], asked: dict[str, Any], loss: str | None = None
) -> sw.Plan:
    """The plan that both ways give."""
    if loss is not None:
        arguments = (*arguments, "--loss", loss)
    shell, python = folder / "shell.json", folder / "python.json"
    ran = run("plan", target, "--cluster", "a100-80gb", "--devices-per-node", 4, *arguments, "-o", shell)
    assert ran.code == 0, ran.err
    given = load_model(target, loss)
    graph = sw.capture(given.model, given.sample, given.loss)
    plan = sw.plan(graph, sw.Cluster("a100-80gb", devices_per_node=4), **asked)
    plan.save(python)
    assert shell.read_text() == python.read_text()
    return plan
