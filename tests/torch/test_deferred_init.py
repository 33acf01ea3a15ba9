"""Models built without memory for their parameters get the bits of a plain initialisation, on every rank its own."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parameter import is_lazy

import shardwright.torch as sw
from shardwright.backends.torch.state import deferred_init
from shardwright.backends.torch.state.deferred_init import recipe_of
from tests.torch.launch import on_ranks


class Odd(nn.Module):
    """Everything that an initialisation may do."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(5, 6) * 0.1)
        self.orthogonal = nn.Parameter(torch.empty(7, 7))
        nn.init.orthogonal_(self.orthogonal)
        through = nn.Parameter(torch.empty(4, 4))
        self.through_the_object = through
        nn.init.xavier_uniform_(through)
        self.assigned = nn.Parameter(torch.zeros(3))
        self.assigned.data = torch.randn(3)
        self.assigned.data.mul_(2)
        self.copied = nn.Parameter(self.drawn.detach().clone())
        nn.init.sparse_(self.orthogonal, 0.3)
        self.register_buffer("of_parameters", self.drawn.detach().sum() * torch.arange(3.0))
        self.number = float(self.orthogonal.detach().norm())
        with torch.no_grad():
            self.drawn[2].zero_()
            self.drawn.add_(self.number)
            self.drawn.copy_(self.drawn / self.drawn.norm())
        self.of_numpy = nn.Parameter(torch.from_numpy(np.arange(4.0)).float())
        self.listed = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.listed.data.add_(1)
        whole = torch.empty(4, 3)
        self.truncated = nn.Parameter(whole)
        nn.init.trunc_normal_(whole, std=0.02)
        self.rows = nn.Parameter(whole[1:3])
        own = torch.Generator().manual_seed(5)
        self.by_a_generator = nn.Parameter(torch.empty(3))
        self.by_a_generator.data.normal_(generator=own)
        self.by_it_again = nn.Parameter(torch.randn(3, generator=own))
        self.tied = self.drawn
        base = torch.randn(4)
        self.written_later = nn.Parameter(base)
        base.mul_(3.0)
        with torch.no_grad():
            self.read_by_numpy = nn.Parameter(torch.tensor(self.truncated.numpy()[:2].copy()))
            self.read_by_numpy.mul_(3)
            self.scaled_together = nn.ParameterList(nn.Parameter(torch.randn(2)) for _ in range(3))
            torch._foreach_mul_(list(self.scaled_together), [1.0, 2.0, 3.0])


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))


def cloned() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.Linear(4, 2))


def in_double() -> nn.Module:
    torch.set_default_dtype(torch.float64)
    try:
        return nn.Sequential(nn.Linear(4, 8), nn.Embedding(5, 3), nn.Linear(8, 4))
    finally:
        torch.set_default_dtype(torch.float32)


class FromSparse(nn.Module):
    """Written by an op on a tensor that is not strided."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.other = nn.Parameter(self.weight.detach() * 2)
        with torch.no_grad():
            self.weight.add_(torch.eye(4).to_sparse())
        self.last = nn.Parameter(self.weight.detach() * 3)


def half() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).bfloat16()


def hugging_face(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers as t

        small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
        made: dict[str, Callable[[], nn.Module]] = {
            "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64)),
            "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**small, vocab_size=64)),
            "bert": lambda: t.BertForMaskedLM(t.BertConfig(**small, vocab_size=64)),
            "t5": lambda: t.T5Model(t.T5Config(num_layers=2, d_model=32, d_kv=16, d_ff=48, num_heads=2, vocab_size=64)),
            "mixtral": lambda: t.MixtralForCausalLM(
                t.MixtralConfig(**small, num_key_value_heads=2, vocab_size=64, num_local_experts=2)
            ),
            "vit": lambda: t.ViTModel(t.ViTConfig(**small, image_size=16, patch_size=8)),
        }
        return made[name]()

    return build


MODELS: dict[str, Callable[[], nn.Module]] = {
    "odd": Odd, "weight norm": normed, "clones": cloned, "convolutions": convolutions, "half": half,
    "double": in_double, "sparse": FromSparse, "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)),
    "lstm": lambda: nn.LSTM(4, 5, 2),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    **{name: hugging_face(name) for name in ("gpt2", "llama", "bert", "t5", "mixtral", "vit")},
}  # fmt: skip


KEPT = ("listed", "truncated", "rows")
"""The parameters whose memory is a list's, or that NumPy has seen."""


