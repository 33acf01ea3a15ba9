"""Where models of other libraries are registered, with what their builders share.

A builder gives a model in a small configuration with random weights, a batch of `SAMPLES` samples, and the loss of a
microbatch as a user of that library would write it.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional as F

SAMPLES = 4
VOCABULARY, LENGTH = 48, 10
Loss = Callable[[Any, Mapping[str, Any]], torch.Tensor]
Made = tuple[torch.nn.Module, dict[str, torch.Tensor], Loss]
BUILDERS: dict[str, Callable[[], Made]] = {}
"""By ``package:model``, where the package is what is imported."""


def built_by(package: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    """Register a builder under its own name."""

    def register(function: Callable[[], Made]) -> Callable[[], Made]:
        BUILDERS[f"{package}:{function.__name__}"] = function
        return function

    return register


def register_all() -> None:
    """Import the modules with builders, which import no library before a model of it is built."""
    for name in ("diffusion", "language", "graphs", "adapters", "images"):
        import_module(f"benchmarks.real_networks.{name}")
    declare_torchvision_ops()


def declare_torchvision_ops() -> None:
    """Let torchvision be imported where its compiled ops cannot be loaded, as those built for CUDA beside a torch for
    CPUs: it gives two of them fake kernels, for which they have to be declared. No network here calls them. All else
    needs this too, since `transformers` imports torchvision where it is installed."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def to_target(first: Callable[[Any], torch.Tensor] = lambda output: output) -> Loss:
    """The mean square distance to the batch's target of what the model makes of the rest of the batch."""

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        given = {name: value for name, value in batch.items() if name != "target"}
        return F.mse_loss(first(model(**given)), batch["target"])

    return loss


def next_tokens(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The cross-entropy of each token's successor."""
    logits = model(batch["x"][:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch["x"][:, 1:])


def sample_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output.sample
    return found


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(SAMPLES, *shape)


def tokens(length: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (SAMPLES, length))


def times() -> torch.Tensor:
    return torch.randint(0, 900, (SAMPLES,))
