"""``torch.sagemaker.moe.moe_config``, which is refused where it is used."""

from typing import Any

from shardwright.compat.torch_sagemaker.names import BY_NAME
from shardwright.core.errors import MissingCapabilityError


class MoEConfig:
    """Raises MissingCapabilityError."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise MissingCapabilityError(f"MoEConfig: {BY_NAME['moe.moe_config.MoEConfig'].says}")
