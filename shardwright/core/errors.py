"""The errors that users see. Every message says what was given, what was expected, and the fix."""

import difflib
from collections.abc import Iterable, Sequence


class ShardwrightError(ValueError):
    """The root of every error that Shardwright raises on user input."""


class CaptureError(ShardwrightError):
    """The model could not be read."""


class LossError(ShardwrightError):
    """The loss of a batch does not follow from those of its microbatches, and nobody has said how it is meant."""


class UnrecordableError(CaptureError):
    """The step cannot be recorded once and replayed, because what the model does depends on the values of tensors.

    Not raised for a step body that reads values itself: that is an error in every mode.
    """


class ClusterError(ShardwrightError):
    """A cluster, mesh or hardware profile is not valid, or not known."""


class LayoutError(ShardwrightError):
    """A placement or a layout does not fit the tensor or the mesh."""


class PlanWarning(UserWarning):
    """A plan does what was asked, and something else would be better."""


class PlanError(ShardwrightError):
    """No plan satisfies the request, or a plan does not match its model or devices."""


class PlanFileError(PlanError):
    """A plan file is malformed or newer than this version; names the path inside the file."""


class CheckpointError(ShardwrightError):
    """A checkpoint that cannot be written or read: not complete, damaged, or of something else."""


class ScheduleError(ShardwrightError):
    """A schedule does not admit the sizes given, or its table is not valid."""


class NonFiniteError(ShardwrightError, ArithmeticError):
    """A loss or a gradient is NaN or infinite; says in which step, stage and microbatch."""


class MissingCapabilityError(ShardwrightError):
    """The backend cannot do what was asked; names the capability."""


class PeerError(ShardwrightError, RuntimeError):
    """A peer failed, died or left, gave no sign of life for the timeout, or waits for something else for good."""


class DisagreementError(ShardwrightError):
    """Ranks of one run differ in what must be the same on all of them, or one failed where the others did not. The
    error is raised on every rank; it names what differs, on which ranks, and the value on each."""


class MissingFrameworkError(ShardwrightError, ImportError):
    """A framework is not installed; names the extra that installs it."""


def nearest(given: str, known: Iterable[str]) -> str:
    """A closing clause for an error about an unknown name: the nearest known name, and all of them."""
    options = sorted(known)
    begun = sorted((option for option in options if given and option.startswith(given)), key=len)
    close = begun[:1] or difflib.get_close_matches(given, options, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(options) if options else 'none'}"


def few(names: Sequence[str]) -> str:
    """The first names of many, in words."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
