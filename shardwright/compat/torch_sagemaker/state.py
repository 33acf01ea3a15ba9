"""``torch.sagemaker.state``: this rank's places and groups, under the keys of the second version."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwright.compat.torch_sagemaker.keys import BY_KEY, is_native
from shardwright.compat.torch_sagemaker.names import refused
from shardwright.core.errors import ShardwrightError
from shardwright.torch import groups
from shardwright.torch.session import Session, current, is_initialized

_GIVEN = ("hybrid_shard_degree", "tensor_parallel_degree", "expert_parallel_degree", "context_parallel_degree")


class State:
    """What `torch.sagemaker.state` holds once `torch.sagemaker.init` was called. Process groups are None where models
    are left to the script's own FSDP."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._given: Mapping[str, Any] = {}
        self._sharing: ProcessGroup | None = None

    def begin(self, given: Mapping[str, Any]) -> None:
        """Take the keys of a run. Every rank calls this, as groups of ranks are made."""
        self._session, self._given, self._sharing = current(), dict(given), None
        if not is_native(given):
            self._sharing = _group_that_shares(current())

    @property
    def is_native(self) -> bool:
        """Whether models are left to the script's own FSDP."""
        return is_native(self._of_run())

    def __getattr__(self, name: str) -> Any:
        if name in _GIVEN:
            return self._of_run().get(name, BY_KEY[name].default)
        raise refused(f"state.{name}")

    @property
    def rank(self) -> int:
        """This process's rank among all."""
        self._of_run()
        return groups.rank()

    @property
    def world_size(self) -> int:
        """The number of processes."""
        self._of_run()
        return groups.size()

    @property
    def tp_size(self) -> int:
        """The tensor-parallel degree."""
        self._of_run()
        return groups.tp_size()

    @property
    def tp_rank(self) -> int:
        """The coordinate on the tensor axis."""
        self._of_run()
        return groups.tp_rank()

    @property
    def world_process_group(self) -> ProcessGroup:
        """The group of all processes."""
        self._of_run()
        return groups.get_world_process_group()

    @property
    def tp_process_group(self) -> ProcessGroup | None:
        """The group of this rank's peers on the tensor axis."""
        return None if self.is_native else groups.get_tp_process_group()

    @property
    def rep_rank_process_group(self) -> ProcessGroup | None:
        """The group of the ranks that hold one copy of the model's state: those that share it, with their peers on the
        other axes."""
        return None if self.is_native else self._sharing

    def _of_run(self) -> Mapping[str, Any]:
        if not is_initialized() or self._session is not current():
            raise ShardwrightError("torch.sagemaker.state is that of a run: call torch.sagemaker.init() first")
        return self._given


def _group_that_shares(session: Session) -> ProcessGroup | None:
    """The group of the ranks that hold one copy of the state together, with this one. Every rank calls this."""
    mesh, replicas = session.bound.mesh, session.bound.size("dp")
    sharing = session.config.sharing_replicas or 1
    own = None
    for first in range(0, replicas, sharing):
        ranks = [r for r in range(mesh.size) if first <= mesh.coordinates(r)["dp"] < first + sharing]
        group = dist.new_group(ranks) if mesh.size > 1 else dist.group.WORLD
        own = group if session.bound.rank in ranks else own
    return own


state = State()
