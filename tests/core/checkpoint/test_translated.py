"""Weights and optimizer states under the other framework's names: held against arrays that numpy rearranges."""

import math
from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.name_map import NameMap, families
from shardwright.core.checkpoint.translated import COUNTS, OPTIONS, ROLES, SCHEDULE, STEP, Translated
from shardwright.core.errors import CheckpointError
from tests.comparison import Comparison
from tests.core.checkpoint.saved_arrays import SavedArrays, read

TORCH = {"user": {}, "steps": 7, "ties": {}, "optimizers": [{"steps": 9}]}
JAX = {"user": {}, "steps": 7, ROLES: {"0.mu": "exp_avg", "0.nu": "exp_avg_sq", "0.count": STEP, "2.count": SCHEDULE}}


def array(*shape: int, seed: int = 0) -> NDArray[Any]:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def translated(relations: dict[str, str], arrays: Mapping[str, NDArray[Any]], **more: Any) -> Translated:
    shapes = more.pop("shapes", None)
    labelled = {f"model/{name}": held for name, held in arrays.items()}
    return Translated(SavedArrays("torch", labelled, TORCH), NameMap.of(relations, **more), shapes)


def require(state: Any, expected: Mapping[str, NDArray[Any]]) -> None:
    """Require that a state has these weights and no others."""
    assert sorted(state.names("model")) == sorted(expected)
    comparison = Comparison()
    for name, wanted in expected.items():
        assert state.tensor(f"model/{name}").shape == wanted.shape
        comparison.equal(read(state, f"model/{name}"), wanted)
    comparison.require()


def test_a_linear_layer_is_transposed() -> None:
    weight, bias = array(3, 5), array(3)
    state = translated(
        {"{m...}.weight[out, in]": "{m...}.kernel[in, out]", "{m...}.bias": "{m...}.bias"},
        {"up.proj.weight": weight, "up.proj.bias": bias},
    )
    require(state, {"up.proj.kernel": weight.T, "up.proj.bias": bias})


def test_a_fused_matrix_becomes_one_for_each_part_divided_in_heads() -> None:
    fused = array(8, 3 * 2 * 4)
    state = translated(
        {"qkv.weight[d, (part head size)]": "{part}.kernel[d, head, size]"}, {"qkv.weight": fused},
        values={"part": ["query", "key", "value"]}, sizes={"head": 2},
    )  # fmt: skip
    parts = np.split(fused, 3, axis=1)
    expected = {f"{n}.kernel": p.reshape(8, 2, 4) for n, p in zip(("query", "key", "value"), parts, strict=True)}
    require(state, expected)


def test_heads_that_interleave_are_told_apart() -> None:
    """GPT-NeoX keeps query, key and value of one head beside each other."""
    fused = array(2 * 3 * 4, 8)
    state = translated(
        {"qkv.weight[(head part size), d]": "{part}.kernel[d, head, size]"}, {"qkv.weight": fused},
        values={"part": ["query", "key", "value"]}, sizes={"head": 2},
    )  # fmt: skip
    by_axes = fused.reshape(2, 3, 4, 8)
    names = ("query", "key", "value")
    require(state, {f"{name}.kernel": by_axes[:, n].transpose(2, 0, 1) for n, name in enumerate(names)})


def test_layers_are_stacked_under_a_scan() -> None:
    layers = [array(3, 5, seed=n) for n in range(11)]
    state = translated(
        {"h.{layer}.up.weight[out, in]": "layers.up.kernel[layer, in, out]"},
        {f"h.{n}.up.weight": layer for n, layer in enumerate(layers)},
    )
    require(state, {"layers.up.kernel": np.stack([layer.T for layer in layers])})


def test_a_convolution_and_a_lookup_keep_their_own_dims() -> None:
    kernel, table = array(7, 3, 2, 5), array(11, 4)
    state = translated(
        {
            "conv.weight[out, in, height, width]": "conv.kernel[height, width, in, out]",
            "table.weight": "table.embedding",
        },
        {"conv.weight": kernel, "table.weight": table},
    )
    require(state, {"conv.kernel": kernel.transpose(2, 3, 1, 0), "table.embedding": table})


AXES = "abcdef"


