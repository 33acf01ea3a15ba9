"""What goes wrong on the tensor axis, and what is said: each case on its own in one launch of two ranks.

Usage: tp_misuse.py OUT.json
"""

import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import models
import torch
import torch.distributed as dist
from launched import leave
from torch import nn
from torch.nn import functional as F
from tp_models import batch

import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison
from tests.models.unsplit import seeded_by_rule


def build(name: str, dropout: float = 0.0) -> nn.Module:
    """Of two blocks, which are as many as a case needs."""
    return models.build(name, dropout, layers=2)


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def begin(model: nn.Module, **keys: Any) -> sw.DistributedModel:
    sw.init({"tensor_parallel_degree": 2, "microbatches": 2, "wait_timeout_s": 30.0, **keys})
    return sw.DistributedModel(model)


def same(loss: float, expected: Any, gradients: dict[str, Any], reference: nn.Module) -> None:
    """The unsplit model's loss and gradients; AssertionError otherwise."""
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    Comparison().losses(loss, expected).gradients(gradients, wanted).require()


def hooked() -> str:
    plain = build("gpt2")
    plain.transformer.h[1].register_forward_hook(lambda *given: None)
    train_step(begin(plain), batch("gpt2", 0))
    return ""


def hooked_on_one_rank() -> str:
    """Where the other rank would wait in the cut of the parameters."""
    plain = build("gpt2")
    if dist.get_rank() == 1:
        plain.transformer.h[1].register_forward_hook(lambda *given: None)
    train_step(begin(plain), batch("gpt2", 0))
    return ""


def other_inputs() -> str:
    train_step(begin(build("gpt2")), batch("gpt2", dist.get_rank()))
    return ""


def other_seeds() -> str:
    """Every rank makes weights of its own: all start from the first's."""
    plain = build("gpt2")
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.add_(dist.get_rank())
    model = begin(plain)
    loss = float(train_step(model, batch("gpt2", 0)).reduce_mean())
    Comparison().losses(loss, build("gpt2")(**batch("gpt2", 0)).loss).require()
    return ""


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


class ScaledLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(super().forward(x))


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledLinear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, labels)


@sw.step
def train_plain(model, x, labels):
    loss = model(x, labels)
    model.backward(loss)
    return loss


def own_gradient() -> str:
    """Its units run whole, say why, and it is right."""
    torch.manual_seed(1)
    plain, reference = OwnGradient(), OwnGradient()
    reference.load_state_dict(plain.state_dict())
    x, labels = torch.randn(4, 8), torch.randn(4, 8)
    model = begin(plain)
    loss = float(train_plain(model, x, labels).reduce_mean())
    expected = sum(reference(a, b) / 2 for a, b in zip(x.chunk(2), labels.chunk(2), strict=True))
    expected.backward()
    same(loss, expected, {name: p.grad for name, p in plain.named_parameters()}, reference)
    return json.dumps(model.runtime.tensor.whole_units)


class Mixed(nn.Module):
    """One block with a gradient of its own between two without."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Feed(), OwnFeed(), Feed()])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, labels)


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 32), nn.Linear(32, 8), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.dropout(torch.relu(self.up(x))))


class OwnFeed(Feed):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(super().forward(x))


def mixed() -> str:
    """The blocks beside it are on pieces; masks and results are the unsplit model's."""
    torch.manual_seed(1)
    plain, reference = Mixed(), Mixed()
    reference.load_state_dict(plain.state_dict())
    x, labels = torch.randn(4, 3, 8), torch.randn(4, 3, 8)
    model = begin(plain, optimize="speed")
    loss = float(train_plain(model, x, labels).reduce_mean())
    total = 0.0
    for m, (a, b) in enumerate(zip(x.chunk(2), labels.chunk(2), strict=True)):
        with seeded_by_rule(reference, seed=0, step=0, microbatch=m):
            part = reference(a, b) / 2
        part.backward()
        total += part.item()
    shards = model.runtime.split_model.parts.tensor
    pieces = {name: shards.whole(name, p.grad) for name, p in sorted(plain.named_parameters())}
    same(loss, total, pieces, reference)
    return f"{sorted(shards.places)} {sorted(model.runtime.tensor.whole_units)}"


