"""I and W together give what a whole backward gives, and so do gradients that are added at once, for every way in which
a weight is used."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwright.backends.torch.memory import weight_gradients
from shardwright.backends.torch.memory.weight_gradients import adding, collecting, deferrable
from shardwright.core.errors import CaptureError
from tests.comparison import Comparison
from tests.torch.workers.models import Doubled

WIDTH = 6


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def compare(build: Callable[[], nn.Module], given: torch.Tensor, autocast: bool = False) -> dict[str, bool]:
    """Run both ways, twice; for each parameter whether its gradient was there before W."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    split = build()
    early: dict[str, bool] = {}
    for step in (1, 2):
        wanted_input, got_input = (given.clone().requires_grad_(given.is_floating_point()) for _ in range(2))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            wanted = plain(wanted_input)
            with deferrable():
                got = split(got_input)
        Comparison().values(got, wanted, relative=1e-5, absolute=1e-5).require()
        wanted.float().pow(2).sum().backward()
        root = got.float().pow(2).sum()
        with collecting() as left:
            root.backward()
        if step == 1:
            early = {name: g is not None for name, g in gradients(split).items()}
        left.multiply()
        if given.is_floating_point():
            Comparison().values(got_input.grad, wanted_input.grad, relative=1e-5, absolute=1e-5).require()
    Comparison().gradients(gradients(split), gradients(plain)).require()
    return early


def samples(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def test_what_is_left_to_a_weight_gradient_holds_no_graph() -> None:
    """Else what came into a stage would stay, with its gradient, as long as its factors do."""
    layer, given = nn.Linear(WIDTH, WIDTH), samples(3, WIDTH).requires_grad_()
    with deferrable():
        made = layer(given * 2)
    with collecting() as left:
        made.sum().backward()
    expected = (2 * given.detach()).sum(0).expand(WIDTH, WIDTH)
    came_in = weakref.ref(given)
    del given, made
    gc.collect()
    assert came_in() is None
    left.multiply()
    Comparison().values(layer.weight.grad, expected, relative=1e-5, absolute=1e-5).require()


class Conv1D(nn.Module):
    """A linear layer with its weight the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, WIDTH), self.weight)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(WIDTH, 4), (2, 3, WIDTH)),
        (lambda: nn.Linear(WIDTH, 4, bias=False), (WIDTH,)),
        (Conv1D, (2, 3, WIDTH)),
        (lambda: nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9)),
        (lambda: nn.Conv2d(4, 6, (3, 2), stride=2, dilation=(1, 2), bias=False), (2, 4, 9, 8)),
        (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 5, 3)),
    ],
)
def test_weights_come_with_w(build: Callable[[], nn.Module], shape: tuple[int, ...], autocast: bool) -> None:
    early = compare(build, samples(*shape), autocast)
    assert not any(early.values()), early


@pytest.mark.parametrize("options", [{}, {"padding_idx": -2}, {"scale_grad_by_freq": True}])
def test_an_embedding_comes_with_w(options: dict[str, object]) -> None:
    ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(0))
    assert compare(lambda: nn.Embedding(9, WIDTH, **options), ids) == {"weight": False}


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.linear(x), inplace=True)
        return self.linear(x) @ self.linear.weight


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Forces(nn.Module):
    """Derives its output by its input, as models of physics do, and that is differentiated again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.requires_grad_() if x.is_leaf else x
            energy = self.second(torch.tanh(self.first(at))).sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return force * x


class Implicit(torch.autograd.Function):
    """Its backward takes the gradient of the input alone, by ``autograd.grad``: the weight has none from it."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad(ctx.layer(x), x, gradient)[0], None


class OwnFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Implicit.apply(Doubled.apply(self.frozen(x), self.scale), self.layer)


class Mapped(nn.Module):
    """A function transform inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(self.linear)(x)


@pytest.mark.parametrize(
    "build", [Reused, lambda: Checkpointed(True), lambda: Checkpointed(False), Forces, OwnFunctions, Mapped]
)
def test_gradients_are_those_of_a_whole_backward(build: Callable[[], nn.Module]) -> None:
    compare(build, samples(2, 3, WIDTH))


def test_hooks_on_a_parameter_fire() -> None:
    seen = []

    def build() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight.register_hook(lambda g: seen.append(1) or g * 2)
        layer.bias.register_post_accumulate_grad_hook(lambda p: seen.append(2))
        return layer

    assert compare(build, samples(2, WIDTH)) == {"weight": True, "bias": True}
    assert seen.count(1) == seen.count(2) == 4


def test_a_write_between_input_and_weight_gradient_is_refused() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), samples(2, WIDTH)
    with deferrable():
        out = layer(x)
    with collecting() as left:
        out.sum().backward()
    x.add_(1)
    with pytest.raises(CaptureError, match="written in place between"):
        left.multiply()


