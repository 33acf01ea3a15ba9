"""Losses of every kind on two ranks, as two pipeline stages and as two replicas, over microbatches of unequal sizes:
the gradient of the unsplit model on the whole batch, or a refusal. Prints `ok NAME` for each check.

Usage: losses.py [--all] [CHECK...]
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launched import ALL, chosen, run_checks
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import LossError, ShardwrightError
from tests.comparison import Comparison

CONFIGS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipeline_parallel_degree": 2, "microbatches": 3, "wait_timeout_s": 60.0},
    "replicas": {"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0},
}
SAMPLES, CLASSES = 7, 5
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 1.5])


class Net(nn.Module):
    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        norms = [nn.BatchNorm1d(8) if batch_norm else nn.Identity() for _ in range(2)]
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4 if i == 0 else 8, 8), norms[i]) for i in range(2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        made: torch.Tensor = self.head(x)
        return made


class WithOwnLoss(Net):
    """As of Hugging Face: the loss lies inside of the model, and labels of -100 do not count."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        scores = super().forward(x)
        return scores if labels is None else F.cross_entropy(scores, labels)


def built(cls: type[Net] = Net, **more: Any) -> Net:
    torch.manual_seed(4)
    return cls(**more)


def given(ignored: tuple[int, ...] = (0, 1, 4)) -> dict[str, torch.Tensor]:
    """Samples, labels of which some do not count, unequally among microbatches and replicas, and a mask."""
    random = torch.Generator().manual_seed(2)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=random)
    y[list(ignored)] = -100
    mask = (torch.rand(SAMPLES, CLASSES, generator=random) < torch.linspace(0.1, 0.9, SAMPLES)[:, None]).float()
    mask[:, 0] = 1.0
    return {"x": torch.randn(SAMPLES, 4, generator=random), "y": y, "mask": mask}


