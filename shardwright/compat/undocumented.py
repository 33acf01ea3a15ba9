"""Functions of SageMaker's library that its pages do not describe and that public scripts import: refused when called.

AWS's script for BERT imports these three, and calls none.
"""

from typing import Any, NoReturn

from shardwright.core.errors import MissingCapabilityError

__all__ = ["dump_model", "rmsg", "verify"]


def rmsg(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises MissingCapabilityError."""
    raise _refused("rmsg", "print the message, with smp.rank() where it is wanted")


def dump_model(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises MissingCapabilityError."""
    raise _refused("dump_model", "smp.save_checkpoint and model.state_dict() write what a model has")


def verify(*args: Any, **kwargs: Any) -> NoReturn:
    """Raises MissingCapabilityError."""
    raise _refused("verify", "compare model.state_dict() with that of a run on one process")


def _refused(name: str, fix: str) -> MissingCapabilityError:
    return MissingCapabilityError(f"SageMaker's {name} is described nowhere, so it is not carried out: {fix}")
