"""What goes into steps and comes out of them: nested containers, parts along any axis, objects, numbers."""

from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import shardwright.torch as sw
from shardwright.backends.torch.pipeline.step_results import even_split
from shardwright.core.errors import ShardwrightError
from shardwright.torch.sliced import Sliced
from tests.comparison import Comparison
from tests.torch.launch import Outcome, checks_in, on_ranks


@pytest.fixture(scope="module", params=[1, 2], ids=["pp1", "pp2"])
def run(request: pytest.FixtureRequest) -> Outcome:
    return on_ranks("step_values.py", request.param, str(request.param), timeout_s=120)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", checks_in("step_values.py"))
def test_values_of_scripts(run: Outcome, check: str) -> None:
    assert f"ok {check}" in run.text, run.text[-5000:]


# Properties, on one rank -------------------------------------------------------------------------------------------


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.fixture(scope="module", params=[1, 2, 3, 5], ids=lambda count: f"{count} microbatches")
def scaled(request: pytest.FixtureRequest) -> Iterator[tuple[Any, int]]:
    sw.init({"microbatches": request.param, "log_every": 0})
    yield sw.DistributedModel(Scale()), request.param
    sw.shutdown()


def mapped(tree: Any, function: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(mapped(value, function) for value in tree)
    return tree


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (list, tuple)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


@st.composite
def arguments(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, int], set[str], int]:
    """Nested arguments, the axes along which they are divided, those that are not, and the samples."""
    samples = draw(st.integers(1, 9))
    names = draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True))
    axes = {name: draw(st.integers(0, 1)) for name in names}
    whole = {name for name in names[1:] if draw(st.booleans())}

    def tensor(name: str) -> torch.Tensor:
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        shape.insert(axes[name], samples)
        if name in whole:
            shape = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
        return torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))

    def tree(name: str, depth: int) -> Any:
        kind = draw(st.sampled_from(["tensor", "list", "tuple", "dict", "plain"] if depth else ["tensor"]))
        if kind == "tensor":
            return tensor(name)
        if kind == "plain":
            return draw(st.sampled_from([None, "text", 3, 0.5, True]))
        parts = [tree(name, depth - 1) for _ in range(draw(st.integers(0, 2)))]
        return (
            {f"k{n}": part for n, part in enumerate(parts)}
            if kind == "dict"
            else (tuple if kind == "tuple" else list)(parts)
        )

    given = {name: [tensor(name), tree(name, 2)] if name == names[0] else tree(name, 2) for name in names}
    return given, axes, whole, samples


def agree(scaled: tuple[Any, int], case: tuple[dict[str, Any], dict[str, int], set[str], int]) -> None:
    model, most = scaled
    given, axes, whole, samples = case

    def body(model: Any, **given: Any) -> Any:
        return mapped(given, model)

    wrapped = sw.step(non_split_inputs=sorted(whole), input_split_axes=axes)(body)
    with torch.no_grad():
        found = wrapped(model, **given)
    assert body.__name__ == wrapped.__name__
    sizes = even_split(samples, min(most, samples))
    wanted = [
        {
            name: mapped(value, lambda t, m=m, name=name: 1.5 * (t if name in whole else t.split(sizes, axes[name])[m]))
            for name, value in given.items()
        }
        for m in range(len(sizes))
    ]
    compared = Comparison("step")
    for position, output in enumerate(leaves(found)):
        expected = [leaves(one)[position] for one in wanted]
        if not isinstance(expected[0], torch.Tensor):
            assert output == expected[0]
            assert type(output) is type(expected[0])
            continue
        assert len(output) == len(sizes)
        compared.equal(output.outputs, expected)
        if len({tuple(one.shape[1:]) for one in expected}) == 1:
            joined = torch.cat(expected) if expected[0].dim() else torch.stack(expected)
            compared.equal(output.concat(), joined, what="concat")
        else:
            with pytest.raises(ShardwrightError, match="do not join along their first dim"):
                output.concat()
        if len({tuple(one.shape) for one in expected}) == 1:
            stacked = torch.stack(expected)
            compared.equal(output.stack(), stacked, what="stack")
            compared.values(output.reduce_sum(), stacked.sum(0), relative=1e-5, absolute=1e-5, what="sum")
            weights = torch.tensor(sizes, dtype=torch.float32) / samples
            scalar = expected[0].numel() == 1
            mean = (
                (stacked.reshape(len(sizes), -1) * weights[:, None]).sum(0).reshape(expected[0].shape)
                if scalar
                else stacked.mean(0)
            )
            compared.values(output.reduce_mean(), mean, relative=1e-5, absolute=1e-5, what="mean")
        else:
            with pytest.raises(ShardwrightError, match="do not stack"):
                output.reduce_mean()
    compared.require()


HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=25, deadline=None, suppress_health_check=HEALTH)
@given(case=arguments())
def test_nested_arguments_and_results(scaled: tuple[Any, int], case: Any) -> None:
    agree(scaled, case)


@pytest.mark.slow
@settings(max_examples=250, deadline=None, suppress_health_check=HEALTH)
@given(case=arguments())
def test_a_thousand_nested_arguments_and_results(scaled: tuple[Any, int], case: Any) -> None:
    agree(scaled, case)


class Rows:
    """Objects that hold rows in some attribute or container, cut unevenly or evenly."""

    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> "Rows":
        return Rows(**mapped(self.__dict__, lambda t: t.tensor_split(num_mb, axis)[mb] if t.dim() > axis else t))


@settings(max_examples=200, deadline=None)
@given(
    samples=st.integers(1, 12), parts=st.integers(1, 4), axis=st.integers(0, 1), extra=st.sampled_from([None, 3, "x"])
)
def test_objects_are_asked_for_their_parts(samples: int, parts: int, axis: int, extra: Any) -> None:
    shape = (samples, 2) if axis == 0 else (2, samples)
    rows, more, scale = torch.randn(shape), torch.randn(shape), torch.tensor(2.0)
    given = Rows(x=rows, nested=[{"y": more}, extra], scale=scale, extra=extra)
    if samples < parts:
        with pytest.raises(ShardwrightError, match="leaves a microbatch without samples"):
            Sliced.of(given, "rows", parts, axis)
        return
    found = Sliced.of(given, "rows", parts, axis)
    assert found.axes == (axis, axis, None)
    assert found.samples == tuple(part.shape[axis] for part in rows.tensor_split(parts, axis))
    for number in range(2):
        joined = torch.cat([held[number] for held in found.tensors], dim=axis)
        Comparison("parts").equal(joined, (rows, more)[number]).require()
    assert all(held[2] is scale for held in found.tensors)
