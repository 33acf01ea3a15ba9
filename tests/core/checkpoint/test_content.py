"""Values beside the tensors of a checkpoint."""

import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.core.checkpoint.content import decoded, encoded
from shardwright.core.errors import CheckpointError

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False) | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.dictionaries(KEYS, inside, max_size=3)
        | st.tuples(inside, inside)
        | st.sets(st.integers(), max_size=3)
        | st.dictionaries(st.integers(), st.integers(), max_size=3).map(Counter)
        | st.dictionaries(st.text(), inside, max_size=3).map(OrderedDict)
    ),
    max_leaves=12,
)


def none(value: Any, path: str) -> None:
    return None


def refused(name: str) -> Any:
    raise AssertionError(name)


def typed(value: Any) -> Any:
    """The value with the classes of all that it holds: 1, True and 1.0 are equal otherwise."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(held)) for key, held in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(held) for held in value]
    return type(value), value if isinstance(value, set) else repr(value)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    import json

    found = decoded(json.loads(json.dumps(encoded(value, none, "value"), allow_nan=False)), refused)
    assert found == value
    assert typed(found) == typed(value)


def test_numbers_that_are_not_finite_and_numbers_of_numpy() -> None:
    assert math.isnan(decoded(encoded(math.nan, none, ""), refused))
    assert decoded(encoded([math.inf, -math.inf], none, ""), refused) == [math.inf, -math.inf]
    assert encoded([np.float64(0.1), np.int64(3), np.bool_(True)], none, "") == [0.1, 3, True]
    with pytest.raises(CheckpointError, match="half of a character"):
        encoded("\ud800", none, "user_content")
    assert encoded({"/" * 100: 1}, none, "") == {"/" * 100: 1}


def test_a_tensor_is_named() -> None:
    leaf = object()
    written = encoded({"a": [leaf]}, lambda value, path: "user/0" if value is leaf else None, "user_content")
    assert written == {"a": [{"$tensor": "user/0"}]}
    assert decoded(written, lambda name: f"<{name}>") == {"a": ["<user/0>"]}


def test_what_only_a_pickle_holds_is_refused_by_its_place() -> None:
    with pytest.raises(CheckpointError, match=r"user_content/b/1 is of class builtins.object, which only a pickle"):
        encoded({"b": [1, object()]}, none, "user_content")
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    with pytest.raises(CheckpointError, match="more than 64 levels"):
        encoded(deep, none, "user_content")


@pytest.mark.parametrize("spoilt", [{"$what": 1}, {"$float": []}, {"$bytes": "?"}, {"$tuple": 3}, {"$dict": [[1]]}])
def test_other_json_is_refused(spoilt: Any) -> None:
    with pytest.raises(CheckpointError, match="holds a value"):
        decoded(spoilt, refused)
