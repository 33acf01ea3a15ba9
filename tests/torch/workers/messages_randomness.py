"""Checks of message passing: random numbers, modes and results."""

import random

import dynamic
import numpy as np
import torch
import torch.nn.functional as F
from dynamic import CLASSES, Block, batch
from messages_frame import (
    MICROBATCHES,
    SAMPLES,
    gradients,
    parts,
    require_of_ranks,
    same_gradients,
    same_losses,
    start,
    train_step,
)
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.program.randomness import stream_seed
from tests.comparison import Comparison
from tests.models.unsplit import seeded_by_rule


class SeededDropout(nn.Module):
    """Dropout by DESIGN's rule, for the plain model: an oracle that shares no code but the hash."""

    def __init__(self, path: str, p: float) -> None:
        super().__init__()
        self.path, self.p = path, p
        self.step = self.microbatch = self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(stream_seed(7, self.step, self.microbatch, (self.path, self.calls, 0)))
        self.calls += 1
        return F.dropout(x, self.p, True)


def dropout_follows_the_rule() -> None:
    for name in ("chosen", "loop"):
        plain, model = start(lambda name=name: dynamic.MODELS[name](0.3))
        sw.set_seed(7)
        seeded = {}
        for path, module in list(plain.named_modules()):
            if isinstance(module, nn.Dropout):
                around, _, last = path.rpartition(".")
                seeded[path] = SeededDropout(path, module.p)
                setattr(plain.get_submodule(around), last, seeded[path])
        for step in range(2):
            plain.zero_grad()
            model.zero_grad()
            losses = []
            for m, part in enumerate(parts(step)):
                for module in seeded.values():
                    module.step, module.microbatch, module.calls = step, m, 0
                loss = plain(**part)
                (loss / MICROBATCHES).backward()
                losses.append(loss.detach())
            state = torch.get_rng_state()
            found = train_step(model, batch(step, SAMPLES))
            assert torch.equal(state, torch.get_rng_state()), "the user's generator was left changed"
            same_losses(found, losses)
            same_gradients(plain, model)
        sw.shutdown()


class Dropping(nn.Module):
    """Layers are left out, and noise is added, as the generators of Python, NumPy and torch say."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy() for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if random.random() < 0.7:
                x = layer(x)
            if torch.rand([]).item() < 0.3:
                x = x * 0.5
        return F.cross_entropy(x[:, :CLASSES], y)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + float(np.random.rand()) * torch.rand_like(x)


def every_generator_follows_the_rule() -> None:
    plain, model = start(Dropping, {f"layers.{i}": i % 3 for i in range(4)})
    sw.set_seed(7)
    states = random.getstate(), np.random.get_state()[1].tolist()
    for step in range(3):
        plain.zero_grad()
        model.zero_grad()
        losses = []
        for m, part in enumerate(parts(step)):
            with seeded_by_rule(plain, seed=7, step=step, microbatch=m):
                loss = plain(**part)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        found = train_step(model, batch(step, SAMPLES))
        same_losses(found, losses)
        same_gradients(plain, model)
    assert states == (random.getstate(), np.random.get_state()[1].tolist()), "the user's generators were left changed"
    sw.shutdown()


def a_last_batch_may_be_smaller() -> None:
    plain, model = start(dynamic.Chosen)
    for samples in (8, 6, 3):
        plain.zero_grad()
        model.zero_grad()
        given = batch(samples, samples)
        sizes = [len(piece) for piece in given["y"].tensor_split(min(samples, MICROBATCHES))]
        each = []
        for rows in torch.arange(samples).split(sizes):
            loss = plain(given["x"][rows], given["y"][rows])
            (loss * len(rows) / samples).backward()
            each.append(float(loss) * len(rows) / samples)
        found = train_step(model, given)
        assert [len(found)] == [len(sizes)]
        Comparison().losses(found.all_reduce_mean(), sum(each)).require()
        same_gradients(plain, model)
    sw.shutdown()


@sw.step
def report_step(model, batch):
    loss = model(**batch)
    weight = float(batch["y"].sum() + 1)
    model.backward(loss, weight=weight)
    return {"loss": loss, "value": loss.item(), "text": "kept", "pairs": (batch["y"] > 1, None)}


@sw.step
def score(model, batch):
    return model(**batch)


def results_reach_every_rank() -> None:
    plain, model = start(dynamic.Depth)
    weights = torch.tensor([float(part["y"].sum() + 1) for part in parts()])
    each = torch.stack([plain(**part) for part in parts()])
    expected = (each * weights).sum() / weights.sum()
    expected.backward()
    out = report_step(model, batch(0, SAMPLES))
    Comparison().losses(out["loss"].all_reduce_mean(), expected).losses(out["value"].outputs, list(each)).require()
    assert out["text"] == "kept"
    assert torch.equal(out["pairs"][0].concat(), batch(0, SAMPLES)["y"] > 1)
    assert out["pairs"][1] is None
    same_gradients(plain, model)
    before = {name: p.grad for name, p in model.local_named_parameters()}
    model.eval()
    with torch.no_grad():
        scores = score(model, batch(3, 12))
        wanted = torch.stack([plain.eval()(**part) for part in parts(3, 12)])
    Comparison().losses(scores.outputs, list(wanted)).require()
    assert all(p.grad is before[name] for name, p in model.local_named_parameters()), "a step without a loss"
    sw.shutdown()


def autocast_goes_along() -> None:
    plain, model = start(dynamic.Depth)
    losses = []
    for part in parts():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = plain(**part)
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = train_step(model, batch(0, SAMPLES))
    same = Comparison("autocast").equal(found.outputs, losses, what="losses")  # the same casts
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    require_of_ranks(same.values(gradients(model), wanted, relative=3e-2, absolute=3e-3, part=True, what="gradients"))
    sw.shutdown()


CHECKS = (
    dropout_follows_the_rule,
    every_generator_follows_the_rule,
    a_last_batch_may_be_smaller,
    results_reach_every_rank,
    autocast_goes_along,
)
