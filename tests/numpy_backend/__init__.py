"""A third backend, as another package would bring one: residual networks in NumPy, planned and trained on one rank.

shardwright.backends.registry.register(REGISTRATION)
"""

import sys
from typing import Any

from shardwright.backends.registry import Registration
from shardwright.core.capabilities import Capabilities


def _is_network(model: Any) -> bool:
    own = sys.modules.get("tests.numpy_backend.backend")
    return own is not None and isinstance(model, own.Network)


REGISTRATION = Registration(
    Capabilities(
        framework="numpy", axes=(), split_backward=False, uneven_shards=False, partial_layouts=False,
        block_layouts=False, point_to_point=False, single_controller=True, recomputes=("none",), shard_levels=(0,),
    ),
    module="tests.numpy_backend.backend",
    owns=_is_network,
    models="a Network of NumPy arrays",
    needs=("numpy",),
    levels=("capture", "one rank"),
)  # fmt: skip