@pytest.mark.parametrize("live_bytes", [0, 1000, 2**24])
@pytest.mark.parametrize("name", list(MODELS))
def test_values_have_the_bits_of_a_plain_initialisation(
    name: str, live_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deferred_init, "LIVE_BYTES", live_bytes)
    torch.manual_seed(3)
    plain = MODELS[name]()
    drawn = torch.randn(2)
    torch.manual_seed(3)
    with sw.delay_param_initialization():
        late = MODELS[name]()
    assert torch.equal(torch.randn(2), drawn)
    kept = 0
    for (path, expected), (other, parameter) in zip(plain.named_parameters(), late.named_parameters(), strict=True):
        assert path == other
        if is_lazy(parameter):
            continue
        recipe = recipe_of(parameter)
        assert recipe is not None or path in KEPT, path
        values = parameter.detach() if recipe is None else recipe.make()
        kept += parameter.untyped_storage().nbytes()
        assert values.shape == expected.shape
        assert values.dtype == expected.dtype
        assert torch.equal(values.view(torch.uint8), expected.detach().contiguous().view(torch.uint8)), path
    assert kept <= (8 + 48 + 48 if name == "odd" else 0)
    for (path, expected), (_, buffer) in zip(plain.named_buffers(), late.named_buffers(), strict=True):
        assert torch.equal(buffer, expected), path


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda model: model.weight.norm(), "norm"), (lambda model: model.bfloat16(), "bfloat16"),
        (lambda model: model.weight.data.mul_(2), "data"), (lambda model: nn.init.ones_(model.weight), "fill_"),
        (lambda model: model(torch.ones(1, 4)), "linear"), (lambda model: model.load_state_dict({
            "weight": torch.ones(4, 4), "bias": torch.ones(4)}), "copy_"),
    ],
)  # fmt: skip
def test_what_asks_for_values_too_early_is_refused(ask: Callable[[nn.Module], Any], said: str) -> None:
    with sw.delay_param_initialization():
        model = nn.Linear(4, 4)
    assert sum(p.numel() for p in model.parameters()) == 20
    assert not model.requires_grad_(False).weight.requires_grad
    with pytest.raises((sw.ShardwrightError, RuntimeError), match=f"{said}.*sw.delay_param_initialization"):
        ask(model)


class SharesMemory(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        if what == "parameter":
            self.rows = nn.Parameter(self.weight.data[1:])
        else:
            self.register_buffer("seen", self.weight.data)


@pytest.mark.parametrize(("what", "said"), [("parameter", "parameters weight and rows lie in the same memory"),
                                            ("buffer", "buffer seen lies in the memory of a parameter")])  # fmt: skip
def test_what_shares_the_memory_of_a_parameter_is_refused(what: str, said: str) -> None:
    with sw.delay_param_initialization():
        model = SharesMemory(what)
    with pytest.raises(sw.ShardwrightError, match=said):
        deferred_init.DeferredValues.of(model)


def test_wrapping_inside_of_the_context_is_refused() -> None:
    with sw.delay_param_initialization(), pytest.raises(sw.ShardwrightError, match="wrap it after that block"):
        sw.DistributedModel(nn.Linear(2, 2))


def test_a_model_without_values_can_be_captured_and_planned() -> None:
    with sw.delay_param_initialization():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graph = sw.capture(model, torch.ones(2, 4), lambda output: output.mean())
    assert len(graph.parameters) == 4


CASES = {2: ("pp", "tp", "shard 3", "bf16", "saved", "loaded", "given", "read", "messages"), 4: ("shard 3, tp",)}
SLOW = {2: ("shard 1",), 4: ("shard 3, pp", "groups")}
"""By the number of ranks."""


def run(tmp_path_factory: pytest.TempPathFactory, launches: dict[int, tuple[str, ...]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks, cases in launches.items():
        out = tmp_path_factory.mktemp("deferred") / f"{ranks}.json"
        outcome = on_ranks("deferred_init.py", ranks, str(out), *cases, "seeds", timeout_s=150)
        assert outcome.code == 0, outcome.text[-4000:]
        found |= json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory, CASES)


@pytest.fixture(scope="module")
def slowly_trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory, SLOW)


@pytest.mark.parametrize("case", [case for cases in CASES.values() for case in cases])
def test_training_is_that_of_the_plain_model(trained: dict[str, Any], case: str) -> None:
    result = trained[case]
    assert result["late"] == result["plain"], "losses and weights, to the bit"


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for cases in SLOW.values() for case in cases])
def test_training_in_other_ways_is_that_of_the_plain_model(slowly_trained: dict[str, Any], case: str) -> None:
    assert slowly_trained[case]["late"] == slowly_trained[case]["plain"]


def test_ranks_with_different_seeds_are_told(trained: dict[str, Any]) -> None:
    assert "Call torch.manual_seed with the same number on every rank" in trained["seeds"]["error"]


def test_no_rank_holds_the_whole_model(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Four ranks: each has at most its share and two blocks, from the first line on until the first step is over."""
    out = tmp_path_factory.mktemp("deferred") / "memory.json"
    outcome = on_ranks("deferred_init.py", 4, str(out), "memory", timeout_s=150)
    assert outcome.code == 0, outcome.text[-4000:]
    found = json.loads(out.read_text())["memory"]
    whole, block = found["whole"], found["block"]
    room = 32 * 2**20  # what stays alive while a model is built, buffers of messages
    for rank in found["ranks"]:
        assert rank["built"] <= block + room
        assert rank["cut"] <= whole / 4 + 2 * block + room
        assert rank["cut"] < 0.5 * whole