def other_dropout_seeds() -> str:
    model = begin(build("gpt2", 0.1))
    sw.set_seed(dist.get_rank())
    train_step(model, batch("gpt2", 0))
    return ""


class Odd(nn.Module):
    """Widths that two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x, labels)


def odd_widths() -> str:
    """It runs, and the plan says why nothing is split."""
    torch.manual_seed(1)
    model = begin(Odd())
    train_plain(model, torch.randn(4, 7), torch.randn(4, 7))
    return f"{model.runtime.split_model.parts.tensor.places} {model.session.plan.unsplit}"


def changed_module() -> str:
    model = begin(build("gpt2"))
    train_step(model, batch("gpt2", 0))
    model.module.transformer.h[0].mlp.act = nn.ReLU()
    model.module.transformer.h[0].attn.resid_dropout = nn.Identity()
    model.module.transformer.drop = nn.Sequential(nn.Identity(), nn.LayerNorm(32))
    train_step(model, {key: tensor[:, :8] for key, tensor in batch("gpt2", 0).items()})
    return ""


class Interleaved(nn.Module):
    """Gates and values in turn, written by somebody: returns a tuple, takes its argument by name."""

    def __init__(self, width: int, slope: float = 1.0) -> None:
        super().__init__()
        self.both, self.back, self.slope = nn.Linear(width, 4 * width), nn.Linear(2 * width, width), slope

    def forward(self, *, states: torch.Tensor) -> tuple[torch.Tensor, None]:
        both = self.both(states)
        return self.back(torch.sigmoid(self.slope * both[..., ::2]) * both[..., 1::2]), None


class InterleavedApart(nn.Module):
    """The same with gates and values in two dims."""

    def __init__(self, width: int, inner: int, slope: float) -> None:
        super().__init__()
        self.both, self.back, self.slope = nn.Linear(width, 2 * inner), nn.Linear(inner, width), slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.both(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.back(torch.sigmoid(self.slope * gate) * value)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Interleaved(8, slope=2.0) for _ in range(3))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(states=x)[0]
        return F.mse_loss(x, labels)


def registered() -> str:
    """Replaced at the tensor axis: the same names and numbers, and the registered form ran."""
    try:
        sw.tp_register_with_module(nn.Linear, 3)
        return "a number was registered"
    except ShardwrightError:
        pass
    sw.tp_register(
        InterleavedApart,
        init_hook=lambda width, slope=1.0: ((width, 2 * width, slope), {}),
        forward_hook=lambda *, states: ((states,), {}),
        return_hook=lambda made: (made, None),
    )(Interleaved)
    torch.manual_seed(1)
    plain = Stack()
    torch.manual_seed(1)
    reference = Stack()
    x, labels = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    model = begin(plain)
    loss = float(train_plain(model, x, labels).reduce_mean())
    expected = sum(reference(a, b) / 2 for a, b in zip(x.chunk(2), labels.chunk(2), strict=True))
    expected.backward()
    shards = model.runtime.split_model.parts.tensor
    pieces = {name: shards.whole(name, p.grad) for name, p in sorted(plain.named_parameters())}
    same(loss, expected, pieces, reference)
    if list(model.state_dict()) != list(reference.state_dict()) or not shards.places:
        return f"names {list(model.state_dict())}, pieces {shards.places}"
    return type(plain.layers[0]).__name__


def built_before() -> str:
    """Modules that were built before their class was registered say so."""

    class Early(nn.Linear):
        pass

    model = nn.Sequential(Early(8, 8))
    sw.tp_register_with_module(Early, nn.Linear)
    begin(model)
    return ""


def evaluation() -> str:
    """Another length, no gradients, in evaluation mode: on pieces, and the unsplit model's loss."""
    plain = build("gpt2", 0.1)
    model = begin(plain)
    train_step(model, batch("gpt2", 0))
    model.eval()
    short = {key: tensor[:, :8] for key, tensor in batch("gpt2", 0).items()}
    with torch.no_grad():
        found = float(evaluate(model, short).reduce_mean())
        expected = build("gpt2", 0.1).eval()(**short).loss
    Comparison().losses(found, expected).require()
    return ""