@given(st.data())
def test_any_box_of_any_rearrangement_is_what_numpy_makes(data: Any) -> None:
    """Axes in any order, in groups, some of them parts of names: any box, in both directions."""
    axes = list(AXES[: data.draw(st.integers(1, 5))])
    size = {axis: data.draw(st.integers(1, 3)) for axis in axes}
    in_names = [data.draw(st.sets(st.sampled_from(axes), max_size=2)) for _ in range(2)]
    sides = []
    for names in in_names:
        order = data.draw(st.permutations([axis for axis in axes if axis not in names]))
        cuts = data.draw(st.sets(st.integers(1, max(1, len(order) - 1)), max_size=3))
        ends = [0, *sorted(cut for cut in cuts if cut < len(order)), len(order)]
        dims = [order[a:b] for a, b in pairwise(ends)] if order else []
        sides.append(("w" + "".join(f".{{{axis}}}" for axis in sorted(names)), dims))
    whole = array(*(size[axis] for axis in axes))

    def written(side: tuple[str, list[Any]]) -> str:
        name, dims = side
        return f"{name}[{', '.join('(' + ' '.join(group) + ')' for group in dims)}]"

    def tensors(side: tuple[str, list[Any]]) -> dict[str, NDArray[Any]]:
        name, dims = side
        names = [axis for axis in axes if f"{{{axis}}}" in name]
        order = [axes.index(axis) for axis in (*names, *(axis for group in dims for axis in group))]
        ordered = whole.transpose(order)
        shape = [math.prod(size[axis] for axis in group) for group in dims]
        return {
            name.format(**dict(zip(names, index, strict=True))): ordered[index].reshape(shape)
            for index in product(*(range(size[axis]) for axis in names))
        }

    both = [tensors(side) for side in sides]
    names = NameMap.of({written(sides[0]): written(sides[1])}, sizes=size)
    labelled = [{f"model/{name}": held for name, held in one.items()} for one in both]
    states = [
        (Translated(SavedArrays("torch", labelled[0], TORCH), names), both[1]),
        (Translated(SavedArrays("jax", labelled[1], JAX), names), both[0]),
    ]
    for state, expected in states:
        require(state, expected)
        for name, wanted in expected.items():
            starts = [data.draw(st.integers(0, n - 1)) for n in wanted.shape]
            box = Box(
                tuple(starts),
                tuple(data.draw(st.integers(1, n - a)) for a, n in zip(starts, wanted.shape, strict=True)),
            )
            found = read(state, f"model/{name}", box)
            Comparison().equal(found, wanted[box.inside(Box.whole(wanted.shape))]).require()


LINEAR = {"{m...}.weight[out, in]": "{m...}.kernel[in, out]"}


def adam(**more: Any) -> SavedArrays:
    arrays = {"model/a.weight": array(3, 5), "model/b.weight": array(2, 3, seed=1)}
    for key in ("exp_avg", "exp_avg_sq"):
        arrays |= {f"optimizer0/{key}/a.weight": array(3, 5, seed=2), f"optimizer0/{key}/b.weight": array(2, 3, seed=3)}
    arrays |= {f"optimizer0/step/{name}.weight": np.array(9, dtype=np.float32) for name in "ab"}
    return SavedArrays("torch", arrays | more, TORCH)


def test_moments_follow_their_weights_and_counts_are_one() -> None:
    source = adam()
    state = Translated(source, NameMap.of(LINEAR))
    state.require_states()
    assert (state.count(STEP), state.count(SCHEDULE)) == (9, 9)
    assert sorted(state.names("optimizer0")) == sorted(
        f"{key}/{name}.kernel" for key in ("exp_avg", "exp_avg_sq") for name in "ab"
    )
    wanted = source.arrays["optimizer0/exp_avg/b.weight"].T
    Comparison().equal(read(state, "optimizer0/exp_avg/b.kernel"), wanted).require()
    content = state.content(lambda name: name)
    counts = {STEP: 9, SCHEDULE: 9}
    assert content == {"user": {}, "steps": 7, "keys": None, COUNTS: counts, OPTIONS: [], "samples": 0}


def test_there_and_back_is_the_state_that_it_was() -> None:
    source, names = adam(), NameMap.of(LINEAR)
    back = Translated(Translated(source, names), names)
    assert back.framework == "torch"
    comparison = Comparison()
    for label, wanted in source.arrays.items():
        assert back.has(label), label
        comparison.equal(read(back, label), wanted)
    comparison.require()
    assert sorted(f"optimizer0/{name}" for name in back.names("optimizer0")) == sorted(
        label for label in source.arrays if label.startswith("optimizer0/")
    )


def test_a_tied_weight_is_found_by_any_of_its_names() -> None:
    source = SavedArrays("torch", {"model/wte.weight": array(4, 3)}, TORCH | {"ties": {"head.weight": "wte.weight"}})
    state = Translated(source, NameMap.of({"head.weight": "table"}))
    assert state.names("model") == ["table"]
    first_names = {"wte.weight": "wte.weight", "head.weight": "wte.weight"}
    back = Translated(state, NameMap.of({"head.weight": "table"}), first_names=first_names)
    assert back.names("model") == ["wte.weight"]


