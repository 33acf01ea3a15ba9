"""Residual networks whose loss is the mean square of their output, written out in NumPy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwright.core.cluster.hardware.measurements import Measurements, MeasureProgress
from shardwright.core.errors import CaptureError, MissingCapabilityError
from shardwright.core.model.graph import Call, Graph, Op, OpKind, Parameter, Tensor, TensorRole
from shardwright.core.plan.plan import Plan
from shardwright.core.rules import op_rules
from shardwright.core.schedule.timeline import Timeline
from tests.numpy_backend import REGISTRATION


class Network:
    """``x + relu(x @ up + up bias) @ down + down bias``, block after block."""

    def __init__(self, blocks: int, width: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.blocks, self.width = blocks, width
        self.parameters: dict[str, np.ndarray] = {}
        for block in range(blocks):
            for name, shape in (("up", (width, 4 * width)), ("down", (4 * width, width))):
                self.parameters[f"blocks.{block}.{name}.weight"] = random.normal(0, 0.1, shape)
                self.parameters[f"blocks.{block}.{name}.bias"] = np.zeros(shape[1])

    def output(self, x: np.ndarray) -> np.ndarray:
        """The output for a batch."""
        p = self.parameters
        for block in range(self.blocks):
            hidden = x @ p[f"blocks.{block}.up.weight"] + p[f"blocks.{block}.up.bias"]
            x = x + np.maximum(hidden, 0) @ p[f"blocks.{block}.down.weight"] + p[f"blocks.{block}.down.bias"]
        return x

    def loss_and_gradients(self, x: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
        """The mean square of the output, and its gradient with respect to every parameter."""
        p, kept = self.parameters, []
        for block in range(self.blocks):
            hidden = x @ p[f"blocks.{block}.up.weight"] + p[f"blocks.{block}.up.bias"]
            kept.append((x, hidden))
            x = x + np.maximum(hidden, 0) @ p[f"blocks.{block}.down.weight"] + p[f"blocks.{block}.down.bias"]
        gradients: dict[str, np.ndarray] = {}
        gradient = 2 * x / x.size
        for block in reversed(range(self.blocks)):
            entered, hidden = kept[block]
            gradients[f"blocks.{block}.down.weight"] = np.maximum(hidden, 0).T @ gradient
            gradients[f"blocks.{block}.down.bias"] = gradient.sum(0)
            inner = (gradient @ p[f"blocks.{block}.down.weight"].T) * (hidden > 0)
            gradients[f"blocks.{block}.up.weight"] = entered.T @ inner
            gradients[f"blocks.{block}.up.bias"] = inner.sum(0)
            gradient = gradient + inner @ p[f"blocks.{block}.up.weight"].T
        return float(np.mean(x**2)), gradients


class _Capture:
    """Collects the graph of a network, op by op."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.calls = [Call("", 0)]
        self.parameters: list[Parameter] = []
        self.call = 0

    def tensor(self, width: tuple[int, ...], *, batched: bool = True, role: TensorRole = "activation") -> int:
        shape = (0, *width) if batched else width
        slopes = (1, *(0 for _ in width)) if batched else tuple(0 for _ in width)
        self.tensors.append(Tensor(shape, slopes, "float32", role, ""))
        return len(self.tensors) - 1

    def parameter(self, name: str, value: np.ndarray) -> int:
        tensor = self.tensor(value.shape, batched=False, role="parameter")
        self.parameters.append(Parameter(name, tensor))
        return tensor

    def op(self, kind: OpKind, name: str, inputs: Sequence[int], out: int, labels: op_rules.Labelled) -> int:
        self.ops.append(Op(kind, name, tuple(inputs), (out,), labels.labels, labels.special, labels.offsets, self.call))
        return out

    def elementwise(self, name: str, width: int, *inputs: int) -> int:
        shapes = [self.tensors[each].shape(2) for each in inputs]
        return self.op("elementwise", name, inputs, self.tensor((width,)), op_rules.elementwise(shapes, [(2, width)]))

    def linear(self, x: int, prefix: str, parameters: Mapping[str, np.ndarray]) -> int:
        weight, bias = parameters[f"{prefix}.weight"], parameters[f"{prefix}.bias"]
        width = weight.shape[1]
        inputs = (x, self.parameter(f"{prefix}.weight", weight))
        y = self.op("contraction", "mm", inputs, self.tensor((width,)), op_rules.contraction("sk", "kn", "sn"))
        return self.elementwise("add", width, y, self.parameter(f"{prefix}.bias", bias))


