"""What one of two processes does with a model of `real_models.py`: two steps of it, split, against the plain model."""

import copy
import json
import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import shardwright.torch as sw
from benchmarks.real_networks.registry import Loss
from shardwright.backends.torch.machine.watchdog import PeerError
from shardwright.core.errors import LossError, ShardwrightError
from tests.comparison import Comparison
from tests.models.unsplit import seeded_by_rule
from tests.torch.forked import note

STEPS, MICROBATCHES, RATE = 2, 2, 0.02
KEYS = {"pp": "pipeline_parallel_degree", "tp": "tensor_parallel_degree"}


@dataclass
class Expected:
    """What the plain model gives: losses and gradients of each step, and its state after them."""

    losses: list[list[float]]
    gradients: list[dict[str, Any]]
    state: dict[str, Any]


@dataclass
class Trial:
    """A model to be trained on two ranks of one axis."""

    model: torch.nn.Module
    batch: dict[str, Any]
    loss: Loss
    axis: str
    dtype: torch.dtype

    def run(self) -> None:
        """The life of a rank: notes a report."""
        warnings.filterwarnings("ignore")
        if self.dtype != torch.float32:
            torch.set_default_dtype(self.dtype)
            self.model = self.model.to(self.dtype)
            self.batch = {k: v.to(self.dtype) if v.is_floating_point() else v for k, v in self.batch.items()}
        try:
            expected = self.plain()
        except Exception as error:
            text = f"the plain model does not train: {type(error).__name__}: {error}"
            note("report", json.dumps({"error": {"text": text, "is_refusal": False, "is_peers": False}}))
            return
        try:
            note("report", json.dumps(self.split(expected)))
        except Exception as error:
            if os.environ.get("REAL_MODELS_TRACEBACK"):
                raise
            told = {
                "text": f"{type(error).__name__}: {error}", "is_refusal": isinstance(error, ShardwrightError),
                "is_peers": isinstance(error, PeerError),
            }  # fmt: skip
            note("report", json.dumps({"error": told}))

    def microbatch(self, number: int) -> dict[str, Any]:
        return {name: value.chunk(MICROBATCHES)[number] for name, value in self.batch.items()}

    def plain(self) -> Expected:
        model = copy.deepcopy(self.model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        found = Expected([], [], {})
        for step in range(STEPS):
            optimizer.zero_grad()
            losses = []
            for m in range(MICROBATCHES):
                with seeded_by_rule(model, seed=0, step=step, microbatch=m):
                    loss = self.loss(model, self.microbatch(m))
                (loss / MICROBATCHES).backward()
                losses.append(float(loss.detach()))
            found.losses.append(losses)
            found.gradients.append({n: _copy(p.grad) for n, p in model.named_parameters()})
            optimizer.step()
        found.state = {name: _copy(value) for name, value in model.state_dict().items()}
        return found

    def step(self, **meant: Any) -> Any:
        """The step as a user writes it."""
        loss_of = self.loss

        @sw.step
        def train_step(model: Any, batch: Any) -> Any:
            loss = loss_of(model, batch)
            model.backward(loss, **meant)
            return loss

        return train_step

    def split(self, expected: Expected) -> dict[str, Any]:
        sw.init({KEYS[self.axis]: 2, "microbatches": MICROBATCHES, "loss_scope": "replica", "wait_timeout_s": 120.0})
        train_step, more = self.step(), ""
        model = sw.DistributedModel(self.model)
        optimizer = sw.DistributedOptimizer(
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
        )
        same = Comparison()
        for step in range(STEPS):
            optimizer.zero_grad()
            try:
                found = train_step(model, self.batch)
            except LossError as error:  # asks what is meant, before anything is trained
                train_step, more = self.step(reduction="mean"), f"; told reduction='mean' when asked: {error}"[:160]
                found = train_step(model, self.batch)
            same.where = f"step {step}"
            same.losses([float(loss) for loss in found.outputs], expected.losses[step])
            same.gradients(_gradients(model), expected.gradients[step], part=True)
            optimizer.step()
        same.where = ""
        same.values(model.state_dict(), expected.state, relative=1e-4, absolute=1e-5, what="state")
        runtime = model.runtime
        told = {
            "same": same.report(), "by_messages": runtime.messages is not None,
            "more": more + _on_tensor_axis(runtime.tensor),
        }  # fmt: skip
        sw.shutdown()
        return told


def _on_tensor_axis(tensor: Any) -> str:
    """Why a model on the tensor axis is captured unit by unit, and how many units run whole."""
    if tensor is None or not tensor.by_calls_because:
        return ""
    return f"; by units, {len(tensor.whole_units)} of them whole: {tensor.by_calls_because[:160]}"


def _gradients(model: Any) -> dict[str, Any]:
    """Of the parameters of this rank, those in pieces put together."""
    shards = model.runtime.split_model.parts.tensor
    found = {}
    for name, parameter in sorted(model.local_named_parameters()):
        is_split = shards is not None and parameter.grad is not None
        found[name] = shards.whole(name, parameter.grad) if is_split else _copy(parameter.grad)
    return found


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
