"""Results of ops on tensors without values, remembered: they are those that tensors with values give."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.backends.torch.capture.remembered_results import _PLAIN, Inferred, unwatched

aten = torch.ops.aten
X, TURNED, PART = (4, 6), "turned", "part"
Case = tuple[Any, list[Any], list[Any]]
"""An op, shapes of operands (turned, or a part of a larger tensor), other arguments."""
POINTWISE = (
    aten.neg.default, aten.exp.default, aten.log.default, aten.tanh.default, aten.sigmoid.default, aten.rsqrt.default,
    aten.gelu.default, aten.silu.default, aten.detach.default, aten.alias.default, aten.t.default,
)  # fmt: skip
CASES: list[Case] = [
    *((op, [kind], []) for op in POINTWISE for kind in (X, TURNED, PART)),
    *((op, [one, other], []) for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
      for one, other in ((X, X), (X, TURNED), (X, (6,)), (PART, (4, 1)), (X, "whole"), ("whole", "whole"))),
    *((op, [kind], [number]) for op in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.pow.Tensor_Scalar)
      for kind in (X, "whole") for number in (2, 1.5, True)),
    (aten.pow.Tensor_Tensor, [X, X], []),
    (aten.pow.Scalar, [], [2.0, X]),
    (aten.view.default, [X], [[2, -1]]), (aten.view.default, [(4, 1, 6)], [[4, 6]]),
    (aten._unsafe_view.default, [X], [[24]]), (aten.transpose.int, [PART], [0, 1]),
    (aten.permute.default, [X], [[1, 0]]),
    (aten.expand.default, [(4, 1)], [[2, 4, 6]]), (aten.slice.Tensor, [X], [1, 1, 5, 2]),
    (aten.select.int, [X], [0, 2]),
    (aten.unsqueeze.default, [TURNED], [1]), (aten.squeeze.dim, [(4, 1)], [1]), (aten.squeeze.default, [(1, 4, 1)], []),
    (aten.split.Tensor, [X], [4, 1]),
    (aten.mm.default, [X, (6, 5)], []), (aten.mm.default, [TURNED, (6, 5)], []),
    (aten.bmm.default, [(2, 3, 4), (2, 4, 5)], []),
    (aten.addmm.default, [(5,), X, (6, 5)], []),
    (aten._softmax.default, [TURNED], [-1, False]), (aten._log_softmax.default, [X], [1, False]),
    (aten.nll_loss_forward.default, [X, "target"], [None, 1, -100]),
    (aten.native_layer_norm.default, [PART], [[6], None, None, 1e-5]), (aten.cat.default, [], [["x", "x"], 1]),
    (aten.sum.dim_IntList, [X], [[0], True]), (aten.mean.default, [X], []), (aten._to_copy.default, [X], []),
    (aten.clone.default, [TURNED], []), (aten.max.dim, [X], [1]), (aten.gather.default, [X], [1, "indices"]),
    (aten.embedding.default, [X, "target"], []),
]  # fmt: skip


def operand(kind: Any) -> torch.Tensor:
    if kind == TURNED:
        return torch.rand(6, 4).t()
    if kind == PART:
        return torch.rand(8, 7)[2:6, :6]
    if kind == "whole":
        return torch.arange(24).reshape(4, 6)
    if kind == "target":
        return torch.tensor([1, 0, 3, 2])
    if kind == "indices":
        return torch.zeros(4, 2, dtype=torch.int64)
    return torch.rand(kind)


def arguments_of(case: Case) -> list[Any]:
    _, shapes, others = case

    def given(item: Any) -> Any:
        if isinstance(item, tuple) or item == "indices":
            return operand(item)
        return [operand(X) if one == "x" else one for one in item] if isinstance(item, list) else item

    return [*map(operand, shapes), *map(given, others)]


def described(result: Any, arguments: list[Any]) -> list[Any]:
    """The form of every tensor that an op gave, and which of the arguments it shares memory with, or is."""
    held = [a for a in arguments if isinstance(a, torch.Tensor)]
    places = {a.untyped_storage()._cdata: n for n, a in enumerate(held)}
    return [
        (
            isinstance(result, (tuple, list)), tuple(t.shape), t.stride(), t.storage_offset(), t.dtype,
            places.get(t.untyped_storage()._cdata), [t is a for a in held],
        )
        for t in (result if isinstance(result, (tuple, list)) else (result,))
    ]  # fmt: skip


class Through(TorchDispatchMode):
    """Sends every op through the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inferred = Inferred()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.inferred.run(func, args, kwargs or {})


