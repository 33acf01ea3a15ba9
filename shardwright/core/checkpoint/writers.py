"""Who writes what several ranks hold: one of them, so that all write about as many bytes."""

from collections.abc import Mapping


def writers(sizes_bytes: Mapping[str, int], copies: int) -> dict[str, int]:
    """The copy, of so many that all hold every tensor, that writes each: the largest first, each by the copy that has
    the fewest bytes to write by then (Graham, 1969). Every rank that holds them finds the same."""
    filled, found = [0] * copies, {}
    for name in sorted(sizes_bytes, key=lambda one: (-sizes_bytes[one], one)):
        copy = min(range(copies), key=lambda number: filled[number])
        filled[copy] += sizes_bytes[name]
        found[name] = copy
    return found
