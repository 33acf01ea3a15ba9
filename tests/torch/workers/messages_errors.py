"""Checks of message passing: how the mode is chosen, and what goes wrong on which rank."""

import warnings
from functools import partial

import dynamic
import pytest
import torch
import torch.nn.functional as F
from dynamic import CLASSES, Block, batch
from messages_frame import CONFIG, SAMPLES, compare, expect, start, train_step
from torch import nn

import shardwright.torch as sw
from shardwright.backends.torch.training.messages.remote_errors import StepFailedError
from shardwright.core.errors import MissingCapabilityError, ShardwrightError, UnrecordableError


def the_mode_is_chosen_and_said() -> None:
    plain, model = start(dynamic.Depth, pipeline_mode="recorded")
    expect(UnrecordableError, "it can run by message passing", lambda: train_step(model, batch(0, SAMPLES)))
    sw.shutdown()
    plain, model = start(dynamic.Depth, pipeline_mode="auto", pipeline="zb-h1", optimize="speed")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(plain, model)
    said = [str(w.message) for w in caught if "runs by message passing from now on" in str(w.message)]
    assert len(said) == (1 if sw.rank() == 0 else 0), said
    assert all("reads values of tensors" in text for text in said), "the reason"
    left_out = "What is not carried out by messages: the schedule zb-h1, optimize='speed'"
    assert all(left_out in text for text in said), "what was asked for in vain"
    assert model.runtime.messages is not None
    sw.shutdown()
    plain, model = start(Block3, pipeline_mode="auto")
    compare(plain, model)
    assert model.runtime.messages is None, "what can be recorded is"
    sw.shutdown()
    plain, model = start(Block3)
    compare(plain, model)
    assert model.runtime.messages is not None, "asked for by name"
    sw.shutdown()
    expect(ShardwrightError, "did you mean 'messages'", lambda: sw.init({**CONFIG, "pipeline_mode": "message"}))
    for asked, match in (
        (
            {"pipeline": "zb-h1"},
            "does not carry out pipeline='zb-h1': leave that out. Messages take the pipeline keys 1f1b",
        ),
        ({"pipeline": "interleaved-1f1b", "virtual_stages": 2}, "nor virtual_stages=2"),
        ({"cluster": "h100"}, "cluster='h100'"),
    ):
        expect(MissingCapabilityError, match, partial(sw.init, {**CONFIG, **asked}))
    assert not sw.is_initialized()


class Block3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x[:, :CLASSES], y)


class Fragile(nn.Module):
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.failing = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.failing == "forward":
                raise KeyError("no such thing")
            x = self.block(x)
            if self.failing == "backward":
                x.register_hook(self.fail)
            return x

        @staticmethod
        def fail(gradient: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("a gradient that nobody wants")

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(self.Part() for _ in range(3))
        self.catching = False

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            try:
                x = part(x)
            except KeyError:
                if not self.catching:
                    raise
        return F.cross_entropy(x[:, :CLASSES], y)


def errors_are_told_on_every_rank() -> None:
    plain, model = start(Fragile, {"parts.0": 0, "parts.1": 1, "parts.2": 2})
    train_step(model, batch(0, SAMPLES))
    for failing, kind in (("forward", "KeyError"), ("backward", "ArithmeticError")):
        model.zero_grad()
        if sw.rank() == 2:
            model.module.parts[2].failing = failing
        with pytest.raises(StepFailedError) as caught:
            train_step(model, batch(0, SAMPLES))
        text = str(caught.value)
        assert kind in text, text
        assert "rank 2 (pp 2)" in text, text
        assert "messages_errors.py" in text, "the traceback of the rank where it happened"
        place = "module 'parts.2'" if failing == "forward" else "the backward pass of module 'parts.2'"
        assert f"{place} failed on rank 2" in text, text
        model.module.parts[2].failing = ""
        compare(plain, model, steps=1)
    if sw.rank() == 2:
        model.module.parts[2].failing = "forward"
    model.module.catching = True
    train_step(model, batch(0, SAMPLES))
    sw.shutdown()


class Handed(torch.autograd.Function):
    """Takes modules, as reversible layers do, and would use them in its backward."""

    @staticmethod
    def forward(ctx, x, layers):
        return layers[0](x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def wrong_inputs() -> None:
    plain, model = start(Block3, {"layers.0": 0, "layers.1": 1, "layers.2": 2})

    @sw.step
    def own_backward(model, batch):
        loss = model(**batch)
        loss.backward()
        return loss

    @sw.step
    def detached(model, batch):
        loss = model(**batch)
        model.backward(loss.detach())

    @sw.step
    def vector(model, batch):
        model.backward(batch["x"])

    @sw.step
    def local_object(model, batch):
        class Here:
            pass

        model.module.layers[1](batch["x"], Here())

    @sw.step
    def two_shapes(model, batch):
        loss = model(**batch)
        return loss if batch["y"][0] > 1 else (loss, loss)

    @sw.step
    def hands_modules(model, batch):
        Handed.apply(batch["x"], model.module.layers)

    given = batch(0, SAMPLES)
    failed = (ShardwrightError, StepFailedError)
    for function, match in (
        (own_backward, "give the loss to model.backward"),
        (detached, "depends on no trainable parameter"),
        (vector, "a loss of one element"),
        (local_object, "the arguments of 'layers.1' cannot travel"),
        (two_shapes, "the same structure"),
        (hands_modules, "Handed, an autograd function, is handed the module 'layers.1', which lies on rank 1"),
    ):
        expect(failed, match, partial(function, model, given))
        compare(plain, model, steps=1)
        plain.zero_grad()
        model.zero_grad()
    sw.shutdown()
    _, model = start(Block3, recompute="full", loss_scope="global")
    expect(MissingCapabilityError, "nor loss_scope='global'", lambda: train_step(model, given))
    sw.shutdown()
    sw.init({**CONFIG, "wait_timeout_s": 20.0})
    small = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))

    @sw.step
    def tiny(model, x):
        loss = model(x).mean()
        model.backward(loss, reduction="mean")
        return loss

    expect(ShardwrightError, "at most pp=2", lambda: tiny(small, torch.ones(4, 4)))
    sw.shutdown()


CHECKS = (
    the_mode_is_chosen_and_said,
    errors_are_told_on_every_rank,
    wrong_inputs,
)
