"""Predicted memory of torch.nn's layers against what torch holds, and ops whose memory nobody knows."""

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from memory_cases import CASES, NO_LAYERS, layer_classes
from memory_modules import LEAST, MOST, compared

SAMPLE = ("SiLU", "MaxPool2d", "MSELoss", "KLDivLoss", "LSTM, both directions", "LayerNorm, not affine")


def test_every_layer_is_tried_or_named() -> None:
    assert layer_classes() == {case.name for case in CASES} | NO_LAYERS.keys()


@pytest.mark.parametrize("title", SAMPLE)
def test_a_layers_memory_is_predicted(title: str) -> None:
    (case,) = (case for case in CASES if case.title == title)
    measured, predicted = compared(case)
    assert LEAST * measured <= predicted <= MOST * measured


def test_an_op_that_cannot_be_seen_is_counted_from_above_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwright.backends.torch.capture import op_memory
    from shardwright.backends.torch.capture.call_forms import CallForm

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(512))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.silu(value * self.scale).mean()

    batch = {"value": torch.rand(8, 512)}
    known = sw.plan(sw.capture(Model(), batch), sw.Cluster("cpu"), batch=8, precision="fp32").predicted
    seen_of = op_memory.seen_of

    def not_silu(call: CallForm, *, narrow: bool) -> object:
        return None if "silu" in call.func._schema.name else seen_of(call, narrow=narrow)

    monkeypatch.setattr(op_memory, "seen_of", not_silu)
    graph = sw.capture(Model(), batch)
    with pytest.warns(UserWarning, match=r"memory of aten\.silu is counted from above"):
        unknown = sw.plan(graph, sw.Cluster("cpu"), batch=8, precision="fp32").predicted
    assert unknown.peak_memory_bytes[0] > known.peak_memory_bytes[0]
