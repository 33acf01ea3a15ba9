"""Weights of a model on the meta device, cut as soon as they have data."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from shardwright.backends.torch.state.ownership import Ownership, Placement
from shardwright.backends.torch.state.weights import materialize
from tests.comparison import Comparison


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


class Outer(nn.Module):
    """A module with a tensor of its own around others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = Inner(), nn.Parameter(torch.ones(6))


def plain(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.normal_(parameter)


def from_outside(module: nn.Module) -> None:
    """Writes to a tensor further inside, by ``.data``, as Hugging Face's models do."""
    plain(module)
    if isinstance(module, Outer):
        module.inner.down.weight.data.normal_(0.0, 0.1)


@dataclass
class Alone:
    """A rank of a tensor axis whose peers do as it does."""

    keep: Callable[[str, torch.Tensor], torch.Tensor]
    peers_wrote: bool = False

    def anywhere(self, here: bool) -> bool:
        return here or self.peers_wrote


def reads_whole(module: nn.Module) -> None:
    """Writes to the last row of a tensor further inside, which a piece lacks."""
    plain(module)
    if isinstance(module, Outer):
        module.inner.up.weight[7].zero_()


def made(init: Callable[[nn.Module], None], cutter: Alone | None) -> Ownership:
    with torch.device("meta"):
        model = Outer()
    ownership = Ownership(model, 0)
    wanting = ownership.split(Placement(dict.fromkeys(ownership.parameter_names, (0,)), {}))
    materialize(ownership, wanting, init, torch.device("cpu"), 3, cutter)
    return ownership


@pytest.mark.parametrize("peers_wrote", [False, True])
@pytest.mark.parametrize("init", [plain, from_outside, reads_whole])
def test_pieces_are_those_of_the_whole_weights(init: Callable[[nn.Module], None], peers_wrote: bool) -> None:
    whole = made(init, None)
    cut = made(init, Alone(lambda name, tensor: tensor.chunk(2)[1].clone(), peers_wrote))
    names = sorted(whole.parameter_names)
    wanted = {name: whole.tensor(name).chunk(2)[1] for name in names}
    Comparison().equal({name: cut.tensor(name) for name in names}, wanted).require()


def test_no_two_modules_are_whole_at_a_time() -> None:
    held = []

    def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
        held.append(sum(p.numel() for p in holder[0].parameters() if not p.is_meta))
        return tensor.chunk(2)[0].clone()

    holder: list[nn.Module] = []
    with torch.device("meta"):
        holder.append(Outer())
    ownership = Ownership(holder[0], 0)
    wanting = ownership.split(Placement(dict.fromkeys(ownership.parameter_names, (0,)), {}))
    materialize(ownership, wanting, plain, torch.device("cpu"), 3, Alone(keep))
    sizes = {"up": 6 * 8 + 8, "down": 8 * 6 + 6, "scale": 6}
    assert max(held) <= sum(sizes.values()) / 2 + max(sizes.values()) / 2