class NumpyBackend:
    """`shardwright.backends.protocol.Backend` for networks in NumPy."""

    name = REGISTRATION.name
    capabilities = REGISTRATION.capabilities

    def capture(
        self, model: Network, sample: np.ndarray, loss: Callable[..., Any] | None = None, *, batch_dims: Any = None,
        require_loss: bool = True,
    ) -> Graph:  # fmt: skip
        """The graph of a network with its own loss. Raises CaptureError for another one, or another batch dim."""
        if loss is not None or batch_dims is not None:
            raise CaptureError("a Network has its own loss, and its samples lie along dim 0: leave both out")
        width, made = model.width, _Capture()
        x = source = made.tensor((width,), role="input")
        for block in range(model.blocks):
            made.calls.append(Call(f"blocks.{block}", 0, 0))
            made.call = len(made.calls) - 1
            y = made.elementwise("relu", 4 * width, made.linear(x, f"blocks.{block}.up", model.parameters))
            x = made.elementwise("add", width, x, made.linear(y, f"blocks.{block}.down", model.parameters))
        made.call = 0
        square = made.elementwise("mul", width, x, x)
        out = made.tensor((), batched=False)
        made.op("reduction", "mean", [square], out, op_rules.reduction((2, width), [0, 1]))
        return Graph(
            self.capabilities, "Network", tuple(made.tensors), tuple(made.ops), tuple(made.calls),
            tuple(made.parameters), (source,), (out,), len(sample),
        )  # fmt: skip

    def compile(self, plan: Plan, model: Network, *, rate: float = 0.1) -> "Training":
        """The plan bound to a network, which SGD trains."""
        decision = plan.decision
        self.capabilities.require_axes({"pp": decision.pp, "dp": decision.dp, "tp": decision.tp})
        plan.require_model(self.name, tuple(model.parameters), "Network")
        return Training(plan, model, rate)

    def profile(self, *, name: str, budget_s: float, progress: MeasureProgress | None = None) -> Measurements:
        """Not offered."""
        raise MissingCapabilityError("the numpy backend measures no machine: profile with --framework torch or jax")

    def longest_s(self, seconds: float) -> float:
        """What is given: there is one process."""
        return seconds


class Training:
    """A network trained by SGD, microbatch by microbatch."""

    def __init__(self, plan: Plan, model: Network, rate: float) -> None:
        self.plan, self.model, self.rate = plan, model, rate

    def step(self, batch: np.ndarray) -> float:
        """One step; the mean loss of the microbatches."""
        parts = np.split(np.asarray(batch, dtype=np.float64), self.plan.microbatches)
        found = [self.model.loss_and_gradients(part) for part in parts]
        for name in self.model.parameters:
            mean = sum(gradients[name] for _, gradients in found) / len(found)
            self.model.parameters[name] = self.model.parameters[name] - self.rate * mean
        return float(np.mean([loss for loss, _ in found]))

    def timelines(self, batch: np.ndarray, steps: int) -> Sequence[Timeline]:
        """Not offered."""
        raise MissingCapabilityError("the numpy backend measures no timelines")

    def whole_parameters(self) -> Mapping[str, np.ndarray]:
        """Every parameter by its name."""
        return self.model.parameters


BACKEND = NumpyBackend()
