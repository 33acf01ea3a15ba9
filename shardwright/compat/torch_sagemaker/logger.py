"""``torch.sagemaker.logger``, which AWS's scripts take."""

import logging


def get_logger() -> logging.Logger:
    """The logger of this library."""
    return logging.getLogger("shardwright")
