"""Recompute by op and activations on the host: two ranks in `workers/memory_policies.py`, and parts of it here."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from shardwright.backends.torch.machine.host_store import MappedFile, store_of
from shardwright.backends.torch.memory.offload import Offload
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from tests.comparison import Comparison
from tests.torch.launch import Outcome, checks_in, on_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return on_ranks("memory_policies.py", 2, timeout_s=280)


@pytest.mark.parametrize("check", checks_in("memory_policies.py"))
def test_on_two_ranks(outcome: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome.text, outcome.text[-4000:]


@pytest.fixture(scope="module")
def outcome_of_all() -> Outcome:
    return on_ranks("memory_policies.py", 2, "--all", timeout_s=600)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("check", checks_in("memory_policies.py"))
def test_every_model_under_every_policy(outcome_of_all: Outcome, check: str) -> None:
    assert f"ok {check}\n" in outcome_of_all.text, outcome_of_all.text[-4000:]


def sending(module: nn.Module, *given: torch.Tensor) -> tuple[torch.Tensor, Offload]:
    """The result of a module whose activations are on the host."""
    offload = Offload(frozenset({("m", 0)}), CPU)
    with offload.sending("m", module, given, None):
        return module(*given), offload


def gradients_agree(found: torch.Tensor | None, expected: torch.Tensor) -> None:
    Comparison().gradients({"x": found}, {"x": expected}).require("gradients")


class Once(nn.Module):
    """What a function makes of its input."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)  # type: ignore[operator,no-any-return]


def overwritten(x: torch.Tensor) -> torch.Tensor:
    """A value is saved, written in place, and saved again: `plain` autograd refuses it."""
    y = x * 2
    first = y.sin()
    y.add_(1.0)
    return (first + y.cos()).sum()


def views(x: torch.Tensor) -> torch.Tensor:
    """Three views of one storage are saved, one of them of another shape and one conjugated."""
    a, b, c = (x * 3).reshape(-1, 3, 64).unbind(1)
    z = torch.view_as_complex(c.reshape(-1, 32, 2)).conj()
    return (a * b.flip(0)).sum() + (z * z * z.conj()).real.sum()


@pytest.mark.parametrize("function", [views, lambda x: (x.relu().softmax(-1) ** 2).sum()])
def test_gradients_are_those_of_plain_autograd(function: object) -> None:
    x = torch.randn(24, 3 * 64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    loss, _ = sending(Once(function), x)
    loss.backward()
    function(other).backward()  # type: ignore[operator]
    assert x.grad is not None
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


def test_what_is_saved_is_the_value_at_that_time() -> None:
    """Where a write in place follows, which plain autograd refuses."""
    x = torch.randn(8, 128, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwritten(x).backward()
    x.grad = None
    loss, _ = sending(Once(overwritten), x)
    loss.backward()
    expected = 2 * (2 * x).cos() - 2 * (2 * x + 1).sin()
    gradients_agree(x.grad, expected.detach())


def test_a_graph_that_is_kept_can_be_run_again() -> None:
    x = torch.randn(16, 64, requires_grad=True)
    loss, _ = sending(Once(lambda x: (x.exp() * x.sigmoid()).sum()), x)
    loss.backward(retain_graph=True)
    once = x.grad.clone()  # type: ignore[union-attr]
    loss.backward()
    gradients_agree(x.grad, 2 * once)


def test_gradients_of_gradients() -> None:
    x = torch.randn(16, 64, requires_grad=True, dtype=torch.float64)
    loss, _ = sending(Once(lambda x: (x**3).sum()), x)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    gradients_agree(second.detach(), (6 * x).detach())


def test_parameters_and_what_came_without_a_gradient_stay() -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return (super().forward(x).tanh() * mask).sum()

    module, x, mask = Masked(128, 128), torch.randn(32, 128, requires_grad=True), torch.rand(32, 128)
    offload = Offload(frozenset({("m", 0)}), CPU)
    with offload.sending("m", module, [x, mask], None) as trip:
        loss = module(x, mask)
    assert [sent.away.nbytes for sent in trip.aways] == [x.nbytes]  # what tanh made; a leaf is there anyway
    loss.backward()
    with offload.sending("m", module, [made := x * 2, mask], None) as trip:
        module(made, mask)
    assert [sent.away.nbytes for sent in trip.aways] == [x.nbytes, x.nbytes]  # the input too


def test_the_file_uses_its_blocks_again() -> None:
    store = store_of(CPU)
    assert isinstance(store, MappedFile)
    tensors = [torch.full((5000,), float(number)) for number in range(3)]
    aways = [store.send(tensor) for tensor in tensors]
    for tensor, away in zip(tensors, aways, strict=True):
        back = torch.empty(0).set_(away.fetch(), 0, tensor.shape)  # type: ignore[call-overload]
        assert torch.equal(back, tensor)
        assert back.data_ptr() != tensor.data_ptr()
    size = store._size
    del aways, away
    gc.collect()
    again = [store.send(tensor) for tensor in tensors]
    assert store._size == size
    del again


class Beside(MappedFile):
    """A store whose copies run beside computing, by its word: it notes what is brought back, and what is let go of."""

    copies_beside = True

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int]] = []
        self.sent = 0

    def send(self, tensor: torch.Tensor) -> Any:
        return Noting(super().send(tensor), self)


class Noting:
    def __init__(self, away: Any, store: Beside) -> None:
        self.away, self.store, self.nbytes, self.number = away, store, away.nbytes, store.sent
        store.sent += 1
        self.is_here = False

    def begin(self) -> None:
        if not self.is_here:
            self.store.noted.append(("begin", self.number))
            self.is_here = True

    def fetch(self) -> torch.UntypedStorage:
        self.begin()
        return self.away.fetch()

    def drop(self) -> None:
        self.store.noted.append(("drop", self.number))
        self.away.drop()
        self.is_here = False


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_backward_brings_each_storage_back_once_and_the_units_before_ahead(
    monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    store, width = Beside(), 64
    monkeypatch.setattr("shardwright.backends.torch.memory.offload.store_of", lambda device: store)
    offload = Offload(frozenset({("m", 0)}), CPU, ahead)
    units = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()) for _ in range(3)]
    x, trip, of_unit = torch.randn(8, width, requires_grad=True), None, []
    for unit in units:
        with offload.sending("m", unit, [x], trip) as trip:
            x = unit(x)
        of_unit.append(range(sum(map(len, of_unit)), store.sent))
    loss = x.square().sum()
    for times in (1, 2):
        store.noted.clear()
        loss.backward(retain_graph=times == 1)
        begun, dropped = ([n for what, n in store.noted if what == kind] for kind in ("begin", "drop"))
        assert sorted(begun) == sorted(dropped) == list(range(store.sent))
        if times == 1:
            last_done = store.noted.index(("drop", of_unit[2][0]))
            begun_before = [store.noted.index(("begin", of_unit[unit][-1])) < last_done for unit in (1, 0)]
            assert begun_before == [True, ahead == 2]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shardwright.backends.torch.machine.host_store._allocate", full)
    with pytest.raises(ShardwrightError, match=r"No space left on device.*set TMPDIR.*less on the host"):
        MappedFile().send(torch.zeros(5000))


def test_what_is_no_plain_tensor_is_refused_by_name() -> None:
    indices = torch.tensor([[0, 1], [2, 0]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(2), (4, 64))
    x = torch.randn(64, 8, requires_grad=True)
    with pytest.raises(MissingCapabilityError, match=r"m saves a Tensor of layout torch\.sparse_coo"):
        sending(Once(lambda x: torch.sparse.mm(sparse, x).sum()), x)