@sw.step
def evaluate(model, batch):
    return model(**batch).loss


CALLS = {"predict": 0}


@sw.step
def predict(model, batch):
    CALLS["predict"] += 1
    output = model(**batch)
    return output.loss, output.logits, output.logits.flatten(0, 1), (output.logits.argmax(-1) >= 0).sum()


def own_results() -> str:
    """Each rank gives samples of its own and gets their results, in its own order, and losses and counts of them; in a
    training step losses and counts are of all."""
    whole = batch("gpt2", 0)
    own = {key: tensor.chunk(2)[dist.get_rank()] for key, tensor in whole.items()}
    plain = build("gpt2", 0.1).eval()
    with torch.no_grad():
        expected, of_own, of_all = plain(**own).logits, plain(**own).loss, plain(**whole).loss
    model = begin(build("gpt2", 0.1), prescaled_batch=False)
    model.eval()
    with torch.no_grad():
        loss, logits, flat, count = predict(model, own)
    assert int(count.reduce_sum()) == own["input_ids"].numel()
    assert CALLS["predict"] == 2, "once for each of this rank's microbatches"
    Comparison().losses([loss.reduce_mean(), loss.all_reduce_mean()], [of_own, of_all]).require()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loss, *_, count = predict(model, own)
    assert any("counts these too" in str(one.message) for one in told)
    assert int(count.reduce_sum()) == whole["input_ids"].numel()
    found, wanted = [logits.concat(), flat.concat()], [expected, expected.flatten(0, 1)]
    Comparison().losses(loss.reduce_mean(), of_all).values(found, wanted, relative=1e-5, absolute=1e-5).require()
    return "" if len(logits.outputs) == 2 else f"{len(logits.outputs)} microbatches"


@sw.step
def in_all_places(model, batch):
    logits = model(**batch).logits
    return logits.transpose(0, 1), torch.cat([logits, -logits]), logits.mean(0), logits.square().mean()


@sw.step
def totals(model, batch):
    return (model(**batch).logits.square().sum(), (batch["labels"] > 3).sum().float())


@sw.step
def pairs(model, batch):
    flat = model(**batch).logits.flatten(1)
    return flat @ flat.T