def fake(mode: FakeTensorMode, item: Any) -> Any:
    if isinstance(item, list):
        return [fake(mode, one) for one in item]
    return mode.from_tensor(item) if isinstance(item, torch.Tensor) else item


def meta(item: Any) -> Any:
    if isinstance(item, list):
        return [meta(one) for one in item]
    if not isinstance(item, torch.Tensor):
        return item
    made = torch.empty(item.untyped_storage().nbytes() // item.element_size(), dtype=item.dtype, device="meta")
    return made.as_strided(item.shape, item.stride(), item.storage_offset())


def run_twice(case: Case, replaced: Callable[[Any], Any], through: Through) -> list[list[Any]]:
    found = []
    for _ in range(2):
        arguments = [replaced(item) for item in arguments_of(case)]
        with through, torch._C._AutoDispatchBelowAutograd():
            found.append(described(case[0](*arguments), arguments))
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[2]}")
def test_what_is_remembered_is_what_tensors_with_values_give(case: Case) -> None:
    arguments = arguments_of(case)
    with torch._C._AutoDispatchBelowAutograd():
        wanted = described(case[0](*arguments), arguments)
    mode, through = FakeTensorMode(), Through()
    with mode:
        assert run_twice(case, lambda item: fake(mode, item), through) == [wanted, wanted]
    of_op = [key for key in through.inferred._known if key[0] is case[0]]
    assert len(of_op) == 1
    assert run_twice(case, meta, Through()) == [wanted, wanted]


def test_every_op_that_is_asked_past_the_mode_is_among_the_cases() -> None:
    assert {case[0]._schema.name for case in CASES} >= _PLAIN


def test_what_is_remembered_is_told_apart_by_all_that_decides_it() -> None:
    mode, through = FakeTensorMode(), Through()
    with mode, through:
        whole = torch.empty(4, dtype=torch.int64)
        assert [(whole * number).dtype for number in (2, 2.0, True, 2, 2.0, True)] == [
            torch.int64, torch.float32, torch.int64, torch.int64, torch.float32, torch.int64,
        ]  # fmt: skip
        assert (whole / 2).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert (whole / 2).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        made = [torch.empty(4, 4).t().contiguous().stride(), torch.empty(4, 4).contiguous().stride()]
        assert made == [(4, 1), (4, 1)]


def test_values_that_are_known_and_writes_in_place_are_left_alone() -> None:
    mode, through = FakeTensorMode(), Through()
    with mode, through:
        for number in (3, 4):
            assert (torch.tensor(number) + 1).item() == number + 1
        x = torch.empty(4, 4)
        before = x._version
        for _ in range(2):
            x.add_(1)
            x.t()[0].mul_(2)
        assert x._version == before + 4
        for shape in ((4, 4, 1), (4, 4, 1, 1)):
            assert x.unsqueeze_(-1).shape == shape
    with through:
        for number in (3.0, 4.0):
            assert float(torch.tensor(number) * 2) == 2 * number


def test_gradients_flow_through_remembered_views_and_results() -> None:
    with FakeTensorMode(), Through():
        for _ in range(2):
            x = torch.empty(4, 6, requires_grad=True)
            y = (x.t() * 2).view(6, 2, 2)
            assert y.requires_grad
            assert x.t()._base is x
            assert y._is_view()
            with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                x.t().mul_(2)


def test_another_dispatch_mode_sees_every_op() -> None:
    seen: list[str] = []

    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x = torch.empty(4, device="meta")
    with Own(), Through():
        for _ in range(3):
            x.exp()
    assert seen == ["aten::exp"] * 3


@contextmanager
def traced(calls: list[str]) -> Iterator[None]:
    outer = sys.gettrace()
    sys.settrace(lambda frame, event, argument: calls.append(frame.f_code.co_name))
    try:
        yield
    finally:
        sys.settrace(outer)


def test_calls_of_the_users_code_inside_of_an_op_are_still_traced() -> None:
    def of_the_user(func: Any, args: Any, kwargs: Any) -> None:
        pass

    calls: list[str] = []
    with torch.library._scoped_library("shardwright_test", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        own = torch.ops.shardwright_test.own.default
        with traced(calls):
            unwatched(of_the_user, own, (), {}, modes=0)
        assert calls.count("of_the_user") == 1
        with traced(calls):
            unwatched(of_the_user, aten.exp.default, (), {}, modes=0)
            after = sys.gettrace()
        assert calls.count("of_the_user") == 1
        assert after is not None
        with Through(), traced(calls):
            unwatched(of_the_user, aten.exp.default, (), {}, modes=0)
        assert calls.count("of_the_user") == 2
