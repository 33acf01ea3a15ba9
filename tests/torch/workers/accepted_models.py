"""Small models that do what whole libraries do: each is to train split as it trains whole."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, TOKENS, SAMPLES = 16, 8, 4


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its batch, and the loss of a microbatch.

    Attributes:
        mode: how it runs under a pipeline: "recorded", or "messages".
        on_pieces: whether it runs op by op on the tensor axis.
        schedule: of the pipeline.
    """

    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    loss: Callable[[Any, dict[str, Any]], torch.Tensor]
    mode: str
    on_pieces: bool
    schedule: str


CASES: dict[str, Case] = {}


class Block(nn.Module):
    """What the blocks below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.make()

    def make(self) -> None:
        """More parameters."""

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(F.gelu(self.wide(self.norm(x))))


def mean_square(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


def block(
    mode: str = "recorded", on_pieces: bool = True, schedule: str = "1f1b"
) -> Callable[[type[Block]], type[Block]]:
    """Register a model of three of these blocks under the class's name."""

    def register(cls: type[Block]) -> type[Block]:
        def make() -> tuple[nn.Module, dict[str, Any]]:
            layers = [nn.Linear(WIDTH, WIDTH), *(cls() for _ in range(3)), nn.Linear(WIDTH, 1)]
            return nn.Sequential(*layers), {"x": torch.randn(SAMPLES, TOKENS, WIDTH)}

        CASES[cls.__name__] = Case(make, mean_square, mode, on_pieces, schedule)
        return cls

    return register


# Complex tensors ---------------------------------------------------------------------------------------------------


@block(schedule="zb-h1")
class ComplexFilter(Block):
    """A filter of frequencies with complex parameters, as in Fourier neural operators and GFNet."""

    def make(self) -> None:
        self.filter = nn.Parameter(torch.randn(TOKENS // 2 + 1, WIDTH, dtype=torch.complex64) * 0.1 + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(self.mlp(x), dim=1) * self.filter
        return x + torch.fft.irfft(spectrum, n=TOKENS, dim=1)


@block()
class FrequencyMixing(Block):
    """FNet's mixing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.fft.fft2(self.mlp(x)).real + torch.fft.fft2(x).imag * 0.1


@block(schedule="zb-h1")
class ComplexProducts(Block):
    def make(self) -> None:
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.complex64)
        self.turn = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(torch.stack([self.mlp(x), x], -1))
        return torch.view_as_real(self.inner(z) @ self.turn).sum(-1)


@block()
class Conjugates(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(self.wide(x).unflatten(-1, (-1, 2)))
        z = z * z.conj().roll(1, -1)
        return x + self.narrow(torch.cat([z.real, z.conj().imag], -1) * 0.3)


# What a model asks of autograd --------------------------------------------------------------------------------------


@block(on_pieces=False)
class TensorHook(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        if wide.requires_grad:
            wide.register_hook(lambda gradient: gradient * 0.5)
        return x + self.narrow(wide)


@block()
class AsksForGradients(Block):
    """Another branch where no gradients flow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x)
        with torch.no_grad():
            aside = wide * 2
        wide = wide * 3 if wide.requires_grad and not aside.requires_grad else wide
        return x + self.narrow(wide)


@block(on_pieces=False)
class GradientOfItsOwn(Block):
    """A step down an energy, as in energy-based models and force fields."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = self.norm(x)
            y = y if y.requires_grad else y.requires_grad_()
            (gradient,) = torch.autograd.grad(self.mlp(y).square().sum(), y, create_graph=True)
        return x - 0.1 * gradient


@block()
class WritesByOut(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            doubled = torch.empty(x.shape)
            torch.mul(x, 2.0, out=doubled)
        return x + self.mlp(doubled) + self.mlp(x)
