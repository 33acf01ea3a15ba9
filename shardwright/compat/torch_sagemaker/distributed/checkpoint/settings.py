"""The arguments of SageMaker's savers that torch's do not have."""

import warnings
from collections.abc import Mapping
from typing import Any

from shardwright.core.errors import MissingCapabilityError, PlanWarning, ShardwrightError, nearest

_OF_S3 = ("s3_region", "s3client_config")


def require_no_effect(name: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse or warn of arguments of SageMaker's that are not their default.

    Raises:
        MissingCapabilityError: what belongs to S3.
        ShardwrightError: an unknown argument; the nearest is named.
    """
    for argument, value in given.items():
        if argument not in (*defaults, *_OF_S3):
            raise ShardwrightError(f"{name} takes no {argument!r}: {nearest(argument, (*defaults, *_OF_S3))}")
        if argument in _OF_S3 and value is not None:
            raise MissingCapabilityError(
                f"{name}({argument}=…): checkpoints are written to folders here; pass a storage_writer or a "
                f"storage_reader for S3, and leave {argument} out"
            )
        if argument in defaults and value != defaults[argument]:
            warnings.warn(f"{name}({argument}=…) has no effect with torch's own writer", PlanWarning, stacklevel=3)
