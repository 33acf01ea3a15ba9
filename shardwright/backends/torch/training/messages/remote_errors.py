"""Errors that happen on one rank and are told on every one."""

import pickle
import traceback
from dataclasses import dataclass
from typing import Any

from shardwright.core.errors import ShardwrightError


class StepFailedError(ShardwrightError, RuntimeError):
    """A module or the step body failed on some rank. The message gives the module, rank, microbatch and the traceback
    there."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The part of an error that travels.

    Attributes:
        error: the exception itself where it can be pickled.
        lost: whether a peer is gone, so that no later step can be run.
    """

    text: str
    error: bytes | None = None
    lost: bool = False


def note_place(error: BaseException, place: str) -> None:
    """Remember the innermost place where an error happened: ``module 'layers.3'``."""
    if not hasattr(error, "_shardwright_place"):
        error._shardwright_place = place  # type: ignore[attr-defined]


def describe(error: BaseException, who: str, microbatch: int) -> Failure:
    """An error as it is told to the other ranks."""
    told = getattr(error, "_shardwright_text", None)
    if told is None:
        where = getattr(error, "_shardwright_place", "the step body")
        trace = "".join(traceback.format_exception(error))
        told = f"{where} failed on {who}, microbatch {microbatch}: {type(error).__name__}: {error}\n{trace}"
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # whatever a class of the user's does on its way
        data = None
    return Failure(told, data)


def again(failure: Failure) -> BaseException:
    """The error of another rank, to be raised here: the same exception where it could be pickled."""
    error: Any = StepFailedError(failure.text) if failure.error is None else pickle.loads(failure.error)
    error._shardwright_text = failure.text
    return error  # type: ignore[no-any-return]
