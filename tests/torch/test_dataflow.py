"""Arbitrary dataflow between stages: several stages in this one process, against the plain model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch.runtime import Runtime
from shardwright.core.errors import CaptureError, PlanError, UnrecordableError
from tests.comparison import Comparison
from tests.torch.stages_here import MICROBATCHES, WIDTH, make_runtime, run_step, samples, world_of_one  # noqa: F401


def compare(
    build: Callable[[], nn.Module],
    calls: list[list[str]],
    loss_of: Callable[[nn.Module, list[torch.Tensor]], torch.Tensor],
    inputs: list[torch.Tensor],
    parameter_stages: dict[str, tuple[int, ...]] | None = None,
) -> Runtime:
    """Train one step both ways: the same losses, and the same gradient or None for each parameter."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    split = build()
    microbatches = [[t.chunk(MICROBATCHES)[m] for t in inputs] for m in range(MICROBATCHES)]
    losses = [loss_of(plain, [t.clone() for t in microbatch]) for microbatch in microbatches]
    for loss in losses:
        (loss / MICROBATCHES).backward()
    seen: dict[str, int] = {}
    refs = []
    for held in calls:
        refs.append([])
        for path in held:
            refs[-1].append((path, seen.get(path, 0)))
            seen[path] = seen.get(path, 0) + 1
    runtime = make_runtime(split, refs, parameter_stages or {})

    def body(given: list[torch.Tensor]) -> torch.Tensor:
        loss = loss_of(runtime.model, given)
        runtime.backward(loss)
        return loss

    _, returned, *_ = run_step(runtime, body, [[t.clone() for t in m] for m in microbatches])
    same = Comparison().values(returned[0].outputs, losses, relative=1e-5, absolute=1e-5, what="losses")
    same.gradients(gradients(split), gradients(plain), none_is_zero=True).require()
    return runtime


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Skip(nn.Module):
    """A value of the first stage goes straight to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.a(x)
        return self.c(self.b(first) * 2 + x) + first


def mean_square(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
    return model(given[0]).pow(2).mean()


def test_a_skip_connection_goes_straight_to_its_stage() -> None:
    runtime = compare(Skip, [["a"], ["b"], ["c"]], mean_square, [samples(WIDTH)])
    ((compiled,),) = runtime.steps.compiled._ready.values()
    assert {(e.source, e.target) for e in compiled.pipeline.divisions[0].edges} == {(0, 1), (0, 2), (1, 2)}


class Reused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(self.b(self.a(x)))


def test_a_module_called_on_two_stages_gets_both_gradients() -> None:
    compare(Reused, [["a"], ["b"], ["a"]], mean_square, [samples(WIDTH)])


@dataclass
class Pair:
    left: torch.Tensor
    right: dict[str, Any]


class Nested(nn.Module):
    """Units that take and return dataclasses, dicts, None, integers and booleans, by keyword."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor, *, factor: int) -> Pair:
            made = self.block(x)
            return Pair(made * factor, {"positive": made > 0, "rank": made.argsort(-1), "none": None, "n": 3})

    class Second(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, pair: Pair, extra: tuple[Any, ...], flag: bool = False) -> tuple[torch.Tensor, None]:
            assert flag
            assert pair.right["none"] is None
            chosen = torch.where(pair.right["positive"], pair.left, extra[1])
            return self.block(chosen.gather(-1, pair.right["rank"])) * pair.right["n"], None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self.First(), self.Second()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pair = self.first(x, factor=2)
        out, nothing = self.second(pair, ("text", pair.left * 0.5), flag=True)
        assert nothing is None
        return out


def test_nested_arguments_and_results() -> None:
    compare(Nested, [["first"], ["second"]], mean_square, [samples(WIDTH)])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.block = Block()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.embedding(ids))
        return F.linear(hidden, self.embedding.weight)


def test_a_weight_used_between_units_stays_tied() -> None:
    ids = torch.arange(12).reshape(4, 3) % 11

    def loss_of(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(given[0]).flatten(0, 1), given[0].flatten())

    compare(Tied, [["embedding"], ["block"]], loss_of, [ids], {"embedding.weight": (0,)})


