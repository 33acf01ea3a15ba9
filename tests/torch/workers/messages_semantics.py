"""Checks of message passing on three ranks, in one launch. Prints `ok NAME` for each; any failure ends the launch."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import dynamic
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from dynamic import CLASSES, WIDTH, Block, batch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwright.torch as sw
from shardwright.backends.torch.messages.failure import StepFailedError
from shardwright.backends.torch.messages.owners import Owners
from shardwright.backends.torch.randomness import stream_seed
from shardwright.backends.torch.unsplit import seeded_by_rule
from shardwright.core.errors import MissingCapabilityError, ShardwrightError, UnrecordableError

MICROBATCHES = 4
SAMPLES = 8
CONFIG = {
    "pipeline_parallel_degree": 3,
    "microbatches": MICROBATCHES,
    "pipeline": "interleaved",
    "wait_timeout_s": 60.0,
    "pipeline_mode": "messages",
}


@sw.step
def train_step(model, batch):
    loss = model(**batch)
    model.backward(loss)
    return loss


def expect(kind: type[Exception], match: str, run: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        run()
    assert match in str(caught.value), str(caught.value)


def start(
    build: Callable[[], nn.Module], owners: dict[str, int] | None = None, **keys: Any
) -> tuple[nn.Module, sw.DistributedModel]:
    """A plain model and the same over three ranks, each module where ``owners`` says, or where planning puts it."""
    sw.init({**CONFIG, **keys})
    torch.manual_seed(4)
    plain = build()
    torch.manual_seed(4)
    model = sw.DistributedModel(build())
    if owners is not None:
        model.runtime.run_by_messages(
            Owners.of(model.module, owners), microbatches=MICROBATCHES, active=None, schedule="interleaved"
        )
    return plain, model


def parts(step: int = 0, samples: int = SAMPLES) -> list[dict[str, torch.Tensor]]:
    whole = batch(step, samples)
    return [{key: tensor.chunk(MICROBATCHES)[m] for key, tensor in whole.items()} for m in range(MICROBATCHES)]


def same_gradients(plain: nn.Module, model: sw.DistributedModel) -> None:
    wanted = dict(plain.named_parameters())
    everything = torch.stack([p.grad.norm() for p in wanted.values() if p.grad is not None]).norm()
    for name, parameter in model.local_named_parameters():
        expected = wanted[name].grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            allowed = 1e-4 * expected.norm() + 1e-6 * everything
            assert float((parameter.grad - expected).norm()) <= float(allowed), name


def compare(plain: nn.Module, model: sw.DistributedModel, steps: int = 2) -> None:
    """Train both: the same losses, gradients, and buffers."""
    ours = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for step in range(steps):
        ours.zero_grad()
        theirs.zero_grad()
        losses = []
        for part in parts(step):
            loss = plain(**part)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
        found = train_step(model, batch(step, SAMPLES))
        torch.testing.assert_close(torch.stack(found.outputs), torch.stack(losses), rtol=1e-5, atol=1e-6)
        same_gradients(plain, model)
        ours.step()
        theirs.step()
    wanted = dict(plain.named_buffers())
    for name, buffer in model.local_named_buffers():
        torch.testing.assert_close(buffer, wanted[name], rtol=1e-5, atol=1e-6, msg=name)


# Dataflow ------------------------------------------------------------------------------------------------------------


def owners_call_each_other() -> None:
    """`outer` on 1 calls `outer.inner` on 2, which calls `shared` on 0 while that rank waits."""
    plain, model = start(dynamic.Nested, {"outer": 1, "outer.inner": 2, "shared": 0, "head": 2})
    compare(plain, model, steps=3)
    assert model.runtime.messages.calls.crossings > 0
    sw.shutdown()


class Tied(nn.Module):
    """A weight of one rank is used by another one's module, and by the root's own code; a buffer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.block = Block()
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embedding.weight
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.gate.register_buffer("scale", torch.tensor([1.5]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.block(self.embedding(y))
        if h.sum().item() > 1e9:
            return h.sum()
        h = F.linear(h, self.gate.weight.t() * self.gate.scale, self.gate.bias)
        assert self.gate.weight.device == h.device
        assert self.gate.weight.shape == (WIDTH, WIDTH)
        return F.cross_entropy(self.out(h) + F.linear(h, self.embedding.weight), y)


def a_weight_is_used_where_it_is_not_held() -> None:
    plain, model = start(Tied, {"embedding": 1, "block": 1, "out": 2, "gate": 2})
    compare(plain, model)
    assert model.module.gate.weight.is_meta == (sw.rank() != 2)
    sw.shutdown()


@dataclass
class Pair:
    left: torch.Tensor
    right: dict[str, Any]
    kept: list[torch.Tensor] = field(default_factory=list)


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, *, factor: int, store: Pair | None) -> Pair:
        made = self.block(x)
        assert store is None
        return Pair(made * factor, {"positive": made > 0, "rank": made.argsort(-1), "none": None, "n": 3})


class Second(nn.Module):
    """Writes to the object and to the tensors that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, pair: Pair, extra: tuple[Any, ...], flag: bool = False) -> tuple[torch.Tensor, None, Pair]:
        assert flag
        assert pair.right["none"] is None
        chosen = torch.where(pair.right["positive"], pair.left, extra[1])
        out = self.block(chosen.gather(-1, pair.right["rank"])) * pair.right["n"]
        pair.kept.append(out)
        pair.right["n"] = 5
        extra[2].mul_(2.0)
        return out, None, pair


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = First(), Second()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        pair = self.first(x, factor=2, store=None)
        scaled = pair.left * 0.25
        out, nothing, again = self.second(pair, ("text", pair.left * 0.5, scaled), flag=True)
        assert nothing is None
        assert again is pair, "an object that both sides know stays the same one"
        assert pair.right["n"] == 5
        before = out * 1.0
        after = self.relu(before)
        assert after is before, "an in-place module gives its input back"
        return (after + pair.kept[0] + scaled).pow(2).mean() + F.cross_entropy(out[:, :CLASSES], y)


def structures_and_writes_go_around() -> None:
    plain, model = start(Structured, {"first": 1, "second": 2, "relu": 1})
    compare(plain, model)
    sw.shutdown()


class Large(nn.Module):
    """Tensors and structures that are larger than a frame."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 20_000)

        def forward(self, x: torch.Tensor, names: list[str]) -> tuple[torch.Tensor, list[str]]:
            return self.linear(x), [name + "!" for name in names]

    def __init__(self) -> None:
        super().__init__()
        self.wide = self.Wide()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        names = [f"name {i}" for i in range(10_000)]
        out, said = self.wide(x, names)
        assert said[-1] == "name 9999!"
        return out.pow(2).mean()


def large_messages_arrive_whole() -> None:
    plain, model = start(Large, {"wide": 2})
    compare(plain, model)
    sw.shutdown()


class Checkpointed(nn.Module):
    """Activation checkpointing around calls that cross, with dropout in them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = checkpoint(lambda given: self.b(self.a(given)), x, use_reentrant=False)
        return F.cross_entropy(h[:, :CLASSES], y)


def checkpointing_calls_again() -> None:
    plain, model = start(Checkpointed, {"a": 1, "b": 2})
    compare(plain, model)
    sw.shutdown()


def batch_statistics_follow_the_order_of_microbatches() -> None:
    plain, model = start(dynamic.Normed, {"a": 1, "norm": 2, "b": 0})
    compare(plain, model, steps=3)
    assert "norm.running_mean" in dict(model.local_named_buffers()) or sw.rank() != 2
    sw.shutdown()


# Randomness, modes, results ------------------------------------------------------------------------------------------


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
            torch.testing.assert_close(torch.stack(found.outputs), torch.stack(losses), rtol=1e-5, atol=1e-6)
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
        torch.testing.assert_close(torch.stack(found.outputs), torch.stack(losses), rtol=1e-5, atol=1e-6)
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
        torch.testing.assert_close(float(found.reduce_mean()), sum(each), rtol=1e-5, atol=1e-6)
        same_gradients(plain, model)
    sw.shutdown()


@sw.step
def report_step(model, batch):
    loss = model(**batch)
    weight = float(batch["y"].sum() + 1)
    model.backward(loss, weight)
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
    torch.testing.assert_close(out["loss"].reduce_mean(), expected.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(torch.stack(out["value"].outputs).float(), each.detach(), rtol=1e-5, atol=1e-6)
    assert out["text"] == "kept"
    assert torch.equal(out["pairs"][0].concat(), batch(0, SAMPLES)["y"] > 1)
    assert out["pairs"][1] is None
    same_gradients(plain, model)
    before = {name: p.grad for name, p in model.local_named_parameters()}
    model.eval()
    with torch.no_grad():
        scores = score(model, batch(3, 12))
        wanted = torch.stack([plain.eval()(**part) for part in parts(3, 12)])
    torch.testing.assert_close(torch.stack(scores.outputs), wanted, rtol=1e-5, atol=1e-6)
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
    assert torch.equal(torch.stack(found.outputs), torch.stack(losses)), "the same casts"
    wanted = dict(plain.named_parameters())
    for name, parameter in model.local_named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=3e-2, atol=3e-3, msg=name)
    sw.shutdown()


# The choice of mode --------------------------------------------------------------------------------------------------


def the_mode_is_chosen_and_said() -> None:
    plain, model = start(dynamic.Depth, pipeline_mode="recorded")
    expect(UnrecordableError, "it can run by message passing", lambda: train_step(model, batch(0, SAMPLES)))
    sw.shutdown()
    plain, model = start(dynamic.Depth, pipeline_mode="auto")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare(plain, model)
    said = [str(w.message) for w in caught if "runs by message passing from now on" in str(w.message)]
    assert len(said) == (1 if sw.rank() == 0 else 0), said
    assert all("reads values of tensors" in text for text in said), "the reason"
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
    assert not sw.is_initialized()


class Block3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(x[:, :CLASSES], y)


# Failure -------------------------------------------------------------------------------------------------------------


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
        assert "messages_semantics.py" in text, "the traceback of the rank where it happened"
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
        model.backward(loss)
        return loss

    expect(ShardwrightError, "at most pp=2", lambda: tiny(small, torch.ones(4, 4)))
    sw.shutdown()


def main() -> None:
    dist.init_process_group("gloo")
    for check in (
        owners_call_each_other,
        a_weight_is_used_where_it_is_not_held,
        structures_and_writes_go_around,
        large_messages_arrive_whole,
        checkpointing_calls_again,
        batch_statistics_follow_the_order_of_microbatches,
        dropout_follows_the_rule,
        every_generator_follows_the_rule,
        a_last_batch_may_be_smaller,
        results_reach_every_rank,
        autocast_goes_along,
        the_mode_is_chosen_and_said,
        errors_are_told_on_every_rank,
        wrong_inputs,
    ):
        check()
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"ok {check.__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
