"""Models that need values: recorded on real stand-ins, with guards on what the batch decides, or refused."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardwright.backends.torch import CAPABILITIES
from shardwright.backends.torch.capture.model import capture
from shardwright.backends.torch.machine.process import Launch, start
from shardwright.backends.torch.program import recording_cache as recordings
from shardwright.backends.torch.program.randomness import Moment
from shardwright.backends.torch.program.recording_check import Varying
from shardwright.backends.torch.program.value_guards import holds
from shardwright.backends.torch.program.value_names import text_of, value_names
from shardwright.backends.torch.runtime import Runtime
from shardwright.backends.torch.training.recording import Recording
from shardwright.core.errors import CaptureError, UnrecordableError
from tests.comparison import Comparison
from tests.models.unsplit import seeded_by_rule
from tests.torch.test_dataflow import (
    MICROBATCHES,
    WIDTH,
    Block,
    compare,
    gradients,
    make_runtime,
    mean_square,
    run_step,
    samples,
)

STAGES = [["a"], ["b"]]


@pytest.fixture(scope="module", autouse=True)
def world_of_one() -> Iterator[None]:
    start(Launch("none"), torch.device("cpu"), 30.0)
    yield
    dist.destroy_process_group()


class Routed(nn.Module):
    """Each sample goes to one of two experts; the loop runs over those that have any."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(Block() for _ in range(2))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.router(x).softmax(-1)
        chosen = scores.argmax(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero()[:, 0]
            made = self.dropout(self.experts[index](x[rows]) * scores[rows, index, None])
            out = out.index_add(0, rows, made)
        return out


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.a, self.b = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def test_values_inside_a_unit() -> None:
    compare(lambda: Two(Block(), Routed()), STAGES, mean_square, [samples(WIDTH)])


def test_dropout_inside_a_unit_that_runs_differently_each_time() -> None:
    torch.manual_seed(0)
    plain = Two(Routed(0.5), Routed(0.5))
    torch.manual_seed(0)
    runtime = make_runtime(Two(Routed(0.5), Routed(0.5)), [[("a", 0)], [("b", 0)]], {})
    inputs = samples(WIDTH).chunk(MICROBATCHES)
    for m, x in enumerate(inputs):
        with seeded_by_rule(plain, seed=0, step=0, microbatch=m):
            loss = plain(x).pow(2).mean()
        (loss / MICROBATCHES).backward()

    def body(given: list[torch.Tensor]) -> torch.Tensor:
        loss = mean_square(runtime.model, given)
        runtime.backward(loss)
        return loss

    run_step(runtime, body, [[x] for x in inputs])
    Comparison().gradients(gradients(runtime.model), gradients(plain), none_is_zero=True).require()


class ByTheBatch(Two):
    """Between its units: a branch on the batch, a selection by a mask of it, a loop of a length that it gives."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        if not mask.all():
            x = x * 2
        for _ in range(int(turns.max())):
            x = torch.sin(x)
        return self.b(x[mask])


def by_the_batch(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
    return model(*given).pow(2).mean()


def test_what_the_batch_decides_is_recorded_for_each_outcome() -> None:
    """The two microbatches differ in all of it."""
    x, mask, turns = samples(WIDTH), torch.tensor([True, True, True, False]), torch.tensor([1, 2, 3, 0])
    runtime = compare(lambda: ByTheBatch(Block(), Block()), STAGES, by_the_batch, [x, mask, turns])
    ((compiled,),) = runtime.steps.compiled._ready.values()
    first, second = (division.program for division in compiled.pipeline.divisions)
    assert first is not second
    assert len(first.guards) >= 3
    one, other = [x[:2], mask[:2], turns[:2]], [x[2:], mask[2:], turns[2:]]
    assert [holds(p, given, Moment()) for p in (first, second) for given in (one, other)] == [True, False, False, True]


def test_other_batches_are_recorded_anew() -> None:
    torch.manual_seed(0)
    model = ByTheBatch(Block(), Block())
    torch.manual_seed(0)
    plain = ByTheBatch(Block(), Block())
    runtime = make_runtime(model, [[("a", 0)], [("b", 0)]], {})
    x, mask = samples(WIDTH)[:2], torch.ones(2, dtype=torch.bool)
    for turns in (1, 2, 1):
        given = [x, mask, torch.full((2,), turns)]
        _, returned, *_ = run_step(runtime, lambda inputs: by_the_batch(runtime.model, inputs), [given] * MICROBATCHES)
        Comparison().losses(returned[0].outputs[0], by_the_batch(plain, given)).require()
    assert [len(variants) for variants in runtime.steps.compiled._ready.values()] == [2]


def unrecordable(model: nn.Module, match: str) -> None:
    runtime = make_runtime(model, [[("a", 0)], [("b", 0)]], {})
    with pytest.raises(UnrecordableError, match=match):
        run_step(runtime, lambda given: mean_square(runtime.model, given), [[samples(WIDTH)[:2]]] * MICROBATCHES)


def follow(build: Callable[[], nn.Module], paths: list[str], steps: int) -> Runtime:
    """Train several steps both ways, by the same random numbers: every loss and every gradient the same."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(0)
    runtime = make_runtime(build(), [[(path, 0)] for path in paths], {})

    def body(given: list[torch.Tensor]) -> torch.Tensor:
        loss = mean_square(runtime.model, given)
        runtime.backward(loss)
        return loss

    for step in range(steps):
        parts = [[part + step] for part in samples(WIDTH).chunk(MICROBATCHES)]
        losses = []
        for m, part in enumerate(parts):
            with seeded_by_rule(plain, seed=0, step=step, microbatch=m):
                losses.append(mean_square(plain, part))
            (losses[-1] / MICROBATCHES).backward()
        _, returned, *_ = run_step(runtime, body, parts)
        same = Comparison(f"step {step}").losses(returned[0].outputs, losses)
        same.gradients(gradients(runtime.model), gradients(plain), none_is_zero=True).require()
        plain.zero_grad()
        runtime.model.zero_grad()
    return runtime


class DropsLayers(nn.Module):
    """Half of the layers are left out, at random; the second draw of a stretch follows the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            drop = torch.rand([])
            if drop < 0.5:
                continue
            x = layer(x)
        return x * torch.rand([]) + sum(p.sum() for p in self.parameters())


def test_layers_that_are_dropped_at_random_are_recorded_by_pattern() -> None:
    runtime = follow(DropsLayers, [f"layers.{i}" for i in range(3)], 12)
    made = [division.program for held in runtime.steps.recordings.cache._made.values() for division in held]
    assert all(program.is_one_of_many for program in made)
    assert 4 <= len(made) <= 8, "one for each pattern that came up"
    assert len({sum(step.path is not None for step in program.steps) for program in made}) >= 3


def test_recordings_by_pattern_are_dropped_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "DRAWN", 3)
    monkeypatch.setattr("shardwright.backends.torch.training.compiled.COMPILED", 2)
    runtime = follow(DropsLayers, [f"layers.{i}" for i in range(3)], 8)
    assert [len(held) for held in runtime.steps.recordings.cache._made.values()] == [3]
    assert [len(held) for held in runtime.steps.compiled._ready.values()] == [2]


def test_capture_calls_layers_that_are_dropped_at_random() -> None:
    for keeps in (lambda drop: drop > 0.9, lambda drop: not drop < 0.9):

        class Keeps(Two):
            def forward(self, x: torch.Tensor, keeps: Any = keeps) -> torch.Tensor:
                x = self.a(x)
                return self.b(x) if keeps(torch.rand([])) else x

        graph = capture(Keeps(Block(), Block()), samples(WIDTH), require_loss=False, capabilities=CAPABILITIES)
        assert {"a", "b"} <= {call.path for call in graph.calls}


def drawn_mask(shape: tuple[int, ...], probability: float) -> np.ndarray:
    return np.random.rand(*shape) < probability


class Masks(Two):
    def __init__(self, turn: Callable[[Any], Any] = lambda mask: mask) -> None:
        super().__init__(Block(), nn.Sequential(nn.Dropout(0.3), Block()))
        self.turn, self.filling = turn, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).clone()
        mask, other = self.turn(drawn_mask((x.shape[0],), 0.5)), drawn_mask((x.shape[0], WIDTH), 0.2)
        x[torch.tensor(mask, dtype=torch.bool)] = self.filling
        return self.b(x.masked_fill(torch.from_numpy(other), 0.0))


def test_masks_that_numpy_draws_are_drawn_again_in_each_step() -> None:
    runtime = follow(Masks, ["a", "b"], 4)
    assert [len(held) for held in runtime.steps.recordings.cache._made.values()] == [1]


class Ragged(Two):
    """What is drawn decides a shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.from_numpy(drawn_rows(x.shape[0]))
        return self.b(self.a(x)[kept])


def drawn_rows(rows: int) -> np.ndarray:
    return np.arange(1 + np.random.randint(rows))


def test_shapes_that_numpy_draws_are_recorded_one_by_one() -> None:
    runtime = follow(lambda: Ragged(Block(), Block()), ["a", "b"], 4)
    assert [len(held) for held in runtime.steps.recordings.cache._made.values()] == [2]


@pytest.mark.parametrize("turn", [np.logical_not, lambda m: m[::-1], lambda m: np.zeros(m.shape) if m.any() else m])
def test_what_is_computed_by_numpy_from_what_it_drew_is_refused(turn: Callable[[Any], Any]) -> None:
    unrecordable(Masks(turn), "NumPy.*message passing")


class HostMask(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x * torch.from_numpy(np.random.rand(WIDTH).astype(np.float32)))


class Remembers(Block):
    """Keeps what it made, graph and all, for its next call."""

    state: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = super().forward(x if self.state is None else x + self.state)
        self.state = made.mean()
        return made


class SetsState(Two):
    def __init__(self, state: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(Remembers(), Remembers())
        self.state = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.a.state = None
        self.b.state = self.state(x)
        return self.b(self.a(x))


@pytest.mark.parametrize("state", [lambda x: torch.zeros(1), lambda x: x.mean(), lambda x: 0.5])
def test_attributes_of_units_that_are_set_between_units_are_set_again(state: Callable[[torch.Tensor], Any]) -> None:
    follow(lambda: SetsState(state), ["a", "b"], 2)


def test_what_cannot_be_recorded_is_said_to_be_so() -> None:
    unrecordable(HostMask(Block(), Block()), "NumPy's generator.*message passing")
    unrecordable(SetsState(lambda x: [x]), "sets b.state.*message passing")


def test_a_step_that_draws_on_the_host_is_refused_in_every_mode() -> None:
    runtime = make_runtime(Two(Block(), Block()), [[("a", 0)], [("b", 0)]], {})

    def body(given: list[torch.Tensor]) -> torch.Tensor:
        return runtime.model(given[0] * random.random()).mean()

    with pytest.raises(CaptureError, match="before the step") as caught:
        run_step(runtime, body, [[samples(WIDTH)[:2]]] * MICROBATCHES)
    assert not isinstance(caught.value, UnrecordableError)


class DropsTwice(Two):
    """Two draws with no module call in between, and the second feeds a later stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(F.dropout(x, 0.5)) * F.dropout(x, 0.5) + F.dropout(F.dropout(x, 0.3), 0.4)


def test_draws_between_units_follow_each_other() -> None:
    torch.manual_seed(0)
    plain = DropsTwice(Block(), Block())
    torch.manual_seed(0)
    runtime = make_runtime(DropsTwice(Block(), Block()), [[("a", 0)], [("b", 0)]], {})
    x = samples(WIDTH)[:2]
    with seeded_by_rule(plain, seed=0, step=0, microbatch=0):
        expected = mean_square(plain, [x]).detach()
    _, returned, *_ = run_step(runtime, lambda given: mean_square(runtime.model, given), [[x]] * MICROBATCHES)
    Comparison().losses(returned[0].outputs[0], expected).require()


def test_capture_of_a_module_that_runs_otherwise_at_each_batch() -> None:
    """At batch 2 one expert is hit, at batch 3 both: the module's ops are those of batch 2."""
    torch.manual_seed(0)
    model = Two(Routed(), Block())
    rows = samples(WIDTH)
    chosen = model.a.router(rows).argmax(-1)
    one, other = rows[chosen == 0], rows[chosen == 1]
    assert len(one)
    assert len(other)
    sample = torch.cat([one[:1], one[:1], other[:1]])
    graph = capture(model, (sample,), require_loss=False, capabilities=CAPABILITIES)
    (out,) = graph.outputs
    assert graph.tensors[out].shape(2) == (2, WIDTH)
    assert graph.tensors[out].shape(7) == (7, WIDTH)
    products = [op.call for op in graph.ops if op.kind == "contraction"]
    assert [graph.calls[call].path for call in products] == ["a.router", "a.experts.0.linear", "b.linear"]


def test_capture_refuses_what_values_decide_outside_of_every_module() -> None:
    class Loops(Two):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(int(x[:, 0].sum())):
                x = self.a(x)
            return self.b(x)

    with pytest.raises(UnrecordableError, match="reads values of tensors and runs by them"):
        capture(Loops(Block(), Block()), (torch.ones(3, WIDTH),), require_loss=False, capabilities=CAPABILITIES)


class Doubled(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 7


class Between(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Doubled.apply(self.a(x)))


class Around(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
        return model.a(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class AroundUnits(Two):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Around.apply(x, self))


def test_an_autograd_function_between_units_keeps_its_backward() -> None:
    compare(lambda: Between(Block(), Block()), STAGES, mean_square, [samples(WIDTH)])
    assert "apply" not in vars(torch.autograd.Function) or torch.autograd.Function.apply.__name__ == "apply"


def test_an_autograd_function_around_units_is_refused() -> None:
    unrecordable(AroundUnits(Block(), Block()), "inside the autograd function Around.*message passing")


class Sliced(Two):
    """A slice of what a unit made, by numbers of the batch."""

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(torch.stack([row[: size[0]].sum() * row for row, size in zip(x, sizes, strict=True)]))


def test_slices_of_activations_by_numbers_of_the_batch() -> None:
    sizes = torch.tensor([[1], [2], [3], [4]])
    compare(lambda: Sliced(Block(), Block()), STAGES, lambda m, g: m(*g).pow(2).mean(), [samples(WIDTH), sizes])


def test_several_rows_for_each_sample() -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, rows: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return self.linear(rows).view(len(text), -1, WIDTH).mean(1) + text

    sample = {"rows": torch.randn(8, WIDTH), "text": torch.randn(2, WIDTH)}
    graph = capture(Patches(), sample, require_loss=False, capabilities=CAPABILITIES)
    assert graph.sample_batch == 2
    assert [graph.tensors[i].shape(5) for i in graph.inputs] == [(20, WIDTH), (5, WIDTH)]


class InAnyOrder(Two):
    """As over a set of strings, whose order is another one in each process."""

    kinds: tuple[float, ...] = (2.0, 3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = {kind: self.a(x * kind) for kind in self.kinds}
        return self.b(made[2.0] - torch.sin(made[3.0]))


def test_ranks_that_record_in_another_order_agree() -> None:
    found = []
    for kinds in ((2.0, 3.0), (3.0, 2.0)):
        model = InAnyOrder(Block(), Block())
        model.kinds = kinds
        runtime = make_runtime(model, [[("a", 0), ("a", 1)], [("b", 0)]], {})
        assert runtime.stage_map is not None
        body = partial(mean_square, runtime.model)
        recording = Recording(runtime.split_model, runtime.stage_map, body, [samples(WIDTH)], Moment())
        division = recording.divided(Varying())
        names = value_names(division.program)
        (edge,) = division.edges
        found.append((text_of(division.program), [names[value] for value in edge.values]))
    assert found[0] == found[1]
