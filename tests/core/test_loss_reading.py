"""How a loss follows from those of its microbatches, told from its program, against the loss computed both ways."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwright.core.errors import ShardwrightError
from tests.core.traced_losses import Arrays, Loss, Traced, part, put_together, read, run

SPLITS = ((3, 4), (1, 2, 2, 2), (2, 1, 1, 3))


def batch(seed: int = 0) -> Arrays:
    """Seven samples of four entries, a mask with unequal counts, weights, and a class each."""
    random = np.random.default_rng(seed)
    mask = (random.random((7, 4)) < 0.6).astype(float)
    mask[:, 0] = 1.0
    return {"x": random.normal(size=(7, 4)), "m": mask, "w": random.random(7) + 0.1, "k": random.integers(0, 4, 7)}


def each(x: Traced, t: Traced) -> Traced:
    """A loss of every entry."""
    return (x * t).map(np.tanh).map(np.square)


DECOMPOSES: dict[str, tuple[str, Loss]] = {
    "mean": ("mean", lambda x, m, w, k, t: each(x, t).mean()),
    "mean of means": ("mean", lambda x, m, w, k, t: each(x, t).mean(1).mean()),
    "sum": ("sum", lambda x, m, w, k, t: each(x, t).sum()),
    "sum over a number": ("sum", lambda x, m, w, k, t: each(x, t).sum() / 32.0),
    "sum over the batch size": ("mean", lambda x, m, w, k, t: each(x, t).sum() / x.shape[0]),
    "sum over the number of entries": ("mean", lambda x, m, w, k, t: each(x, t).sum() / (x.shape[0] * x.shape[1])),
    "mean times the batch size": ("sum", lambda x, m, w, k, t: each(x, t).mean() * x.shape[0]),
    "masked mean": ("weighted mean", lambda x, m, w, k, t: (each(x, t) * m).sum() / m.sum()),
    "masked mean, eps": ("weighted mean", lambda x, m, w, k, t: (each(x, t) * m).sum() / (m.sum() + 1.0)),
    "masked mean, at least 5": ("weighted mean", lambda x, m, w, k, t: (each(x, t) * m).sum() / m.sum().at_least(5.0)),
    "ratio of means": ("weighted mean", lambda x, m, w, k, t: (each(x, t) * m).mean() / m.mean()),
    "ratio of means, at least": (
        "weighted mean", lambda x, m, w, k, t: (each(x, t) * m).mean() / m.mean().at_least(0.9),
    ),
    "half a masked mean": ("weighted mean", lambda x, m, w, k, t: (each(x, t) * m).sum() / m.sum() * 0.5),
    "masked mean times a parameter": (
        "weighted mean", lambda x, m, w, k, t: (each(x, t) * m).sum() / m.sum() * t.map(np.square),
    ),
    "normalized mask": ("weighted mean", lambda x, m, w, k, t: (each(x, t) * (m / m.sum())).sum()),
    "mean within samples": ("mean", lambda x, m, w, k, t: ((each(x, t) * m).sum(1) / m.sum(1)).mean()),
    "weights": ("weighted mean", lambda x, m, w, k, t: (each(x, t).mean(1) * w).sum() / w.sum()),
    "weights without a count": ("mean", lambda x, m, w, k, t: (each(x, t).mean(1) * w).mean()),
    "dot product": ("sum", lambda x, m, w, k, t: each(x, t).mean(1) @ w),
    "penalty on weights": ("mean", lambda x, m, w, k, t: each(x, t).mean() + t.map(np.square) * 0.1),
    "masked mean and a penalty": (
        "weighted mean", lambda x, m, w, k, t: (each(x, t) * m).sum() / m.sum() + t.map(np.square),
    ),
    "two means": ("mean", lambda x, m, w, k, t: each(x, t).mean() * 0.3 + (x * t).sum(1).mean()),
    "flattened": ("mean", lambda x, m, w, k, t: each(x, t).reshape(x.shape[0] * 4).mean()),
    "flattened, batch inside": (
        "mean",
        lambda x, m, w, k, t: each(x.transpose().reshape(4 * x.shape[0]).reshape(4, x.shape[0]), t).sum(0).mean(),
    ),
    "shifted": ("mean", lambda x, m, w, k, t: each(x.cut(1, 1, 4) - x.cut(1, 0, 3), t).mean()),
    "two views": (
        "mean",
        lambda x, m, w, k, t: (lambda y: (y.cut(0, 0, x.shape[0]) - y.cut(0, x.shape[0], 2 * x.shape[0])))(
            each(x.concat(m, 0), t)
        ).map(np.square).mean(),
    ),
    "one entry of each sample": ("mean", lambda x, m, w, k, t: each(x, t).pick(x.places(), k).mean()),
    "selected": ("mean", lambda x, m, w, k, t: m.where(each(x, t), x * 0.0).mean()),
    "count of ones": ("mean", lambda x, m, w, k, t: each(x, t).sum() / x.ones().sum()),
    "only a penalty": ("constant", lambda x, m, w, k, t: t.map(np.square)),
    "sum of squares over the batch size squared": (
        "sum over the number of samples to the power of 2",
        lambda x, m, w, k, t: each(x, t).sum() / x.shape[0] / x.shape[0],
    ),
}  # fmt: skip

DOES_NOT: dict[str, tuple[str, str, Loss]] = {
    "exponent of a mean": ("coupled", "linear", lambda x, m, w, k, t: each(x, t).mean().map(np.exp)),
    "root of a mean": ("coupled", "linear", lambda x, m, w, k, t: each(x, t).mean().map(np.sqrt)),
    "maximum": ("coupled", "another way", lambda x, m, w, k, t: each(x, t).max()),
    "maximum over samples": ("coupled", "another way", lambda x, m, w, k, t: each(x, t).mean(1).max(0)),
    "in-batch negatives": (
        "coupled", "every other", lambda x, m, w, k, t: ((x * t) @ m.transpose()).map(np.exp).mean(),
    ),
    "product of means": ("coupled", "multiplies", lambda x, m, w, k, t: each(x, t).mean() * m.mean()),
    "variance": (
        "coupled", "linear", lambda x, m, w, k, t: (each(x, t) - each(x, t).mean()).map(np.square).mean(),
    ),
    "a count with parameters": ("coupled", "parameters", lambda x, m, w, k, t: each(x, t).sum() / (m * t).sum()),
    "a count of each entry": ("coupled", "plain count", lambda x, m, w, k, t: (each(x, t).sum(0) / m.sum(0)).sum()),
    "two counts": (
        "coupled", "two sums",
        lambda x, m, w, k, t: ((each(x, t) * (m / m.sum())).sum(1) * (w / w.sum())).sum(),
    ),
    "clamped mean": ("coupled", "linear", lambda x, m, w, k, t: each(x, t).mean().at_least(0.1)),
    "clamped count as a factor": (
        "coupled", "linear", lambda x, m, w, k, t: t.map(np.square) * m.sum().at_least(5.0),
    ),
    "mean and sum": ("mixed", "different ways", lambda x, m, w, k, t: each(x, t).mean() + each(x, t).sum()),
    "sum and a penalty": ("mixed", "different ways", lambda x, m, w, k, t: each(x, t).sum() + t.map(np.square)),
    "number that is no power": ("unknown", "at batch 2", lambda x, m, w, k, t: each(x, t).sum() / (x.shape[0] - 0.5)),
    "first sample": ("unknown", "out of the batch", lambda x, m, w, k, t: each(x.cut(0, 0, 1), t).mean()),
    "place of a sample": ("unknown", "places", lambda x, m, w, k, t: (each(x, t).mean(1) * x.places()).mean()),
    "other samples": ("unknown", "places", lambda x, m, w, k, t: each(x, t).pick(k.map(lambda a: a * 0.0)).mean()),
}  # fmt: skip


@pytest.mark.parametrize("name", DECOMPOSES)
def test_a_loss_that_decomposes_is_put_together_from_microbatches(name: str) -> None:
    reduction, loss = DECOMPOSES[name]
    verdict, traced = read(loss, batch())
    assert verdict.finding is None, verdict.finding
    assert verdict.reduction == reduction
    assert traced > 4
    for sizes in SPLITS:
        for parameter in (0.4, -1.3):
            whole = float(run(loss, batch(), parameter)[1].array)
            found = put_together(verdict, loss, batch(), sizes, parameter)
            assert abs(found - whole) <= 1e-9 * abs(whole), (sizes, found, whole)


@pytest.mark.parametrize("name", DOES_NOT)
def test_a_loss_that_does_not_is_named(name: str) -> None:
    kind, said, loss = DOES_NOT[name]
    verdict, _ = read(loss, batch())
    assert verdict.finding is not None
    assert (verdict.finding.kind, verdict.combinations) == (kind, ())
    assert said in verdict.finding.reason


def test_counts_that_differ_are_refused_in_the_batch_where_they_do() -> None:
    def loss(x: Traced, m: Traced, w: Traced, k: Traced, t: Traced) -> Traced:
        return (each(x, t) * m).sum() / m.sum() + each(x, t).mean()

    verdict, _ = read(loss, batch())
    assert verdict.finding is None
    assert verdict.reduction == "mean and weighted mean"
    with pytest.raises(ShardwrightError, match="a mean and a weighted mean whose counts differ: microbatch 0"):
        put_together(verdict, loss, batch(), (3, 4), 0.4)
    full = {**batch(), "m": np.ones((7, 4))}
    whole = float(run(loss, full, 0.4)[1].array)
    assert abs(put_together(verdict, loss, full, (3, 4), 0.4) - whole) <= 1e-9 * abs(whole)


def test_a_guard_that_acts_in_one_microbatch_does_not_go_with_a_penalty() -> None:
    def loss(x: Traced, m: Traced, w: Traced, k: Traced, t: Traced) -> Traced:
        return (each(x, t) * m).sum() / m.sum().at_least(5.0) + t.map(np.square)

    verdict, _ = read(loss, batch())
    with pytest.raises(ShardwrightError, match="does not depend on the samples, and the shares"):
        put_together(verdict, loss, batch(), (1, 2, 2, 2), 0.4)


def test_microbatches_without_anything_to_count_have_no_share() -> None:
    _, loss = DECOMPOSES["masked mean, at least 5"]
    empty = batch()
    empty["m"][:3] = 0.0
    verdict, _ = read(loss, batch())
    whole = float(run(loss, empty, 0.4)[1].array)
    assert abs(put_together(verdict, loss, empty, (3, 4), 0.4) - whole) <= 1e-9 * abs(whole)
    empty["m"][:] = 0.0
    with pytest.raises(ShardwrightError, match="nothing to take the mean of"):
        put_together(read(DECOMPOSES["masked mean"][1], batch())[0], DECOMPOSES["masked mean"][1], empty, (3, 4), 0.4)


# Random losses ------------------------------------------------------------------------------------------------------

ENTRIES = st.recursive(
    st.sampled_from(["x", "m", "w"]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["tanh", "square", "negative", "times t", "half", "detach"]), inner),
        st.tuples(st.sampled_from(["add", "multiply", "where", "over"]), inner, inner),
        st.tuples(st.sampled_from(["sum1", "mean1", "max1", "sum", "mean", "max", "at least", "times B"]), inner),
    ),
    max_leaves=7,
)


def build(form: object, given: dict[str, Traced]) -> Traced:
    """A tensor of shape [samples, 4], [samples, 1] or []."""
    if isinstance(form, str):
        return given["w"].reshape(given["w"].shape[0], 1) if form == "w" else given[form]
    assert isinstance(form, tuple)
    name, *rest = form
    first, *others = (build(one, given) for one in rest)
    samples = given["x"].shape[0]
    if name in ("sum1", "mean1", "max1"):
        if not first.shape:
            return first
        made = getattr(first, name[:-1])(1)
        return made.reshape(samples, 1)
    if name in ("sum", "mean", "max"):
        return getattr(first, name)() if first.shape else first
    return {
        "tanh": lambda: first.map(np.tanh),
        "square": lambda: first * first,
        "negative": lambda: first * -1.0,
        "half": lambda: first / 2.0,
        "detach": lambda: first.detach(),
        "times t": lambda: first * given["t"],
        "times B": lambda: first * float(samples),
        "at least": lambda: first.at_least(0.25),
        "add": lambda: first + others[0],
        "multiply": lambda: first * others[0],
        "where": lambda: others[0].where(first, first * 0.5),
        "over": lambda: first / others[0],
    }[name]()  # fmt: skip


RANDOM = (ENTRIES, st.sampled_from(["sum", "mean"]), st.integers(0, 5))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(*RANDOM)
def test_whatever_is_certain_is_right(form: object, last: str, seed: int) -> None:
    """No random loss is said to decompose that does not."""
    compare(form, last, seed)


@pytest.mark.slow
@settings(max_examples=5000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(*RANDOM)
def test_whatever_is_certain_is_right_for_longer(form: object, last: str, seed: int) -> None:
    compare(form, last, seed)


def compare(form: object, last: str, seed: int) -> bool:
    """Whether a random loss was compared: it is said to decompose, and its numbers are finite."""

    def loss(x: Traced, m: Traced, w: Traced, k: Traced, t: Traced) -> Traced:
        made = build(form, {"x": x, "m": m, "w": w, "t": t})
        return getattr(made, last)() if made.shape else made

    given_batch = {**batch(seed), "x": np.abs(batch(seed)["x"]) + 0.1}
    with np.errstate(all="ignore"):
        verdict, _ = read(loss, given_batch)
        if verdict.finding is not None:
            return False
        for sizes in SPLITS:
            whole = float(run(loss, given_batch, 0.6)[1].array)
            parts = [float(run(loss, part(given_batch, i, i + 1), 0.6)[1].array) for i in range(7)]
            if not np.isfinite([whole, *parts]).all():
                return False
            try:
                found = put_together(verdict, loss, given_batch, sizes, 0.6)
            except ShardwrightError:
                return False
            assert abs(found - whole) <= 1e-6 * abs(whole) + 1e-9, (verdict, sizes, found, whole)
    return True