@pytest.fixture
def added_at_once(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether gradients were added at once, of each that could have been."""
    found: list[bool] = []
    own = weight_gradients.added
    monkeypatch.setattr(weight_gradients, "LARGE", 1)
    monkeypatch.setattr(weight_gradients, "added", lambda *given: found.append(own(*given)) or found[-1])
    return found


def compare_added(build: Callable[[], nn.Module], given: torch.Tensor, autocast: bool = False) -> None:
    """Run three microbatches, the last two of which add to the gradients of the first."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    own = build()
    for microbatch in range(3):
        wanted_input, got_input = ((given + microbatch).requires_grad_() for _ in range(2))
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            wanted = plain(wanted_input)
            with adding() if microbatch else nullcontext():
                got = own(got_input)
        Comparison().values(got, wanted, relative=1e-5, absolute=1e-5).require()
        wanted.float().pow(2).sum().backward()
        with adding() if microbatch else nullcontext():
            got.float().pow(2).sum().backward()
        Comparison().values(got_input.grad, wanted_input.grad, relative=1e-5, absolute=1e-5).require()
        Comparison().gradients(gradients(own), gradients(plain)).require()


@pytest.mark.parametrize(
    ("build", "times"),
    [
        (lambda: nn.Linear(WIDTH, 4), 2),
        (lambda: nn.Linear(WIDTH, 4, bias=False), 2),
        (Conv1D, 2),
        (Reused, 4),
        (lambda: Checkpointed(True), 4),
        (lambda: Checkpointed(False), 4),
        (Forces, 2),  # of the second product; the first is differentiated twice
        (OwnFunctions, 0),  # whose backward asks for some gradients
        (Mapped, 0),
    ],
)
def test_gradients_are_added_at_once_to_the_same(
    build: Callable[[], nn.Module], times: int, added_at_once: list[bool]
) -> None:
    compare_added(build, samples(2, 3, WIDTH))
    assert sum(added_at_once) == times


def test_gradients_of_another_dtype_are_autograds(added_at_once: list[bool]) -> None:
    compare_added(lambda: nn.Linear(WIDTH, 4), samples(2, 3, WIDTH), autocast=True)
    assert added_at_once == []


def test_small_and_hooked_weights_are_autograds(added_at_once: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    def hooked() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        layer.weight.register_hook(lambda g: g * 2)
        return layer

    compare_added(hooked, samples(2, WIDTH))
    monkeypatch.setattr(weight_gradients, "LARGE", WIDTH * WIDTH + 1)
    compare_added(lambda: nn.Linear(WIDTH, WIDTH), samples(2, WIDTH))
    assert added_at_once == []


@pytest.mark.parametrize("context", [deferrable, adding])
def test_the_functions_are_torchs_own_outside(context: Callable[[], AbstractContextManager[None]]) -> None:
    before = F.linear, F.conv2d, F.embedding, torch.addmm

    def fail() -> None:
        with context():
            assert F.linear is not before[0]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (F.linear, F.conv2d, F.embedding, torch.addmm) == before
