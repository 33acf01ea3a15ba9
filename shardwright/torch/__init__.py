"""Training in PyTorch: `import shardwright.torch as sw`.

The names are those of SageMaker's model-parallel library, so that its scripts run by changing the import.
"""

from shardwright.backends.registry import require_framework

require_framework("torch")

from shardwright import (  # noqa: E402
    Cluster,
    Comparison,
    Graph,
    Layout,
    Mesh,
    Partial,
    Plan,
    Replicate,
    Schedule,
    ShardwrightError,
    Split,
    StageCosts,
    Timeline,
    capture,
    compare,
    explain,
    plan,
    simulate,
)
from shardwright.backends.torch.capture.own_checkpoints import set_activation_checkpointing  # noqa: E402
from shardwright.backends.torch.capture.tensor_parallel_marks import set_tensor_parallelism, tensor_parallelism  # noqa: E402
from shardwright.backends.torch.data_parallel.row_gradients import reduce_gradient  # noqa: E402
from shardwright.backends.torch.tensor_parallel.registry import tp_register, tp_register_with_module  # noqa: E402
from shardwright.core.schedule.measured_costs import measured_costs  # noqa: E402
from shardwright.core.schedule.passes import split_backward  # noqa: E402
from shardwright.torch.checkpoints import resume_from_checkpoint, save_checkpoint  # noqa: E402
from shardwright.torch.data import DistributedSampler, sampler  # noqa: E402
from shardwright.torch.model import DistributedModel, delay_param_initialization  # noqa: E402
from shardwright.torch.optimizer import DistributedOptimizer  # noqa: E402
from shardwright.torch.output import StepOutput  # noqa: E402
from shardwright.torch.partial_files import load, save  # noqa: E402
from shardwright.torch.session import (  # noqa: E402
    barrier,
    dp_rank,
    dp_size,
    get_dp_process_group,
    get_pp_process_group,
    get_rdp_process_group,
    get_tp_process_group,
    get_world_process_group,
    init,
    is_initialized,
    local_rank,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    set_seed,
    shutdown,
    size,
    tp_rank,
    tp_size,
)
from shardwright.torch.step import step  # noqa: E402
from shardwright.torch.timelines import record_timeline  # noqa: E402

__all__ = [
    "Cluster",
    "Comparison",
    "DistributedModel",
    "DistributedOptimizer",
    "DistributedSampler",
    "Graph",
    "Layout",
    "Mesh",
    "Partial",
    "Plan",
    "Replicate",
    "Schedule",
    "ShardwrightError",
    "Split",
    "StageCosts",
    "StepOutput",
    "Timeline",
    "barrier",
    "capture",
    "compare",
    "delay_param_initialization",
    "dp_rank",
    "dp_size",
    "explain",
    "get_dp_process_group",
    "get_pp_process_group",
    "get_rdp_process_group",
    "get_tp_process_group",
    "get_world_process_group",
    "init",
    "is_initialized",
    "load",
    "local_rank",
    "measured_costs",
    "plan",
    "pp_rank",
    "pp_size",
    "rank",
    "rdp_rank",
    "rdp_size",
    "record_timeline",
    "reduce_gradient",
    "resume_from_checkpoint",
    "sampler",
    "save",
    "save_checkpoint",
    "set_activation_checkpointing",
    "set_seed",
    "set_tensor_parallelism",
    "shutdown",
    "simulate",
    "size",
    "split_backward",
    "step",
    "tensor_parallelism",
    "tp_rank",
    "tp_register",
    "tp_register_with_module",
    "tp_size",
]
