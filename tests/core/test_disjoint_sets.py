"""Disjoint sets beside those of SciPy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.cluster.hierarchy import DisjointSet

from shardwright.core.values.disjoint_sets import DisjointSets

MEMBERS = st.integers(0, 12)


@given(st.lists(MEMBERS), st.lists(st.tuples(MEMBERS, MEMBERS), max_size=20))
def test_the_sets_are_those_of_scipy(added: list[int], merged: list[tuple[int, int]]) -> None:
    own: DisjointSets[int] = DisjointSets()
    theirs = DisjointSet()
    for member in added:
        own.add(member)
        theirs.add(member)
    for one, other in merged:
        if one in added and other in added:
            own.merge(one, other)
            theirs.merge(one, other)
    assert list(own) == list(dict.fromkeys(added))
    assert len(own) == theirs.n_subsets
    for member in own:
        assert own[member] in theirs.subset(member)
        assert {other for other in own if own[other] == own[member]} == theirs.subset(member)


def test_what_was_never_added_is_in_no_set() -> None:
    sets: DisjointSets[str] = DisjointSets()
    sets.add("a")
    with pytest.raises(KeyError, match="b"):
        sets.merge("a", "b")
