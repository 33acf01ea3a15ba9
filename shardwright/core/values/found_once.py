"""Methods that find each answer once."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

Owner = TypeVar("Owner")
Asked = ParamSpec("Asked")
Found = TypeVar("Found")
_NOT_YET = object()


def found_once(find: Callable[Concatenate[Owner, Asked], Found]) -> Callable[Concatenate[Owner, Asked], Found]:
    """A method that finds its answer once for each value of its arguments, and whose object keeps the answers."""

    name = f"found by {find.__name__}"

    @wraps(find)
    def look_up(self: Owner, /, *args: Asked.args, **named: Asked.kwargs) -> Found:
        known: dict[object, Any] = vars(self).setdefault(name, {})
        key = (args, *named.items()) if named else args
        found = known.get(key, _NOT_YET)  # one look: searches ask hundreds of thousands of times
        if found is _NOT_YET:
            found = known[key] = find(self, *args, **named)
        answer: Found = found
        return answer

    return look_up
