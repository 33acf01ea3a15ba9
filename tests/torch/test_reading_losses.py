"""What is read of the losses of step bodies, in one process: ops that the runs of `workers/losses.py` do not meet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch.loss.read import Batching, Losses, LossReading, StepReading, read_step
from shardwright.core.model.loss import Place, ResultOfBatch, shares_of_microbatches

CLASSES = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, CLASSES)
        self.norm = nn.BatchNorm1d(CLASSES)

    def forward(self, x: torch.Tensor, sorts: bool = False) -> torch.Tensor:
        made: torch.Tensor = self.layer(x)
        if sorts:
            order = made[:, 0].argsort()
            made = made[order][order.argsort()]
        return made


Body = Callable[[Net, torch.Tensor, torch.Tensor], torch.Tensor]


def inputs(samples: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples, and labels of which some do not count."""
    random = torch.Generator().manual_seed(samples)
    y = torch.randint(0, CLASSES, (samples,), generator=random)
    y[::3] = -100
    return torch.randn(samples, 4, generator=random), y


def read(body: Body, x: torch.Tensor, y: torch.Tensor, model: Net | None = None) -> LossReading:
    """The reading of the one loss that a body returns."""
    (reading,) = read_all(lambda given, losses: losses.backward(body(*given)), x, y, model).losses
    return reading


def read_all(step_of: Any, x: torch.Tensor, y: torch.Tensor, model: Net | None = None) -> StepReading:
    model = model or Net()
    found: list[Losses] = []

    @contextmanager
    def listening(losses: Losses) -> Iterator[None]:
        found.append(losses)
        yield

    def step(given: list[torch.Tensor]) -> Any:
        return step_of((model, *given), found[-1])

    return read_step(model, step, [x, y], Batching((0, 0), len(x), 3 * len(x)), torch.device("cpu"), listening)


