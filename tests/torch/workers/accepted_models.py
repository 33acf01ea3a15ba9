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
        axes: along which it is split.
        whole: what every microbatch gets whole.
    """

    make: Callable[[], tuple[nn.Module, dict[str, Any]]]
    loss: Callable[[Any, dict[str, Any]], torch.Tensor]
    mode: str
    on_pieces: bool
    schedule: str = "1f1b"
    axes: tuple[str, ...] = ("pp", "tp")
    whole: Callable[[], dict[str, torch.Tensor]] = dict


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


# Steps that are written in other ways ---------------------------------------------------------------------------------


class Network(nn.Module):
    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual() for _ in range(4))
        self.head = nn.Linear(WIDTH, outputs)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found

    def forward(self, x: Any, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = x["x"] if isinstance(x, dict) else x
        return self.through(x if scale is None else x * scale)

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return F.mse_loss(self.through(batch["x"]), batch["y"])


class Residual(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


Loss = Callable[[Any, dict[str, Any]], torch.Tensor]


def step(
    model: Callable[[], nn.Module] = Network, mode: str = "recorded", on_pieces: bool = True, **more: Any
) -> Callable[[Loss], Loss]:
    """Register a loss of a model under the function's name."""

    def register(loss: Loss) -> Loss:
        def make() -> tuple[nn.Module, dict[str, Any]]:
            return model(), {"x": torch.randn(SAMPLES, TOKENS, WIDTH), "y": torch.randn(SAMPLES, TOKENS, 1)}

        CASES[loss.__name__] = Case(make, loss, mode, on_pieces, **more)
        return loss

    return register


@step()
def a_batch_in_one_argument(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model({"x": batch["x"]}), batch["y"])


@step(whole=lambda: {"scale": torch.rand(TOKENS, 1)})
def an_argument_that_is_not_split(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], batch["scale"]), batch["y"])


@step()
def a_constant_of_the_script(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], torch.linspace(0.5, 1.5, TOKENS)[:, None]), batch["y"])


@step()
def one_tensor_for_two_arguments(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"], batch["x"]), batch["y"])


@step(mode="messages")
def a_method_other_than_forward(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    found: torch.Tensor = model.training_step(batch)
    return found


@step(on_pieces=False)
def a_model_called_twice(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), model(batch["x"] * 2).detach()) + model(batch["x"]).square().mean()


@step(on_pieces=False)
def parameters_in_the_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"]) + 0.01 * sum(p.norm() for p in model.parameters())


@step(on_pieces=False, axes=("tp",))
def a_gradient_penalty(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    x = batch["x"].clone().requires_grad_()
    made = model(x)
    (gradient,) = torch.autograd.grad(made.sum(), x, create_graph=True)
    return F.mse_loss(made, batch["y"]) + (gradient.square().sum(-1).sqrt() - 1).square().mean()


TEACHER: list[Network] = []


@step()
def a_teacher_of_the_script(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    if not TEACHER:
        torch.manual_seed(3)
        TEACHER.append(Network())
    with torch.no_grad():
        wanted = TEACHER[0](batch["x"])
    return F.mse_loss(model(batch["x"]), wanted)


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = Network(WIDTH), Network()


@step(Adversaries, mode="messages")
def one_of_two_adversaries(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    made = model.generator(batch["x"]).detach()
    return F.softplus(-model.critic(batch["x"])).mean() + F.softplus(model.critic(made)).mean()


def spectral(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Network()
        for layer in model.layers:
            assert isinstance(layer, Residual)
            norm(layer.wide)
        return model

    return make


@step(spectral(nn.utils.parametrizations.spectral_norm))
def spectral_norms(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


@step(spectral(nn.utils.spectral_norm), axes=("pp",))
def spectral_norms_by_hooks(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


@step(spectral(nn.utils.spectral_norm), mode="messages", axes=("tp",))
def spectral_norms_by_hooks_on_a_tensor_axis(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Its hook keeps the weight that it makes as an attribute, which no recording on pieces follows."""
    return F.mse_loss(model(batch["x"]), batch["y"])


class Handed(nn.Module):
    """Tensors that blocks only hand on, one of them in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Handing() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = (x, x, x)
        for layer in self.layers:
            state = layer(state)
        found: torch.Tensor = self.head(state[0] + state[2])
        return found


class Handing(Block):
    def forward(
        self, state: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, first, second = state
        return x + self.mlp(x + first) * second, first, second


@step(Handed)
def one_tensor_handed_on_in_two_places(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class SharedTable(nn.Module):
    """A parameter written into a tensor that all stages read."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))
        self.layers = nn.ModuleList(Biased() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.zeros(TOKENS, WIDTH)
        bias[:4] = self.table
        for layer in self.layers:
            x = layer(x, bias)
        found: torch.Tensor = self.head(x)
        return found


class Biased(Block):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x + bias)


@step(SharedTable)
def a_parameter_written_into_a_tensor(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class FrozenConfig(dict[str, Any]):
    """As diffusers keeps its configuration."""

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise TypeError("the configuration is frozen")

    def __deepcopy__(self, memo: Any) -> "FrozenConfig":
        return self

    __setitem__ = __delitem__ = update = clear = pop = setdefault = _refuse  # type: ignore[assignment]


class Absent:
    """As MONAI stands in for a package that is not installed."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(f"there is no package for {name}")


ABSENT = Absent()


class Configured(Network):
    def __init__(self) -> None:
        super().__init__()
        self.settings = FrozenConfig({"width": WIDTH})

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.settings["width"] != WIDTH:
            ABSENT.kernel(*args)
        return super().forward(*args, **kwargs)


@step(Configured)
def a_frozen_configuration_and_an_absent_package(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class Named(Network):
    """Has attributes of the names under which a DistributedModel keeps its own."""

    def __init__(self) -> None:
        super().__init__()
        self.session, self.runtime = 0.5, torch.tensor(2.0)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(*args, **kwargs) * self.session + self.runtime


@step(Named)
def attributes_of_our_names(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.into(x), lengths, batch_first=True, enforce_sorted=False)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)
        found: torch.Tensor = self.back(padded)
        return found


@step(Packed, mode="messages")
def packed_sequences(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    lengths = batch["y"][:, 0, 0].mul(100).long().remainder(TOKENS - 1) + 1
    found: torch.Tensor = model(batch["x"], lengths).square().mean()
    return found
