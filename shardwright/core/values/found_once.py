"""Methods that find each answer once."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Asked = ParamSpec("Asked")
Found = TypeVar("Found")


def found_once(find: Callable[Concatenate[Owner, Asked], Found]) -> Callable[Concatenate[Owner, Asked], Found]:
    """A method that finds its answer once for each value of its arguments, and whose object keeps the answers."""

    @wraps(find)
    def look_up(self: Owner, /, *args: Asked.args, **named: Asked.kwargs) -> Found:
        known: dict[object, Found] = vars(self).setdefault(f"found by {find.__name__}", {})
        key = (args, tuple(named.items()))
        if key not in known:
            known[key] = find(self, *args, **named)
        return known[key]

    return look_up
