"""Position ids that count on: Hugging Face models need no mask then, captured, recorded and in plain runs alike."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.backends.torch import BACKEND
from shardwright.backends.torch.capture.known_values import KnownValues, known_values
from shardwright.backends.torch.compat import below_autograd
from tests.comparison import Comparison
from tests.torch.captured import LAYERS, LENGTH, MODELS, VOCABULARY, kinds, tokens
from tests.torch.stages_here import MICROBATCHES, WIDTH, make_runtime, run_step, samples, world_of_one  # noqa: F401
from tests.torch.test_dataflow import Block, compare, gradients, mean_square

masking_utils = pytest.importorskip("transformers.masking_utils")
if not hasattr(masking_utils, "find_packed_sequence_indices"):
    pytest.skip("these transformers do not look at position ids", allow_module_level=True)

UNITS = {
    "gpt2": (
        [["transformer.wte", "transformer.wpe", "transformer.h.0"], ["transformer.h.1", "transformer.ln_f", "lm_head"]],
        {"transformer.wte.weight": (0, 1)},
    ),
    "llama": (
        [["model.embed_tokens", "model.rotary_emb", "model.layers.0"], ["model.layers.1", "model.norm", "lm_head"]],
        {},
    ),
}  # fmt: skip
"""Of each model: the units of each of two stages, and the stages of weights that both use."""
COUNTING_ON = torch.arange(LENGTH).repeat(4, 1)
PACKED = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).repeat(4, 1)
"""Two sequences in each row."""


def build(name: str) -> nn.Module:
    model = MODELS[name]("sdpa").eval()
    model.config.use_cache = False  # with a cache, packed sequences are not looked for
    return model


@contextmanager
def attentions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, bool]]]:
    """Whether each attention has a mask, and whether it is causal by itself."""
    seen: list[tuple[bool, bool]] = []
    original = F.scaled_dot_product_attention

    def noted(*args: Any, attn_mask: Any = None, is_causal: bool = False, **others: Any) -> Any:
        seen.append((attn_mask is not None, is_causal))
        return original(*args, attn_mask=attn_mask, is_causal=is_causal, **others)

    with monkeypatch.context() as patched:
        patched.setattr(F, "scaled_dot_product_attention", noted)
        yield seen


@pytest.mark.parametrize("name", UNITS)
def test_a_model_is_captured_without_a_mask(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, sample = build(name), tokens(4)
    with attentions(monkeypatch) as plain:
        model(**sample)
    with attentions(monkeypatch) as captured:
        graph = BACKEND.capture(model, sample)
    assert set(plain) == set(captured) == {(False, True)}
    assert [len(op.inputs) for op in kinds(graph, "attention")] == [3] * LAYERS


@pytest.mark.parametrize("name", UNITS)
def test_positions_in_the_batch_are_not_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with attentions(monkeypatch) as captured:
        graph = BACKEND.capture(build(name), tokens(4) | {"position_ids": COUNTING_ON})
    assert set(captured) == {(True, False)}
    assert [len(op.inputs) for op in kinds(graph, "attention")] == [4] * LAYERS


@pytest.mark.parametrize("positions", [None, COUNTING_ON, PACKED], ids=["none given", "counting on", "packed"])
@pytest.mark.parametrize("name", UNITS)
def test_two_stages_train_as_the_unsplit_model(
    name: str, positions: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    given = [ids] if positions is None else [ids, positions]

    def loss_of(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
        ids, *positions = given
        loss: torch.Tensor = model(input_ids=ids, labels=ids, position_ids=positions[0] if positions else None).loss
        return loss

    with attentions(monkeypatch) as seen:
        compare(lambda: build(name), UNITS[name][0], loss_of, given, UNITS[name][1])
    plain, split = seen[: MICROBATCHES * LAYERS], seen[MICROBATCHES * LAYERS :]
    assert set(split) == {(positions is not None, positions is None)}
    assert set(plain) == {(positions is PACKED, positions is not PACKED)}


class Packing(nn.Module):
    """Scales each number by its sequence's place in the row; the positions count on by ``stride``."""

    def __init__(self, stride: Callable[["Packing"], Any], positions: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.b, self.positions = Block(), Block(), positions
        self.turn, self.stride = 0, stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        positions = torch.arange(WIDTH) * self.stride(self) if self.positions is None else self.positions(x)
        packed = masking_utils.find_packed_sequence_indices(positions[None])
        x = self.a(x)
        return self.b(x if packed is None else x * (1 + packed))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pace = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.arange(WIDTH) * self.pace


def train(make: Callable[[], Packing], paths: list[str], before: Callable[[Packing, int], None]) -> None:
    """Train three steps both ways."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    runtime = make_runtime(make(), [[(path, 0)] for path in paths], {})

    def body(given: list[torch.Tensor]) -> torch.Tensor:
        loss = mean_square(runtime.model, given)
        runtime.backward(loss)
        return loss

    x = samples(WIDTH)[:2]
    for step in range(3):
        losses = []
        for model in (plain, runtime.model):
            before(model, step)
        for _ in range(MICROBATCHES):
            losses.append(mean_square(plain, [x]))
            (losses[-1] / MICROBATCHES).backward()
        _, returned, *_ = run_step(runtime, body, [[x]] * MICROBATCHES)
        same = Comparison().values(returned[0].outputs, losses, relative=1e-5, absolute=1e-5, what="losses")
        same.gradients(gradients(runtime.model), gradients(plain), none_is_zero=True).require()


def nothing(model: Packing, step: int) -> None:
    """Leave the model as it is."""


def set_pace(model: Packing, step: int) -> None:
    model.positions.pace = step + 1


@pytest.mark.parametrize(
    "stride", [lambda model: model.turn, lambda model: 1 + model.turn // 2], ids=["itself", "half"]
)
def test_positions_that_change_from_step_to_step(stride: Callable[[Packing], int]) -> None:
    train(lambda: Packing(stride), ["a", "b"], nothing)


def test_positions_of_a_unit_that_changes() -> None:
    train(lambda: Packing(lambda _: 1, Positions()), ["positions", "a", "b"], set_pace)


# -- What is known ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[nullcontext, below_autograd], ids=["recorded", "captured"])
def known(request: pytest.FixtureRequest) -> Iterator[KnownValues]:
    with FakeTensorMode(allow_non_fake_inputs=True), request.param(), KnownValues() as values:
        yield values


FOLLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda p: 1 + p + 0,
    "row": lambda p: p.unsqueeze(0).expand(3, -1),
    "part": lambda p: p[None, 2:],
    "reshaped": lambda p: p.view(2, 3).reshape(-1),
    "moved": lambda p: p.to(torch.device("cpu")).int().contiguous(),
    "with itself": lambda p: p.repeat(2) * torch.arange(12),
    "taken": lambda p: p[torch.arange(3)],
}


@pytest.mark.parametrize("make", FOLLOWED.values(), ids=FOLLOWED)
def test_followed(make: Callable[[torch.Tensor], torch.Tensor], known: KnownValues) -> None:
    found, wanted = known.of(make(torch.arange(6))), None
    with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
        wanted = make(torch.arange(6))
        assert found is not None
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "whole": lambda p: p.add_(1),
    "part": lambda p: p[2:].zero_(),
    "entry": lambda p: p.__setitem__(0, 3),
    "out": lambda p: torch.add(p, 1, out=p),
    "another view": lambda p: p.t().add_(1),
    "data": lambda p: p.data.add_(1),
    "other data": lambda p: setattr(p, "data", torch.zeros(6, dtype=torch.long)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_tensor_that_is_written_to_is_not_known(write: Callable[[torch.Tensor], Any], known: KnownValues) -> None:
    positions = torch.arange(6)
    view = positions.view(2, 3)
    assert known.of(view) is not None
    write(positions)
    assert known.of(positions) is None
    assert known.of(view) is None
    assert known.of(positions + 1) is None


class Count(int):
    """A number that may be another one in the next step."""


def test_what_is_not_known(known: KnownValues) -> None:
    positions, batch = torch.arange(6), torch.empty(6, dtype=torch.long)
    assert known.of(batch) is None
    assert known.of(positions + batch) is None
    assert known.of(positions.to(batch.int())) is None
    assert known.of(torch.zeros(6, dtype=torch.long)) is None
    assert known.of(torch.arange(Count(6))) is None
    assert known.of(positions + Count(1)) is None
    assert known.of(torch.arange(6.0)) is None
    assert known.of(torch.arange(2**20 + 1)) is None
    assert known.of(torch.arange(2**10).repeat(2**10 + 1)) is None
    assert known.of(torch.arange(2**10).expand(2**12, -1)) is not None  # in the memory of one row


def test_what_a_unit_makes_is_not_known_outside() -> None:
    inside = True
    with FakeTensorMode(), KnownValues(lambda: inside) as known:
        made = torch.arange(6)
        inside = False
        assert known.of(made) is None
        assert known.of(made + 1) is None
        assert known.of(torch.arange(6)) is not None


def test_other_versions_of_transformers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(masking_utils, "find_packed_sequence_indices")
    with known_values():
        assert not hasattr(masking_utils, "find_packed_sequence_indices")