class InPlace(nn.Module):
    """Writes in place: to the batch, to views, to what a unit returned, and inside a unit."""

    class Writer(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(x, inplace=True)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.writer, self.b = Block(), self.Writer(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x)
        row = mask[0]
        row[1:] = 1.0
        mask[1:].add_(row * 0.25)
        h = self.a(x) * 1.0
        before = h.sum()
        h.add_(mask)
        h[:, 0] = h[:, 0] * 2
        h = self.writer(h)
        return self.b(h * mask) + before + row


def test_writes_in_place_keep_their_order() -> None:
    compare(InPlace, [["a"], ["writer"], ["b"]], mean_square, [samples(WIDTH)])


class WritesToAnothersMemory(InPlace):
    """A stage writes to what the stage before it made, of which that one has a view that is read afterwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * 1.0
        view = h.view(-1)
        h = self.writer(h)
        return self.b(h) + view.view_as(h)


def test_a_write_in_place_to_what_another_stage_made_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"writes in place to memory that a tensor of stage 0 shares.*\.clone\(\)"):
        compare(WritesToAnothersMemory, [["a"], ["writer"], ["b"]], mean_square, [samples(WIDTH)])


def test_a_write_in_place_to_the_batch_does_not_reach_the_other_stages_twice() -> None:
    def loss_of(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
        given[0].mul_(3.0)
        return (model(given[0]) * given[0]).mean()

    compare(Skip, [["a"], ["b"], ["c"]], loss_of, [samples(WIDTH)])


class Cached(nn.Module):
    """Units that write to an object that they are given, as layers do to a key-value cache."""

    class Store:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor, store: "Cached.Store") -> torch.Tensor:
            x = self.block(x)
            store.kept.append(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        store = self.Store()
        for layer in self.layers:
            x = layer(x, store)
        return x + store.kept[0] * store.kept[2]


def test_an_object_that_units_write_to() -> None:
    compare(Cached, [["layers.0"], ["layers.1"], ["layers.2"]], mean_square, [samples(WIDTH)])


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = Block(), Block(), Block()
        self.a.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(1.5))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * self.scale
        with torch.no_grad():
            centre = self.b(h).mean()
        return (self.b(h) - centre) * self.gain + h.detach()


def test_frozen_and_unused_parameters_buffers_and_no_grad() -> None:
    runtime = compare(Frozen, [["a"], ["b"], ["b"]], mean_square, [samples(WIDTH)], {"gain": (2,)})
    assert runtime.model.unused.linear.weight.grad is None
    assert runtime.model.a.linear.weight.grad is None


def test_several_losses_and_a_loss_of_an_early_stage() -> None:
    torch.manual_seed(0)
    plain, split = Skip(), Skip()
    split.load_state_dict(plain.state_dict())
    x = samples(WIDTH)
    microbatches = [[piece] for piece in x.chunk(MICROBATCHES)]
    for (piece,) in microbatches:
        (plain(piece).mean() / MICROBATCHES).backward()
        (plain.a(piece).pow(2).mean() / MICROBATCHES).backward()
    runtime = make_runtime(split, [[("a", 0)], [("b", 0)], [("c", 0), ("a", 1)]], {})

    def body(given: list[torch.Tensor]) -> dict[str, Any]:
        main = runtime.model(given[0]).mean()
        early = runtime.model.a(given[0]).pow(2).mean()
        runtime.backward(main)
        runtime.backward(early)
        return {"main": main, "early": [early, "text"], "twice": main * 2}

    tree, returned, *_ = run_step(runtime, body, microbatches)
    assert len(returned) == 3
    assert len(tree.leaves) == 4
    Comparison().gradients(gradients(split), gradients(plain)).require()


def refused(loss_of: Callable[[nn.Module, list[torch.Tensor]], Any], kind: type[Exception], match: str) -> None:
    torch.manual_seed(0)
    runtime = make_runtime(Skip(), [[("a", 0)], [("b", 0)], [("c", 0)]], {})

    def body(given: list[torch.Tensor]) -> Any:
        loss = loss_of(runtime.model, given)
        runtime.backward(loss)

    with pytest.raises(kind, match=match):
        run_step(runtime, body, [[samples(WIDTH)[:2]] for _ in range(MICROBATCHES)])


def test_reading_a_value_is_refused_by_name() -> None:
    refused(lambda m, g: m(g[0]).mean() * m(g[0]).mean().item(), CaptureError, r"item\(\)")

    def branches(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
        out = model(given[0]).mean()
        return out if out > 0 else -out

    refused(branches, CaptureError, "reads the value of a tensor at .*test_dataflow.py")


class Branching(nn.Module):
    """Between its units it asks for a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x) if x.sum() > 0 else x


