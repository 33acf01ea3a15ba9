"""The named networks: parameter counts as published, and a plan for each of the small ones by one command."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "networks"))
import own_models as own
import transformers_models as hf

PUBLISHED = {
    hf.bert_large: (340e6, 336_226_108),
    hf.roberta_large: (355e6, 355_412_057),
    hf.t5_11b: (11e9, 11_307_321_344),
    hf.gpt2_xl: (1.5e9, 1_557_611_200),
    hf.gpt3_175b: (175e9, 174_604_259_328),
    hf.megatron_8b: (8.3e9, 8_317_040_640),
    hf.turing_nlg_17b: (17.2e9, 17_176_845_728),
    hf.megatron_turing_530b: (530e9, 529_600_819_200),
    hf.gpt_1t: (1e12, 1_008_038_758_400),
    hf.speech_t5: (144e6, 144_431_684),
    own.ncf: (32e6, 31_832_577),
    own.vit_g: (1.84e9, 1_844_437_352),
}
FILES = {hf: "transformers_models.py", own: "own_models.py"}
COMMANDS = {
    "bert_large": ("--devices-per-node", "8", "--batch", "256"),
    "roberta_large": ("--devices-per-node", "8", "--batch", "256"),
    "t5_11b": ("--nodes", "4", "--devices-per-node", "8", "--batch", "512"),
    "gpt2_xl": ("--devices-per-node", "8", "--batch", "256"),
    "gpt3_175b": ("--nodes", "128", "--devices-per-node", "8", "--batch", "1536"),
    "megatron_8b": ("--nodes", "8", "--devices-per-node", "8", "--batch", "512"),
    "turing_nlg_17b": ("--nodes", "16", "--devices-per-node", "8", "--batch", "512"),
    "megatron_turing_530b": ("--nodes", "280", "--devices-per-node", "8", "--batch", "1960"),
    "speech_t5": ("--devices-per-node", "8", "--batch", "256"),
    "ncf": ("--devices-per-node", "8", "--batch", "65536"),
    "vit_g": ("--devices-per-node", "8", "--batch", "1024"),
}
"""What follows the model and the hardware on the command line."""
CHEAP = (hf.bert_large, own.ncf, own.vit_g)


@pytest.mark.parametrize("network", PUBLISHED, ids=lambda network: network.__name__)
def test_sizes_are_the_published_ones(network: Callable[[], Any]) -> None:
    """No memory is taken: weights are shapes."""
    model = network()[0]
    count = sum(parameter.numel() for parameter in model.parameters())
    rounded, exact = PUBLISHED[network]
    assert count == exact
    assert count == pytest.approx(rounded, rel=0.05)
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_each_is_planned_by_one_command(name: str, tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "examples" / "networks"
    file = next(file for module, file in FILES.items() if hasattr(module, name))
    command = ["plan", f"{folder / file}:{name}", "--cluster", "a100-80gb", *COMMANDS[name], "-o", str(tmp_path / "p")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    plan = sw.Plan.load(tmp_path / "p")
    assert plan.model.parameter_count == next(exact for n, (_, exact) in PUBLISHED.items() if n.__name__ == name)
    assert max(plan.predicted.peak_memory_bytes) <= min(plan.provenance.device_memory_bytes)
    assert plan.decision.shard == 0, "a runtime would refuse it"


@pytest.mark.parametrize("network", CHEAP, ids=lambda network: network.__name__)
def test_each_is_planned(network: Callable[[], Any]) -> None:
    model, sample, *loss = network()
    graph = sw.capture(model, sample, *loss)
    assert graph.parameter_count() == PUBLISHED[network][1]
    plan = sw.plan(graph, sw.Cluster("a100-80gb", devices_per_node=8), batch=64)
    assert max(plan.predicted.peak_memory_bytes) <= min(plan.provenance.device_memory_bytes)
    assert plan.alternatives
