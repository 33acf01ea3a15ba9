"""What a model writes between its units to its own parameters and buffers: refused by name, or done."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.core.errors import CaptureError
from tests.comparison import Comparison
from tests.torch.stages_here import MICROBATCHES, WIDTH, make_runtime, run_step, samples, world_of_one  # noqa: F401


class Writing(nn.Module):
    """Writes between its units to what it holds."""

    def __init__(self, write: Callable[["Writing"], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("spread", torch.ones(WIDTH))
        self._write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        self._write(self)
        return self.b(x * self.scale) + self.seen


def _scaled(model: Writing) -> None:
    with torch.no_grad():
        model.scale.mul_(0.9)


def _moved(model: Writing) -> None:
    model.scale.data = model.scale.data * 0.9


WRITES: dict[str, tuple[Callable[[Writing], Any], str]] = {
    "data": (lambda model: model.scale.data.mul_(0.9), "parameter scale is changed in place"),
    "detached": (lambda model: model.scale.detach().mul_(0.9), "parameter scale is changed in place"),
    "a view of it": (lambda model: model.scale.data[2:].zero_(), "parameter scale is changed in place"),
    "of a unit": (lambda model: model.b.weight.data.mul_(0.9), "parameter b.weight is changed in place"),
    "of a unit that is over": (lambda model: model.a.bias.data.fill_(1), "parameter a.bias is changed in place"),
    "copied": (lambda model: model.b.weight.data.copy_(model.a.weight), "parameter b.weight is changed in place"),
    "no_grad": (_scaled, "parameter scale is changed in place"),
    "set": (_moved, r"data is assigned to a tensor of shape"),
    "a buffer": (lambda model: model.seen.add_(1), "writes to buffer 'seen'.*let the model run by message passing"),
    "a buffer's data": (lambda model: model.seen.data.add_(1), "writes to buffer 'seen'"),
    "a part of a buffer": (lambda model: model.seen[1:].add_(1), "writes to buffer 'seen'"),
}


@pytest.mark.parametrize("how", list(WRITES))
def test_writes_between_units_to_what_the_model_holds_are_refused(how: str) -> None:
    """They were lost, or done on a rank that does not hold it."""
    write, said = WRITES[how]
    runtime = make_runtime(Writing(write), [[("a", 0)], [("b", 0)]], {"scale": (1,)})

    def body(given: list[torch.Tensor]) -> Any:
        runtime.backward(runtime.model(given[0]).mean())

    with pytest.raises(CaptureError, match=said):
        run_step(runtime, body, [[samples(WIDTH)[:2]] for _ in range(MICROBATCHES)])


def test_statistics_and_values_are_written_between_units() -> None:
    def write(model: Writing) -> None:
        torch.zeros(3).data.add_(1)

    class Normed(Writing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.batch_norm(self.a(x), self.seen, self.spread, training=True)
            self._write(self)
            return self.b(x)

    runtime = make_runtime(Normed(write), [[("a", 0)], [("b", 0)]], {"scale": (1,)})

    def body(given: list[torch.Tensor]) -> Any:
        runtime.backward(runtime.model(given[0]).mean())

    given = [samples(WIDTH)[:2] for _ in range(MICROBATCHES)]
    run_step(runtime, body, [[t] for t in given])
    expected = torch.zeros(WIDTH)
    for tensor in given:
        nn.functional.batch_norm(runtime.model.a(tensor), expected, torch.ones(WIDTH), training=True)
    Comparison("running means").values(runtime.model.seen, expected, relative=1e-5, absolute=1e-8).require()