def test_what_the_twin_has_not_is_left_out() -> None:
    arrays = {"a.weight": array(3, 5), "a.mask": array(2)}
    state = translated(LINEAR, arrays, torch_only=["{m...}.mask"])
    assert state.names("model") == ["a.kernel"]


def test_the_shape_that_is_wanted_tells_the_size_of_an_axis() -> None:
    weight = array(6, 4)
    relations = {"q.weight[(head size), d]": "q.kernel[d, head, size]"}
    state = translated(relations, {"q.weight": weight}, shapes={"model/q.kernel": (4, 3, 2)})
    require(state, {"q.kernel": weight.reshape(3, 2, 4).transpose(2, 0, 1)})


BAD = {
    "no relation": (LINEAR, {"a.scale": array(3)}, {}, r"no relation for a\.scale .*torch_only"),
    "size unknown": ({"q.weight[(h s), d]": "q.kernel[d, h, s]"}, {"q.weight": array(6, 4)}, {}, "size of 'h'"),
    "size wrong": (
        {"q.weight[(h s), d]": "q.kernel[d, h, s]"}, {"q.weight": array(6, 4)}, {"sizes": {"h": 4, "s": 2}},
        "6 should be h 4, s 2",
    ),
    "dims": (LINEAR, {"a.weight": array(3)}, {}, "of 1 dims"),
    "one name for two": (
        {"{m}.weight": "w", "{m}.bias": "{m}"}, {"a.weight": array(3)}, {}, "axis 'm' is on one side alone",
    ),
    "a layer is missing": (
        {"h.{n}.w[d]": "w[n, d]"}, {"h.0.w": array(3), "h.2.w": array(3)}, {}, "not one for each index of n",
    ),
    "layers unlike": (
        {"h.{n}.w[d]": "w[n, d]"}, {"h.0.w": array(3), "h.1.w": array(4)}, {}, "different shapes",
    ),
    "two become one": (
        {"a.w": "w", "b.w": "w"}, {"a.w": array(3), "b.w": array(3)}, {}, "relates by a.w = w",
    ),
    "a way back to another": (
        {"a.{m...}.w": "{m...}.w", "b.{m...}.w": "b.{m...}.w"}, {"b.x.w": array(3)}, {}, "the more special relation",
    ),
    "an unknown part": (
        {"{n}.w[d]": "w[n, d]"}, {"x.w": array(3)}, {}, "expected a number, or values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_map_that_does_not_fit_is_refused(case: str) -> None:
    relations, arrays, more, said = BAD[case]
    with pytest.raises(CheckpointError, match=said):
        translated(relations, arrays, **more)


def test_states_that_the_other_framework_has_no_word_for_are_refused() -> None:
    state = Translated(adam(**{"optimizer0/ax/a.weight": array(3, 5)}), NameMap.of(LINEAR))
    with pytest.raises(CheckpointError, match=r"ax/a\.weight has no counterpart in jax"):
        state.require_states()


def test_parameters_that_were_updated_unlike_numbers_of_times_are_refused() -> None:
    state = Translated(adam(**{"optimizer0/step/b.weight": np.array(8, dtype=np.float32)}), NameMap.of(LINEAR))
    with pytest.raises(CheckpointError, match="9 and 8 times"):
        state.count()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("relations = 3", "expected"),
        ("[relation]\na = 'b'", "'relation'"),
        ("[relations]\n'a[d' = 'b'", "expected a name"),
        ("[relations]\n'a[d]' = 'b'", "the dims of both sides"),
        ("[relations]\n'a[d e]' = 'b[d, e]'", "'d e' is no dim"),
        ("[relations]\n'a[d, d]' = 'b[d, d]'", "there twice"),
        ("[sizes]\nx = 3\n[relations]\n'a[d]' = 'b[d]'", "no relation has an axis 'x'"),
        ("[sizes]\nd = 0\n[relations]\n'a[d]' = 'b[d]'", "expected a number above 0"),
        ("a = = b", "no TOML"),
    ],
)
def test_a_file_that_is_no_map_is_refused(tmp_path: Any, text: str, said: str) -> None:
    path = tmp_path / "names.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=said):
        NameMap.load(path)


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(CheckpointError, match="did you mean 'gpt2'"):
        NameMap.of_any("gpt3")


@pytest.mark.parametrize("family", families())
def test_every_family_loads(family: str) -> None:
    assert len(NameMap.of_any(family).relations) >= 5