def ctc(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logs = model(x).log_softmax(-1).unsqueeze(0).expand(6, -1, -1)
    lengths = torch.full((len(x),), 2, dtype=torch.long)
    targets = y.clamp(min=1)[:, None] % 4 + torch.tensor([[1, 0]])
    return F.ctc_loss(logs, targets.clamp(min=1), torch.full((len(x),), 6), lengths)


def written_in_place(model: Net, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    targets = y.clone()
    targets[targets == -100] = 0
    each = F.cross_entropy(model(x), targets, reduction="none") * (y != -100)
    return each.sum() / (y != -100).sum()


TOLD: dict[str, tuple[str, Body]] = {
    "ctc": ("mean", ctc),
    "written in place": ("weighted mean", written_in_place),
    "batch norm in evaluation": ("weighted mean", lambda m, x, y: F.cross_entropy(m.norm.eval()(m(x)), y)),
    "two views": ("mean", lambda m, x, y: (lambda a, b: (a - b).square().mean())(*m(torch.cat([x, -x])).chunk(2))),
    "heads inside of the batch": (
        "mean", lambda m, x, y: m(x).T.reshape(CLASSES * len(x)).view(CLASSES, len(x)).square().sum(0).mean(),
    ),
    "samples repeated in place": (
        "mean", lambda m, x, y: (m(x.repeat_interleave(3, 0)).view(len(x), 3, -1).mean(1) - m(x) / 2).square().mean(),
    ),
    "moved dims": (
        "mean", lambda m, x, y: m(x).view(len(x), 1, CLASSES).movedim((0, 1), (-1, 0)).moveaxis(2, 0).square().mean(),
    ),
    "copies of the batch": (
        "mean", lambda m, x, y: (m(x.repeat(2, 1)).view(2, len(x), -1).mean(0) - m(x) / 2).square().mean(),
    ),
    "number of samples as a tensor": ("mean", lambda m, x, y: m(x).square().sum() / torch.tensor(len(x))),
    "detached weights": (
        "weighted mean", lambda m, x, y: (m(x).square().mean(1) * x[:, 0].abs()).sum() / x[:, 0].abs().sum(),
    ),
    "triplets": ("mean", lambda m, x, y: F.triplet_margin_loss(m(x), m(x + 1), m(x - 1))),
    "noise": ("mean", lambda m, x, y: (m(x) + torch.randn_like(m(x))).square().mean()),
    "a penalty": ("weighted mean", lambda m, x, y: F.cross_entropy(m(x), y) + 1e-3 * m.layer.weight.square().sum()),
}  # fmt: skip
ASKED: dict[str, tuple[str, Body]] = {
    "samples repeated against copies of the batch": (
        "brings samples together in different orders",
        lambda m, x, y: (m(x).repeat_interleave(2, 0) * m(x).repeat(2, 1)).mean(),
    ),
    "samples repeated as often as there are": (
        "", lambda m, x, y: (m(x).repeat_interleave(len(x), 0) * m(x).repeat(len(x), 1)).mean(),
    ),
    "batch norm": ("takes statistics over the samples", lambda m, x, y: F.cross_entropy(m.norm(m(x)), y)),
    "weights with gradients": (
        "depends on the parameters", lambda m, x, y: m(x).square().sum() / m(x).abs().sum(),
    ),
    "picked by a mask": ("aten.index", lambda m, x, y: m(x)[y >= 0].mean()),
    "number of samples less one": ("a number that is", lambda m, x, y: m(x).square().sum() / (len(x) - 1)),
    "at least nine samples": ("a number that is", lambda m, x, y: m(x).square().sum() / max(len(x), 9)),
    "kept from a number of samples": ("a number that", lambda m, x, y: m(x).clamp(min=8 / len(x)).mean()),
    "a product times a number": (
        "another at batch", lambda m, x, y: torch.addmm(m(x), m(x), torch.eye(CLASSES), alpha=1 / len(x)).mean(),
    ),
    "labels ignored by a number": (
        "another at batch", lambda m, x, y: F.cross_entropy(m(x), y.clamp(min=0), ignore_index=len(x) // 7),
    ),
    "many numbers": (
        "a tensor that the step makes", lambda m, x, y: m(x).sum() * torch.tensor([1 / len(x)] * 5000).mean(),
    ),
    "first nine": ("at one batch size alone", lambda m, x, y: m(x)[:9].mean()),
    "another loss of many samples": ("", lambda m, x, y: m(x).mean() if len(x) > 9 else m(x).sum()),
    "first half": ("out of the batch", lambda m, x, y: m(x)[:3].mean()),
    "ranks": ("is not known to work on samples one by one", lambda m, x, y: m(x).mean(1).sort().values.mean()),
    "random count": (
        "random numbers",
        lambda m, x, y: (lambda k: (m(x) * k).sum() / k.sum())((torch.rand_like(x[:, :1]) > 0.5).float()),
    ),
    "a loop over samples": ("at one batch size alone", lambda m, x, y: sum(m(one[None]).sum() for one in x) / len(x)),
}  # fmt: skip


ALONE: dict[str, Body] = {
    "over at least two": lambda m, x, y: m(x).square().sum() / max(len(x), 2),
    "twice alone": lambda m, x, y: m(x).square().mean() * (2.0 if len(x) == 1 else 1.0),
    "another op alone": lambda m, x, y: m(x).tanh().mean() if len(x) == 1 else m(x).mean(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_done_with_one_sample_alone_is_looked_at(name: str) -> None:
    verdict = read(ALONE[name], *inputs(1)).verdict
    assert verdict.finding is not None, verdict
    assert "with one sample" in verdict.finding.reason


@pytest.mark.parametrize("name", TOLD)
def test_a_loss_is_told(name: str) -> None:
    """And the losses of microbatches of two sizes make that of the batch."""
    reduction, body = TOLD[name]
    torch.manual_seed(1)
    model, (x, y) = Net(), inputs()
    reading = read(body, x[:2], y[:2], model)
    assert reading.verdict.finding is None, reading.verdict.finding
    assert reading.verdict.reduction == reduction
    if name == "noise":
        return
    parts = [(x[:1], y[:1]), (x[1:2], y[1:2]), (x[2:5], y[2:5]), (x[5:], y[5:])]
    readings = [read(body, *part, model) for part in parts]
    counts = [r.counted(part) for r, part in zip(readings, parts, strict=True)]
    shares = shares_of_microbatches(
        reading.verdict.combinations, reading.verdict.constant, [1, 1, 3, 2],
        {n: [row[n] for row in counts] for n in range(len(counts[0]))},
    )  # fmt: skip
    losses = [float(body(model, *part).detach()) for part in parts]
    found = sum(share * loss for share, loss in zip(shares, losses, strict=True) if share)  # nothing counted: NaN
    wanted = float(body(model, x, y).detach())
    assert abs(found - wanted) <= 1e-5 * abs(wanted)


@pytest.mark.parametrize("name", ASKED)
def test_a_loss_that_cannot_be_told_is_not(name: str) -> None:
    said, body = ASKED[name]
    verdict = read(body, *inputs()).verdict
    assert verdict.finding is not None, verdict
    assert said in verdict.finding.reason


RESULTS: dict[str, tuple[Place | None, Callable[[Net, torch.Tensor, torch.Tensor], Any]]] = {
    "of each sample": (Place(0, 1, 1), lambda m, x, y: m(x)),
    "along another dim": (Place(1, 1, 1), lambda m, x, y: m(x).T),
    "two copies": (Place(0, 2, 1), lambda m, x, y: m(x).repeat(2, 1)),
    "several of each": (Place(0, 1, CLASSES), lambda m, x, y: m(x).reshape(-1)),
    "statistics": (Place(0, 1, 1), lambda m, x, y: m.norm.train()(m(x))),
    "two copies of statistics": (Place(0, 2, 1), lambda m, x, y: m.norm.train()(m(x)).repeat(2, 1)),
    "less a statistic": (Place(0, 1, 1), lambda m, x, y: m(x) - m(x).max()),
    "turned in each sample": (Place(0, 1, 1), lambda m, x, y: m(x).flip(1).sort(1).values),
    "of ops of the model that are not known": (Place(0, 1, 1), lambda m, x, y: 2 * m(x, sorts=True)),
    "of another number of ops": (Place(0, 1, 1), lambda m, x, y: torch.cat([m(one[None]) for one in x])),
    "a mean": (None, lambda m, x, y: m(x).square().mean(0)),
    "a mean over what counts": (None, lambda m, x, y: F.cross_entropy(m(x), y)),
    "a mean as a number": (None, lambda m, x, y: m(x).square().mean().item()),
    "a constant": (None, lambda m, x, y: m.layer.weight.square().sum()),
    "a number": (None, lambda m, x, y: 5),
    "a text": (None, lambda m, x, y: "a label"),
}
TOTALS: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "a total": lambda m, x, y: m(x).square().sum(),
    "a total of products": lambda m, x, y: m(x).T @ m(x),
    "a count": lambda m, x, y: (y >= 0).sum(),
    "a count as a real number": lambda m, x, y: (m(x).argmax(-1) == y).float().sum(),
    "a total as a number": lambda m, x, y: m(x).square().sum().item(),
    "made of a number": lambda m, x, y: 2 * m(x).square().sum().item(),
    "the largest": lambda m, x, y: m(x).max(),
}
PAIRS: dict[str, Callable[[Net, torch.Tensor, torch.Tensor], Any]] = {
    "pairs": lambda m, x, y: m(x) @ m(x).T,
    "what was picked": lambda m, x, y: m(x)[1:],
    "turned around": lambda m, x, y: m(x).flip(0),
    "moved on": lambda m, x, y: m(x).roll(1, 0),
    "sorted": lambda m, x, y: m(x).sort(0).values,
    "places of what is sorted": lambda m, x, y: m(x)[:, 0].argsort(),
    "in the order of labels": lambda m, x, y: m(x).index_select(0, y.argsort()),
    "shuffled": lambda m, x, y: m(x)[torch.randperm(len(x))],
    "the second half first": lambda m, x, y: torch.cat([m(x)[len(x) // 2 :], m(x)[: len(x) // 2]]),
    "running totals": lambda m, x, y: m(x).cumsum(0),
    "entries of several samples in a row": lambda m, x, y: m(x).T.reshape(len(x), -1),
    "numbers of samples": lambda m, x, y: torch.arange(len(x)),
    "another dim": lambda m, x, y: torch.linalg.pinv(m(x)),
}


def result_of(body: Callable[[Net, torch.Tensor, torch.Tensor], Any]) -> ResultOfBatch:
    results = read_all(lambda given, _: body(*given), *inputs()).results
    assert results is not None
    (result,) = results
    return result


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_result_is_to_the_samples_is_told(name: str) -> None:
    place, body = RESULTS[name]
    result = result_of(body)
    assert (result.place, result.grows, result.adds_up) == (place, place is not None, False)


@pytest.mark.parametrize("name", TOTALS)
def test_what_is_no_mean_is_told(name: str) -> None:
    result = result_of(TOTALS[name])
    assert (result.place, result.grows, result.adds_up) == (None, False, True)


@pytest.mark.parametrize("name", PAIRS)
def test_whose_a_result_is_that_cannot_be_told_is_not(name: str) -> None:
    result = result_of(PAIRS[name])
    assert (result.place, result.grows) == (None, True)
    assert result.verdict.finding is not None