def own_parts() -> str:
    """A result is cut where its samples are, and one that is of all samples is not, whatever its sizes are."""
    whole = batch("gpt2", 0)
    own = {key: tensor.chunk(2)[dist.get_rank()] for key, tensor in whole.items()}
    plain = build("gpt2")
    with torch.no_grad():
        mine = [plain(**{key: tensor.chunk(2)[m] for key, tensor in own.items()}).logits for m in range(2)]
        every = [plain(**{key: tensor.chunk(2)[m] for key, tensor in whole.items()}).logits for m in range(2)]
    model = begin(build("gpt2"), prescaled_batch=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        turned, twice, mean, square = in_all_places(model, own)
    assert not any("counts these too" in str(one.message) for one in told)
    assert mean.outputs[0].shape[0] % len(every[0]) == 0, "a size that could be one of samples"
    found = [*turned.outputs, *twice.outputs, *mean.outputs, *square.outputs]
    wanted = [*(one.transpose(0, 1) for one in mine), *(torch.cat([one, -one]) for one in mine)]
    wanted += [*(one.mean(0) for one in every), *(one.square().mean() for one in every)]
    Comparison("own parts").values(found, wanted, relative=1e-5, absolute=1e-5).require()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        total, count = totals(model, own)
    assert any("leaves [0, 1] of its result" in str(one.message) for one in told), [str(one.message) for one in told]
    Comparison("totals").losses(total.outputs, [one.square().sum() for one in every]).require()
    assert float(count.reduce_sum()) == float((whole["labels"] > 3).sum())
    pairs(model, own)
    return ""


@sw.step
def scaled(model, batch, scale):
    loss = model(**batch).loss / scale
    model.backward(loss)
    return loss


def other_scales() -> str:
    """A tensor that is not split, of which ranks with samples of their own have values of their own."""
    own = {key: tensor.chunk(2)[dist.get_rank()] for key, tensor in batch("gpt2", 0).items()}
    model = begin(build("gpt2"), prescaled_batch=False)
    scaled(model, own, torch.tensor(2.0))
    scaled(model, own, torch.tensor(2.0 + dist.get_rank()))
    return ""


def compiled() -> str:
    """Each unit on pieces is compiled; results are the unsplit model's."""
    plain = build("gpt2")
    model = begin(plain, compile="aot_eager")
    loss = float(train_step(model, batch("gpt2", 0)).reduce_mean())
    reference = build("gpt2")
    total = reference(**batch("gpt2", 0)).loss
    total.backward()
    shards = model.runtime.split_model.parts.tensor
    pieces = {name: shards.whole(name, p.grad) for name, p in sorted(plain.named_parameters())}
    same(loss, total, pieces, reference)
    units = [type(unit).__name__ for unit in model.runtime.compiler._compiled.values()]
    if not shards.places:
        return "nothing is in pieces"
    return f"{len(units)} {set(units)}"


def compiled_with_dropout() -> str:
    train_step(begin(build("gpt2", 0.1), compile="aot_eager"), batch("gpt2", 0))
    return ""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


@sw.step
def train_on_squares(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def by_messages_from_meta() -> str:
    """A planned model on the meta device is cut as it gets its weights, and put together again for messages."""
    torch.manual_seed(0)
    reference, x = nn.Sequential(Residual(), Residual()), torch.randn(8, 16)
    graph = sw.capture(reference, x, lambda y: y.square().mean())
    plan = sw.plan(graph, sw.Cluster("cpu", devices_per_node=2), batch=8, pp=1, tp=2, dp=1, microbatch=4)
    sw.init(plan=plan, pipeline_mode="messages")
    with torch.device("meta"):
        empty = nn.Sequential(Residual(), Residual())
    model = sw.DistributedModel(empty, weights=reference.state_dict())
    cut = sum(p.numel() for p in model.local_parameters())
    loss = float(train_on_squares(model, x).reduce_mean())
    expected = reference(x).square().mean()
    expected.backward()
    held = dict(model.local_named_parameters())
    same(loss, expected, {name: p.grad for name, p in held.items()}, reference)
    whole = sum(p.numel() for p in reference.parameters())
    return "" if cut < whole else f"{cut} of {whole}"


CASES: dict[str, Callable[[], str]] = {
    "hook": hooked, "hook on one rank": hooked_on_one_rank, "inputs": other_inputs, "seeds": other_seeds,
    "own gradient": own_gradient, "mixed": mixed, "dropout seeds": other_dropout_seeds,
    "odd widths": odd_widths, "changed module": changed_module,
    "evaluation": evaluation, "own results": own_results, "own parts": own_parts, "other scales": other_scales,
    "compiled": compiled,
    "compiled with dropout": compiled_with_dropout, "registered": registered, "built before": built_before,
    "by messages from meta": by_messages_from_meta,
}  # fmt: skip


def main() -> None:
    dist.init_process_group("gloo")
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = case()
        except Exception as error:  # every kind is shown: the caller says which are right
            found[name] = f"{type(error).__name__}: {error}"
        sw.shutdown()
    leave(found, sys.argv[1])


if __name__ == "__main__":
    main()
