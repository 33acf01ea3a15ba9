"""The PyTorch backend. Capture and the runtime are loaded when they are first asked for."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwright.backends.capabilities import TORCH
from shardwright.core.cluster.hardware.measurements import Measurements, MeasureProgress
from shardwright.core.model.graph import Graph

if TYPE_CHECKING:
    from shardwright.backends.protocol import Backend, Executable
    from shardwright.core.plan.plan import Plan

CAPABILITIES = TORCH


class TorchBackend:
    """The PyTorch implementation of `backends.protocol.Backend`."""

    name = "torch"
    capabilities = CAPABILITIES

    def capture(
        self,
        model: Any,
        sample: Any,
        loss: Callable[..., Any] | None = None,
        *,
        batch_dims: Any = None,
        require_loss: bool = True,
    ) -> Graph:
        """The graph of an `nn.Module`: see `backends.torch.capture.model.capture`. Raises CaptureError."""
        from shardwright.backends.torch.capture.model import capture

        return capture(
            model, sample, loss, batch_dims=batch_dims, require_loss=require_loss, capabilities=self.capabilities
        )

    def compile(self, plan: "Plan", model: Any, **options: Any) -> "Executable":
        """The plan bound to the model, ready to train."""
        executable: Executable = import_module("shardwright.backends.torch.executable").compile(plan, model, **options)
        return executable

    def profile(self, *, name: str, budget_s: float, progress: MeasureProgress | None = None) -> Measurements:
        """The measurements of this process's device and its group."""
        measured: Measurements = import_module("shardwright.backends.torch.machine.profile").profile(
            name=name, budget_s=budget_s, progress=progress
        )
        return measured

    def longest_s(self, seconds: float) -> float:
        """The largest ``seconds`` over the process group, where there is one."""
        longest: float = import_module("shardwright.backends.torch.machine.profile").longest_s(seconds)
        return longest


BACKEND: "Backend" = TorchBackend()
