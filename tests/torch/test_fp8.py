"""Linear layers in fp8: forward and both gradients are those of a reference by hand; what is not finite is not lost;
they train as the unsplit model does, and near to bf16."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from shardwright.backends.torch.capture import fp8_products as fp8
from shardwright.backends.torch.memory.fp8_linear import compute_in_fp8, hides_from_compiler, linear, require_fp8
from shardwright.backends.torch.memory.weight_gradients import collecting, deferrable
from shardwright.backends.torch.pipeline.compiling import _require_seen
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from shardwright.torch.config import read_config
from tests import fp8_by_hand as by_hand
from tests.comparison import Comparison
from tests.torch.launch import beside_unsplit, single

BF16 = torch.bfloat16


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def run(rows: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, **how: bool) -> tuple[torch.Tensor, ...]:
    """The product and both gradients."""
    x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    made = linear(x, w, **how)
    made.backward(gradient)
    assert made.dtype is x.grad.dtype is w.grad.dtype is BF16
    return made.detach(), x.grad, w.grad


def require_by_hand(rows: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> None:
    wanted = by_hand.linear(numbers(rows), numbers(weight), numbers(gradient))
    names = ("product", "gradient of the rows", "gradient of the weight")
    one = run(rows, weight, gradient)
    *others, turned = run(rows, weight.t().contiguous(), gradient, is_turned=True)
    for found in (one, (*others, turned.t())):
        for name, got, value in zip(names, found, wanted, strict=True):
            # Of sums in another order, the last bit of bf16 may differ: 2^-8 of the terms, where they cancel.
            largest = float(np.abs(value).max(initial=0.0))
            absolute = 2.0**-16 * largest + 1e-300
            Comparison(name).values(numbers(got), value, relative=2.0**-7, absolute=absolute).require()


# Against the reference by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 64, 48), (34, 16, 16), (1, 32, 16), (7, 24, 40)])
def test_the_product_and_both_gradients_are_those_by_hand(shape: tuple[int, int, int]) -> None:
    n, k, m = shape
    require_by_hand(bf16(n, k), bf16(m, k, seed=1, scale=0.03), bf16(n, m, seed=2, scale=1e-6))


SIZES = st.tuples(st.integers(1, 9), st.integers(1, 18), st.integers(1, 18))
ENTRIES = st.one_of(
    st.just(0.0), st.floats(-448, 448, width=16), st.floats(-(2.0**-20), 2.0**-20, width=32), st.just(1e30)
)


@settings(max_examples=40)
@given(st.data(), SIZES)
def test_any_values_and_sizes(data: st.DataObject, sizes: tuple[int, int, int]) -> None:
    n, k, m = sizes
    drawn = [data.draw(arrays.arrays(np.float32, shape, elements=ENTRIES)) for shape in ((n, k), (m, k), (n, m))]
    scales = [data.draw(st.sampled_from((1e-20, 1e-3, 1.0))) for _ in drawn]
    rows, weight, gradient = (
        torch.from_numpy(np.clip(a * s, -1e15, 1e15)).to(BF16) for a, s in zip(drawn, scales, strict=True)
    )
    require_by_hand(rows, weight, gradient)


def test_zeros_stay_zeros_and_no_rows_are_no_rows() -> None:
    for found in run(torch.zeros(4, 16, dtype=BF16), torch.zeros(16, 16, dtype=BF16), torch.zeros(4, 16, dtype=BF16)):
        assert torch.equal(found, torch.zeros_like(found))
    empty = run(torch.zeros(0, 16, dtype=BF16), bf16(32, 16), torch.zeros(0, 32, dtype=BF16))
    assert [tuple(t.shape) for t in empty] == [(0, 32), (0, 16), (32, 16)]
    assert torch.equal(empty[2], torch.zeros(32, 16, dtype=BF16))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", range(3))
def test_what_is_not_finite_reaches_every_product_that_it_is_in(bad: float, where: int) -> None:
    operands = [bf16(32, 16), bf16(48, 16, seed=1), bf16(32, 48, seed=2)]
    operands[where][5, 3] = bad
    made, of_rows, of_weight = run(*operands)
    read = {0: (made, of_weight), 1: (made, of_rows), 2: (of_rows, of_weight)}[where]
    others = {0: of_rows, 1: of_weight, 2: made}[where]
    for result in read:
        assert result.isnan().any(dim=0).any()
        assert not result.isfinite().all()
    assert others.isfinite().all()


def test_scales_are_powers_of_two_that_fill_the_range() -> None:
    for dtype in (fp8.FORWARD, fp8.GRADIENT):
        for largest in (1.0, 448.0, 447.0, 3.4e38, 1e-12, 57344.0, 0.3):
            scale = fp8.scale_for(torch.tensor(largest), dtype)
            most = torch.finfo(dtype).max
            assert float(torch.frexp(scale).mantissa) == 0.5
            assert float(scale) * largest <= most < 2 * float(scale) * largest * (1 + 1e-6)


# Where it is used ---------------------------------------------------------------------------------------------------


class Named(nn.Module):
    """Layers of every form: torch's, GPT-2's, and two of one's own."""

    class Own(nn.Module):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.turned = turned
            self.weight, self.bias = nn.Parameter(bf16(32, 32, seed=4, scale=0.2)), nn.Parameter(bf16(32, seed=5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight) if self.turned else F.linear(x, self.weight, self.bias)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), Conv1D(32, 32), self.Own(False), self.Own(True)])
        self.to(BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def trained(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    given = x.clone().requires_grad_()
    model.zero_grad()
    model(given).float().pow(2).sum().backward()
    return {"x": given.grad, **{name: p.grad.clone() for name, p in model.named_parameters()}}


def test_layers_of_every_form_compute_in_fp8_until_it_is_undone() -> None:
    torch.manual_seed(0)
    model, x = Named(), bf16(8, 32)
    plain = trained(model, x)
    undo = compute_in_fp8(model.layers)
    wanted = x
    for layer in model.layers:
        is_turned = not (isinstance(layer, nn.Linear) or getattr(layer, "turned", None) is False)
        wanted = linear(wanted, layer.weight, layer.bias, is_turned=is_turned)
    assert torch.equal(model(x), wanted)
    assert [hides_from_compiler(layer) for layer in model.layers] == [False, False, True, True]
    narrow = trained(model, x)
    assert all(not torch.equal(narrow[name], plain[name]) for name in plain)
    with fp8.plain_products():
        Comparison().values(trained(model, x), plain, relative=0.0, absolute=0.0).require()
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.layers[0].weight.zero_()
    assert torch.equal(copied.layers[0](x), copied.layers[0].bias.expand(8, 32))
    assert torch.equal(model(x), wanted)
    undo()
    assert not any("forward" in vars(layer) for layer in model.layers)
    Comparison().values(trained(model, x), plain, relative=0.0, absolute=0.0).require()


def test_float32_values_are_left_to_the_model() -> None:
    layer = nn.Linear(32, 16)
    wanted = layer(torch.ones(2, 32))
    compute_in_fp8([layer])
    assert torch.equal(layer(torch.ones(2, 32)), wanted)


def test_a_product_with_factors_is_refused_by_name() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(bf16(16, 16)), nn.Parameter(bf16(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight, alpha=0.5)

    layer = Scaled()
    compute_in_fp8([layer])
    with pytest.raises(MissingCapabilityError, match=r"Scaled calls torch.addmm with alpha.*plan for bf16"):
        layer(bf16(4, 16))


def test_compiled_layers_compute_the_same() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), Conv1D(32, 48)).to(BF16), bf16(3, 5, 32)
    compute_in_fp8(model)
    wanted = trained(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = {name.removeprefix("_orig_mod."): value for name, value in trained(compiled, x).items()}
    Comparison().values(found, wanted, relative=0.0, absolute=0.0).require()


def test_a_layer_that_a_compiler_would_not_see_is_refused() -> None:
    unit = Named()
    compute_in_fp8(unit.layers)
    _require_seen(unit.layers[0], "units.0")
    with pytest.raises(MissingCapabilityError, match=r"Own at 'units.1.layers.2' is no nn.Linear.*'compile': False"):
        _require_seen(unit, "units.1")


def test_weight_gradients_can_be_put_off() -> None:
    torch.manual_seed(0)
    model, x = Named(), bf16(8, 32)
    compute_in_fp8(model.layers)
    wanted = trained(model, x)
    model.zero_grad()
    given = x.clone().requires_grad_()
    with deferrable():
        loss = model(given).float().pow(2).sum()
    with collecting() as left:
        loss.backward()
    assert all(p.grad is None for name, p in model.named_parameters() if name.endswith("weight"))
    left.multiply()
    found = {"x": given.grad, **{name: p.grad for name, p in model.named_parameters()}}
    Comparison().values(found, wanted, relative=0.0, absolute=0.0).require()


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x, w = bf16(4, 16).requires_grad_(), bf16(16, 16).requires_grad_()
    with pytest.raises(MissingCapabilityError, match=r"create_graph=True.*plan for bf16"):
        torch.autograd.grad(linear(x, w).sum(), x, create_graph=True)


def test_a_gpu_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(MissingCapabilityError, match=r"NVIDIA A100 has none \(compute capability 8.0, and 8.9 is"):
        require_fp8(torch.device("cuda", 0))
    require_fp8(torch.device("cpu"))


def test_the_key_of_the_configuration() -> None:
    assert read_config({"fp8": True}).precision == "fp8"
    assert read_config({"fp8": True, "bf16": True}).precision == "fp8"
    for other in ({"fp16": True}, {"pipeline_mode": "messages"}, {"fp8": 1}):
        with pytest.raises(ShardwrightError, match="fp8"):
            read_config({"fp8": True} | other)


# Trained ------------------------------------------------------------------------------------------------------------

CASES = {2: ("llama:2:1:1:fp8-split", "llama:1:2:1:fp8-z3", "gpt2:1:1:2:fp8")}
SLOW = {2: ("llama:2:1:1:fp8", "llama:1:2:1:fp8-recompute", "llama:1:1:2:fp8", "gpt2:2:1:1:fp8", "bert:1:2:1:fp8")}


def require_same(folder: Path, cases: dict[int, tuple[str, ...]], timeout_s: float) -> None:
    for result in beside_unsplit(folder, cases, timeout_s).values():
        Comparison.of_ranks(result["same"]).require("losses", "norms", "gradients", "weights")
        Comparison.of_ranks(result["reload"]).require()
        assert not result["whole_because"]


def test_two_ranks_train_as_one_does(tmp_path: Path) -> None:
    """Pipelines, replicas and sharded state by the same bits; on a tensor axis, and where stages share a table, within
    the rounding to 8 bits."""
    require_same(tmp_path, CASES, 120)


@pytest.mark.slow
def test_two_ranks_train_as_one_does_in_other_ways(tmp_path: Path) -> None:
    require_same(tmp_path, SLOW, 300)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_twenty_steps_are_those_by_hand_and_near_to_bf16(name: str, tmp_path: Path) -> None:
    """The unsplit model under a plan in fp8: as torch trains it with every linear layer but the head by hand, and its
    losses within 1% of those in bf16."""
    out = tmp_path / "out.json"
    outcome = single("fp8_training.py", name, str(out), timeout_s=120)
    assert outcome.code == 0, outcome.text[-4000:]
    losses = json.loads(out.read_text())
    assert len(losses["ours"]) == 20
    same = Comparison(name).losses(losses["ours"], losses["by hand"], relative=1e-3, moving=0.2)
    same.losses(losses["ours"], losses["bf16"], relative=1e-2, what="losses beside bf16").require()
    assert losses["ours"] != losses["bf16"]