def own_part(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank passes: with replicas four samples, or three."""
    return {k: t.chunk(sw.dp_size())[sw.rdp_rank()] for k, t in batch.items()}


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Of scores, labels and the mask."""


def in_batch(z: torch.Tensor) -> torch.Tensor:
    z = F.normalize(z, dim=-1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


TOLD: dict[str, Loss] = {
    "cross entropy, some ignored": lambda s, y, m: F.cross_entropy(s, y),
    "smoothed": lambda s, y, m: F.cross_entropy(s, y, label_smoothing=0.1),
    "class weights": lambda s, y, m: F.cross_entropy(s, y, weight=WEIGHTS),
    "class weights, smoothed": lambda s, y, m: F.cross_entropy(s, y, weight=WEIGHTS, label_smoothing=0.2),
    "summed cross entropy": lambda s, y, m: F.cross_entropy(s, y, reduction="sum"),
    "squares": lambda s, y, m: F.mse_loss(s, m),
    "binary with pos_weight": lambda s, y, m: F.binary_cross_entropy_with_logits(s, m, pos_weight=WEIGHTS),
    "masked mean": lambda s, y, m: (s.square() * m).sum() / m.sum(),
    "masked mean, eps": lambda s, y, m: (s.square() * m).sum() / (m.sum() + 1e-8),
    "masked mean, at least one": lambda s, y, m: (s.square() * m).sum() / m.sum().clamp(min=1),
    "mean of means": lambda s, y, m: ((s.square() * m).sum(1) / m.sum(1)).mean(),
    "sum": lambda s, y, m: s.square().sum(),
    "sum over the batch size": lambda s, y, m: s.square().sum() / s.shape[0],
    "sum over a number": lambda s, y, m: s.square().sum() / 32,
    "ratio of means": lambda s, y, m: (s.square() * m).mean() / m.mean(),
    "focal": lambda s, y, m: (lambda e: ((1 - (-e).exp()) ** 2 * e).mean())(
        F.cross_entropy(s, y.clamp(min=0), reduction="none")
    ),
    "mixture": lambda s, y, m: F.mse_loss(s, m) + 0.3 * s.abs().mean() + 0.1 * F.smooth_l1_loss(s, m),
    "one score of each sample": lambda s, y, m: s[torch.arange(len(s)), y.clamp(min=0)].mean(),
    "divergence": lambda s, y, m: F.kl_div(s.log_softmax(-1), m.softmax(-1), reduction="batchmean"),
}  # fmt: skip
OVER_STAGES = tuple(TOLD) if ALL else (
    "class weights, smoothed", "binary with pos_weight", "masked mean, eps", "mean of means", "sum", "mixture",
)  # fmt: skip
"""How a loss is told depends on no split: with replicas all of them, with stages one of each kind."""
ASKED: dict[str, tuple[str, Loss]] = {
    "in-batch negatives": ("every sample together with every other", lambda s, y, m: in_batch(s)),
    "perplexity": ("no linear function of a sum or a mean", lambda s, y, m: F.cross_entropy(s, y).exp()),
    "root of a mean": ("no linear function", lambda s, y, m: F.mse_loss(s, m).sqrt()),
    "median": ("in another way than by a sum or a mean", lambda s, y, m: s.square().mean(1).median()),
    "variance": ("in another way", lambda s, y, m: s.var(0).sum()),
    "overlap": ("depends on the parameters", lambda s, y, m: 1 - (s.sigmoid() * m).sum() / (s.sigmoid() + m).sum()),
    "mean and sum": ("in different ways", lambda s, y, m: s.square().mean() + s.abs().sum()),
}


def step_of(loss_of: Loss, **answer: Any) -> Callable[..., Any]:
    @sw.step
    def train_step(model: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        loss = loss_of(model(x), y, mask)
        model.backward(loss, **answer)
        return loss

    return train_step


def whole(plain: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[float, dict[str, torch.Tensor | None]]:
    """The unsplit model on the whole batch."""
    plain.zero_grad()
    found = loss()
    found.backward()
    return float(found.detach()), {n: None if p.grad is None else p.grad.clone() for n, p in plain.named_parameters()}


def held(model: sw.DistributedModel) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.local_named_parameters()}


def require(same: Comparison, *kinds: str) -> None:
    """What all ranks found together."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, same.report())
    Comparison.of_ranks(every).require(*kinds)


def in_every_config(check: Callable[[str], None]) -> None:
    for name, config in CONFIGS.items():
        sw.init(config)
        check(name)
        sw.shutdown()


def told_losses_are_those_of_the_whole_batch() -> None:
    def check(config: str) -> None:
        plain, model, batch = built(), sw.DistributedModel(built()), given()
        same = Comparison(f"losses, {config}")
        for name in TOLD if config == "replicas" else OVER_STAGES:
            loss_of = TOLD[name]
            model.zero_grad()
            same.where = name
            out = step_of(loss_of)(model, **own_part(batch))
            wanted, gradients = whole(plain, lambda of=loss_of: of(plain(batch["x"]), batch["y"], batch["mask"]))
            is_sum = "sum" in name and "batch" not in name
            same.losses(out.all_reduce_sum() if is_sum else out.all_reduce_mean(), wanted)
            same.gradients(held(model), gradients, part=True)
        require(same, "losses", "gradients")

    in_every_config(check)


def a_loss_inside_of_the_model_is_told_too() -> None:
    @sw.step
    def train_step(model: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        loss = model(x, labels=y)
        model.backward(loss)
        return loss

    def check(config: str) -> None:
        plain, model, batch = built(WithOwnLoss), sw.DistributedModel(built(WithOwnLoss)), given()
        same = Comparison(f"own loss, {config}")
        for ignored in ((0, 1, 4), (), (0, 1, 2)):  # of the last, one microbatch has nothing to count
            model.zero_grad()
            same.where = str(ignored)
            batch = given(ignored)
            out = train_step(model, **own_part(batch))
            wanted, gradients = whole(plain, lambda b=batch: plain(b["x"], labels=b["y"]))
            same.losses(out.all_reduce_mean(), wanted).gradients(held(model), gradients, part=True)
        with pytest.raises(ShardwrightError, match="nothing to take the mean of"):
            train_step(model, **own_part(given(tuple(range(SAMPLES)))))
        require(same, "losses", "gradients")

    in_every_config(check)


def what_cannot_be_told_is_asked_for() -> None:
    def check(config: str) -> None:
        model, batch = sw.DistributedModel(built()), given()
        for name, (said, loss_of) in ASKED.items():
            with pytest.raises(LossError) as caught:
                step_of(loss_of)(model, **own_part(batch))
            text = str(caught.value)
            assert said in text, (name, text)
            assert "reduction='mean'" in text, (name, text)
            assert all(p.grad is None for _, p in model.local_named_parameters()), name
        assert ("on 2 replicas" in text) == (config == "replicas"), text

    in_every_config(check)


def answers_are_taken() -> None:
    def check(config: str) -> None:
        plain, model, batch = built(), sw.DistributedModel(built()), given()
        same = Comparison(f"answers, {config}")
        parts = [part for half in split(batch, sw.dp_size()) for part in split(half, 3 if config == "pipeline" else 2)]
        sizes = [len(part["x"]) for part in parts]
        each = [lambda p=part: in_batch(plain(p["x"])) for part in parts]
        for answer, shares in (("mean", [n / SAMPLES for n in sizes]), ("sum", [1.0] * len(sizes))):
            same.where = answer
            model.zero_grad()
            out = step_of(lambda s, y, m: in_batch(s), reduction=answer)(model, **own_part(batch))
            wanted, gradients = whole(plain, lambda w=shares: sum(s * f() for s, f in zip(w, each, strict=True)))
            same.losses(out.all_reduce_mean() if answer == "mean" else out.all_reduce_sum(), wanted)
            same.gradients(held(model), gradients, part=True)
        require(same, "losses", "gradients")

    in_every_config(check)


def split(batch: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    """As steps cut: parts that differ by one sample, the larger first."""
    count = len(batch["x"])
    sizes = [count // parts + (m < count % parts) for m in range(parts)]
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*(t.split(sizes) for t in batch.values()), strict=True)]


def terms_with_other_counts_are_given_one_by_one() -> None:
    @sw.step
    def together(model: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        s = model(x)
        model.backward(F.cross_entropy(s, y) + F.mse_loss(s, mask))

    @sw.step
    def apart(model: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        s = model(x)
        model.backward(F.cross_entropy(s, y))
        model.backward(F.mse_loss(s, mask))

    def check(config: str) -> None:
        plain, model, batch = built(), sw.DistributedModel(built()), given()
        with pytest.raises(ShardwrightError, match=r"a mean and a weighted mean whose counts differ.*by itself"):
            together(model, **own_part(batch))
        same = Comparison(f"terms, {config}")
        for name, step, ignored in (("together", together, ()), ("apart", apart, (0, 1, 4))):
            same.where, batch = name, given(ignored)
            model.zero_grad()
            step(model, **own_part(batch))
            _, gradients = whole(
                plain,
                lambda b=batch: F.cross_entropy(plain(b["x"]), b["y"]) + F.mse_loss(plain(b["x"]), b["mask"]),
            )
            same.gradients(held(model), gradients, part=True)
        require(same, "gradients")

    in_every_config(check)


def batch_norm_is_asked_for() -> None:
    batch = {k: torch.cat([t, t[:1]]) for k, t in given().items()}  # two samples at least in every microbatch
    for name, config in CONFIGS.items():
        for scope in (None, "replica"):
            sw.init({**config, "loss_scope": scope})
            model = sw.DistributedModel(built(batch_norm=True))
            step = step_of(lambda s, y, m: F.cross_entropy(s, y))
            if scope is None:
                with pytest.raises(LossError, match=r"statistics over the samples.*'loss_scope': 'replica'"):
                    step(model, **own_part(batch))
            else:
                step(model, **own_part(batch))
                assert all(p.grad is not None for _, p in model.local_named_parameters()), name
            sw.shutdown()


def the_second_argument_is_grad_tensors() -> None:
    @sw.step
    def train_step(model: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        model.backward(model(x), mask)

    @sw.step
    def by_habit(model: Any, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> Any:
        model.backward(model(x).mean(), 3)

    def check(config: str) -> None:
        plain, model, batch = built(), sw.DistributedModel(built()), given()
        train_step(model, **own_part(batch))
        _, gradients = whole(plain, lambda: (plain(batch["x"]) * batch["mask"]).sum())
        require(Comparison(config).gradients(held(model), gradients, part=True), "gradients")
        with pytest.raises(ShardwrightError, match=r"second argument of model.backward is grad_tensors.*weight="):
            by_habit(model, **own_part(batch))

    in_every_config(check)


def means_are_of_this_replica_or_of_all() -> None:
    def check(config: str) -> None:
        model, batch = sw.DistributedModel(built()), given()
        plain = built()
        out = step_of(TOLD["masked mean"])(model, **own_part(batch))
        own = own_part(batch)
        same = Comparison(f"means, {config}")
        same.losses(out.reduce_mean(), float(TOLD["masked mean"](plain(own["x"]), own["y"], own["mask"])))
        same.losses(out.all_reduce_mean(), float(TOLD["masked mean"](plain(batch["x"]), batch["y"], batch["mask"])))
        same.losses(out.reduce_sum(), sum(float(one) for one in out.outputs))
        same.require("losses")

    in_every_config(check)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_checks(chosen((
        told_losses_are_those_of_the_whole_batch,
        a_loss_inside_of_the_model_is_told_too,
        what_cannot_be_told_is_asked_for,
        answers_are_taken,
        terms_with_other_counts_are_given_one_by_one,
        batch_norm_is_asked_for,
        the_second_argument_is_grad_tensors,
        means_are_of_this_replica_or_of_all,
    )))  # fmt: skip
