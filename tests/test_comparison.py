"""The comparer of all suites fails where it should: for NaN, for nothing, for other names, shapes and dtypes."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.comparison import GRADIENT, LOSS, OF_ALL, Comparison

NAN, INFINITE = float("nan"), float("inf")
G = {"a": np.array([3.0, 4.0]), "b": np.array([[12.0]])}
"""The norms are 5 and 12, that of both 13."""


def gradients(found: Any, wanted: Any = G, **more: Any) -> Comparison:
    return Comparison().gradients(found, wanted, **more)


def values(found: Any, wanted: Any, **more: Any) -> Comparison:
    return Comparison().values(found, wanted, **({"relative": 1e-3, "absolute": 1e-3} | more))


def test_what_is_equal_passes_and_is_counted() -> None:
    same = gradients(G).require("gradients")
    assert same.worst == 0.0
    assert (same["gradients"].elements, same["gradients"].named) == (3, {"a", "b"})
    assert same.summary() == "gradients: 2 names, 3 numbers, 0 of what is allowed at most"


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_the_bound_of_gradients_is_that_of_the_design(share: float) -> None:
    allowed = GRADIENT * 5 + OF_ALL * 13
    same = gradients(G | {"a": G["a"] + share * allowed * np.array([0.6, 0.8])})
    assert same.worst == pytest.approx(share, rel=1e-6)
    assert bool(same.failures()) == (share > 1)


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_the_bound_of_losses_is_relative(share: float) -> None:
    same = Comparison().losses([5.0, -200.0 * (1 + share * LOSS)], [5.0, -200.0])
    assert bool(same.failures()) == (share > 1)


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_the_bound_of_values_is_of_every_element(share: float) -> None:
    same = values([np.array([0.0, 2.0 + share * 3e-3])], [np.array([0.0, 2.0])])
    assert bool(same.failures()) == (share > 1)


@pytest.mark.parametrize(
    "same",
    [
        pytest.param(lambda: gradients({"a": np.array([NAN, 4.0]), "b": G["b"]}), id="one gradient"),
        pytest.param(lambda: gradients({name: g * NAN for name, g in G.items()}), id="all gradients"),
        pytest.param(lambda: gradients({"a": G["a"] * INFINITE, "b": G["b"]}), id="infinite"),
        pytest.param(lambda: gradients(G, {"a": G["a"] * NAN, "b": G["b"]}), id="a reference"),
        pytest.param(lambda: Comparison().losses([1.0, NAN], [1.0, 1.0]), id="a loss"),
        pytest.param(lambda: Comparison().losses([1.0, NAN], [1.0, NAN]), id="a loss of both"),
        pytest.param(lambda: Comparison().losses([NAN, 1.0], [1.0, 1.0]), id="the first loss"),
        pytest.param(lambda: values([np.array([1.0, NAN])], [np.ones(2)]), id="a value"),
        pytest.param(lambda: values([np.array([1.0, NAN])], [np.array([1.0, NAN])]), id="a value of both"),
        pytest.param(lambda: values([np.array([INFINITE])], [np.array([-INFINITE])]), id="signs of infinities"),
        pytest.param(lambda: values(np.array([NAN]), np.array([INFINITE]), nan_is_nan=True), id="NaN for infinite"),
        pytest.param(lambda: Comparison().equal(np.array([NAN]), np.array([NAN])), id="to the bit"),
    ],
)
def test_nan_is_never_near_anything(same: Callable[[], Comparison]) -> None:
    with pytest.raises(AssertionError):
        same().require()
    assert not same().worst <= 1.0 or same().failures()
    back = Comparison.of_ranks([json.loads(json.dumps(gradients(G).report())), json.loads(json.dumps(same().report()))])
    with pytest.raises(AssertionError, match="rank 1"):
        back.require()


def test_nan_that_the_plain_model_has_too_can_be_meant() -> None:
    mask = np.array([[0.0, -INFINITE, NAN]])
    values({"mask": mask}, {"mask": mask}, nan_is_nan=True).require()


@pytest.mark.parametrize(
    ("same", "match"),
    [
        pytest.param(lambda: Comparison(), "nothing was compared", id="no call"),
        pytest.param(lambda: Comparison().losses([], []), "losses: nothing was compared", id="no losses"),
        pytest.param(lambda: values({}, {}), "nothing was compared", id="no names"),
        pytest.param(lambda: values({"a": None}, {"a": None}), "nothing was compared", id="only None"),
        pytest.param(lambda: values({"a": np.ones((0, 3))}, {"a": np.ones((0, 3))}), "nothing was", id="no elements"),
        pytest.param(lambda: gradients({}, {}), "norm of all gradients wanted is 0", id="no gradients"),
        pytest.param(lambda: gradients({"a": np.zeros(2)}, {"a": np.zeros(2)}), "norm of all .* is 0", id="all zero"),
        pytest.param(lambda: gradients({}, G, part=True), "2 never compared", id="an empty part"),
        pytest.param(lambda: Comparison.of_ranks([]), "nothing was compared", id="no ranks"),
        pytest.param(lambda: Comparison().losses([1, 1], [1, 1], moving=1e-4), "span 0", id="losses that stand still"),
    ],
)
def test_nothing_is_not_equal_to_nothing(same: Callable[[], Comparison], match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        same().require()


def test_a_kind_that_was_asked_for_must_be_there() -> None:
    with pytest.raises(AssertionError, match="losses: nothing was compared"):
        gradients(G).require("gradients", "losses")


@pytest.mark.parametrize(
    ("found", "wanted", "match"),
    [
        pytest.param({"a": G["a"]}, G, "b: missing", id="one less"),
        pytest.param(G | {"c": G["a"]}, G, "c: found, and not wanted", id="one more"),
        pytest.param(G | {"b": None}, G, "b: none found", id="none found"),
        pytest.param(G, G | {"b": None}, "b: found, and none wanted", id="none wanted"),
        pytest.param(G | {"a": np.array([[3.0], [4.0]])}, G, r"shape \(2, 1\) for \(2,\)", id="shape"),
        pytest.param(G | {"b": np.array(12.0)}, G, r"shape \(\) for \(1, 1\)", id="what broadcasts"),
        pytest.param(G | {"a": G["a"].astype(np.float32)}, G, "float32 for float64", id="dtype"),
        pytest.param({"a": [G["a"]], "b": G["b"]}, G, "a.0: found, and not wanted", id="nesting"),
    ],
)
def test_sets_of_names_shapes_and_dtypes_must_be_equal(found: Any, wanted: Any, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        gradients(found, wanted).require()
    with pytest.raises(AssertionError, match=match):
        values(found, wanted).require()


def test_sequences_must_be_equally_long() -> None:
    with pytest.raises(AssertionError, match="1: missing"):
        Comparison().losses([1.0], [1.0, 2.0]).require()
    with pytest.raises(AssertionError, match="2: found, and not wanted"):
        Comparison().losses([1.0, 2.0, 3.0], [1.0, 2.0]).require()


def test_names_that_are_one_when_joined_are_refused() -> None:
    with pytest.raises(ValueError, match=r"two values are called a\.b"):
        values({"a": {"b": 1.0}, "a.b": 2.0}, {"a.b": 2.0})


def test_no_gradient_may_count_as_one_of_zeros() -> None:
    wanted = G | {"c": np.zeros(2), "d": None}
    gradients(G | {"c": None, "d": np.zeros(1)}, wanted, none_is_zero=True).require()
    with pytest.raises(AssertionError, match="c: none found"):
        gradients(G | {"c": None, "d": None}, wanted).require()
    with pytest.raises(AssertionError, match="a: none found"):
        gradients({"a": None, "b": G["b"], "c": None, "d": None}, wanted, none_is_zero=True).require()


def test_integers_and_truth_values_are_equal_or_not() -> None:
    for dtype in (np.int64, np.uint8, bool):
        values([np.zeros(3, dtype)], [np.zeros(3, dtype)]).require()
        with pytest.raises(AssertionError):
            values([np.zeros(3, dtype)], [np.eye(1, 3, dtype=dtype)[0]], relative=9.0, absolute=9.0).require()
    with pytest.raises(AssertionError):  # the two are one number in double precision
        values([np.array([2**53])], [np.array([2**53 + 1])]).require()


def test_ranks_together_must_compare_every_name() -> None:
    reports = [gradients({name: G[name]}, part=True).report() for name in G]
    assert Comparison.of_ranks(reports).require("gradients")["gradients"].elements == 3
    with pytest.raises(AssertionError, match="1 never compared, b among them"):
        Comparison.of_ranks([reports[0], reports[0]]).require()
    with pytest.raises(AssertionError, match="rank 1 compared none"):
        Comparison.of_ranks([reports[0], Comparison().report()]).require()
    with pytest.raises(AssertionError, match="c: found, and not wanted"):
        gradients({"c": G["a"]}, part=True).require()


def test_every_step_is_compared_by_itself() -> None:
    same = Comparison()
    for step, found in enumerate(({"a": G["a"]}, G)):
        same.where = f"step {step}"
        same.gradients(found, G, part=True)
    with pytest.raises(AssertionError, match="1 never compared, step 0 b among them"):
        same.require()


def test_the_message_names_what_is_off() -> None:
    with pytest.raises(AssertionError, match=r"gpt2 differs:\n  gradients: b: 1e\+03 times what is allowed"):
        Comparison("gpt2").gradients(G | {"b": G["b"] * 1.1}, G, relative=1e-4, of_all=1e-8 / 13).require()
    many = {str(i): np.ones(1) for i in range(20)}
    with pytest.raises(AssertionError, match="and 12 more"):
        values({name: -x for name, x in many.items()}, many).require()


def test_arrays_of_both_frameworks_are_read() -> None:
    torch = pytest.importorskip("torch")
    nnx = pytest.importorskip("flax.nnx")
    jnp = pytest.importorskip("jax.numpy")
    of_numpy = {"a": np.array([3.0, 4.0], np.float32), "n": np.array([1, 2], np.int32)}
    of_torch = {"a": torch.tensor([3.0, 4.0], requires_grad=True), "n": torch.tensor([1, 2], dtype=torch.int32)}
    of_jax = {"a": nnx.Param(jnp.array([3.0, 4.0])), "n": jnp.array([1, 2])}
    for one in (of_numpy, of_torch, of_jax):
        for other in (of_numpy, of_torch, of_jax):
            Comparison().equal(one, other).require()
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    assert Comparison().equal(state, state).require()["equal"].named == {"kernel", "bias"}
    for rough in (torch.ones(2, dtype=torch.bfloat16), jnp.ones(2, jnp.bfloat16)):
        gradients([rough], [rough], relative=1e-2).require()
        with pytest.raises(AssertionError, match="bfloat16 for bfloat16 needs a bound"):
            gradients([rough], [rough]).require()
    z = torch.tensor([1 + 1j])
    gradients([z], [z]).require()
    with pytest.raises(AssertionError, match="times what is allowed"):
        gradients([z], [z.conj().resolve_conj()]).require()


def test_no_suite_compares_in_another_way() -> None:
    """What drops NaN, takes nothing for equal, or stretches shapes."""
    others = re.compile(r"\ballclose\(|assert_close\(|np\.testing|numpy\.testing|max\(worst")
    root = Path(__file__).parents[1]
    files = [*(root / "tests").rglob("*.py"), *(root / "benchmarks").glob("*.py")]
    assert len(files) > 150
    published = root / "benchmarks" / "accuracy.py"  # of published numbers
    found = [
        f"{file.relative_to(root)}: {line.strip()}"
        for file in files
        if file not in (Path(__file__), published)
        for line in file.read_text(encoding="utf-8").splitlines()
        if others.search(line)
    ]
    assert not found, "compare by tests/comparison.py"