def test_a_model_that_needs_values_is_told_from_a_step_that_does() -> None:
    def outcome(loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> CaptureError:
        runtime = make_runtime(Branching(), [[("a", 0)], [("b", 0)]], {})
        with pytest.raises(CaptureError, match="reads the value of a tensor") as caught:
            run_step(runtime, lambda given: loss_of(runtime.model, given[0]), [[samples(WIDTH)]] * MICROBATCHES)
        return caught.value

    of_model = outcome(lambda model, x: model(x).mean())
    assert isinstance(of_model, UnrecordableError)
    assert "Branching cannot be recorded, because 'its forward'" in str(of_model)
    assert not isinstance(outcome(lambda model, x: model.a(x).mean() * x.mean().item()), UnrecordableError)


def test_a_backward_of_ones_own_is_refused() -> None:
    def own(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
        loss = model(given[0]).mean()
        loss.backward()
        return loss

    refused(own, CaptureError, r"call model.backward\(loss\)")


def test_a_loss_must_be_a_scalar_with_a_gradient() -> None:
    refused(lambda m, g: m(g[0]), CaptureError, "one element")
    refused(lambda m, g: m(g[0]).mean().detach(), CaptureError, "depends on no trainable parameter")
    refused(lambda m, g: 3.0, CaptureError, "takes the loss")


def test_a_parameter_of_no_model_is_refused() -> None:
    foreign = nn.Parameter(torch.ones(()))
    refused(lambda m, g: m(g[0]).mean() * foreign, CaptureError, "no parameter of the model")


class Holder(nn.Module):
    """Units inside a module that is itself divided."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Skip()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize("path", ["", "inner"])
@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_pre_hook"]
)
def test_a_hook_that_cannot_fire_is_refused(path: str, register: str) -> None:
    def watch(*_: Any) -> None: ...

    def run(where: str) -> None:
        model = Holder()
        getattr(model.get_submodule(where), register)(watch)
        runtime = make_runtime(model, [[("inner.a", 0)], [("inner.b", 0)], [("inner.c", 0)]], {})

        def body(given: list[torch.Tensor]) -> None:
            runtime.backward(runtime.model(given[0]).mean())

        run_step(runtime, body, [[samples(WIDTH)[:2]] for _ in range(MICROBATCHES)])

    run("inner.b")  # fires: one stage holds it whole
    with pytest.raises(CaptureError, match=r"cannot fire: .*'inner.a'"):
        run(path)


def test_a_module_replaced_after_planning_is_refused() -> None:
    runtime = make_runtime(Holder(), [[("inner.a", 0)], [("inner.b", 0)], [("inner.c", 0)]], {})

    def body(given: list[torch.Tensor]) -> None:
        runtime.backward(runtime.model(given[0]).mean())

    run_step(runtime, body, [[samples(WIDTH)[:2]] for _ in range(MICROBATCHES)])
    runtime.model.inner.b.linear = nn.Linear(WIDTH, WIDTH)
    with pytest.raises(PlanError, match=r"inner.b.linear was replaced by Linear"):
        run_step(runtime, body, [[samples(WIDTH)[:2]] for _ in range(MICROBATCHES)])


def test_stages_against_the_order_of_the_model_are_refused() -> None:
    torch.manual_seed(0)
    runtime = make_runtime(Skip(), [[("b", 0)], [("a", 0)], [("c", 0)]], {})

    def body(given: list[torch.Tensor]) -> Any:
        runtime.backward(runtime.model(given[0]).mean())

    with pytest.raises(PlanError, match="do not follow the order"):
        run_step(runtime, body, [[samples(WIDTH)[:2]] for _ in range(MICROBATCHES)])
