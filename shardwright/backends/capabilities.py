"""The capabilities and the memory traits of each framework's runtime of this version. Importing this loads no
framework.

Plans are made for twins: unless a request names frameworks, the search chooses nothing that one of these lacks.
"""

from shardwright.core.capabilities import Capabilities, MemoryTraits
from shardwright.core.execution import SYSTEMS

TORCH = Capabilities(
    framework="torch",
    axes=("pp", "dp", "tp"),
    split_backward=True,
    uneven_shards=False,
    partial_layouts=True,
    block_layouts=True,
    point_to_point=True,
    single_controller=False,
    reduce_ops=("sum", "avg", "max", "min", "prod"),
    sequence_parallel=True,
    exchanges_as_planned=True,
    fp8=True,
    fp8_by_module=True,
    # The products of attention cannot be told from the rest of a unit that is replayed.
    recomputes=("none", "elementwise", "alternate", "products", "full"),
    mixes_recompute=True,
    offload=True,
    states_on_host=("optimizer", "parameters"),
    recomputes_in_halves=True,
)
TORCH_MEMORY = MemoryTraits(
    gradients_when_made=True,
    bucket_bytes=25 * 2**20,  # as torch's DistributedDataParallel has it
    bucket_bytes_on_cpu=2**23,  # few sums: each wakes threads of Gloo's, on the cores that compute
    replicas_norm_apart=True,
    gathers_units=True,
    gradients_in_fp32=True,
    slices_draw_whole=True,
    added_from_entries=1 << 18,  # `torch.memory.weight_gradients.LARGE`
    updates_make_values=True,  # torch's defaults: a loop on CPUs, `foreach` elsewhere
)
TORCH_EXECUTION = SYSTEMS["torch"]
JAX_EXECUTION = SYSTEMS["jax"]
JAX = Capabilities(
    framework="jax",
    axes=("pp", "dp", "tp"),
    split_backward=True,
    uneven_shards=False,  # a NamedSharding of a jit argument cuts evenly
    partial_layouts=True,  # inside a jit the compiler keeps partial sums until they are needed
    block_layouts=True,  # a PartitionSpec splits a dim as one piece: the compiler moves the parts of a fused one
    point_to_point=True,
    single_controller=True,
    reduce_ops=("sum", "max", "min"),
    fp8=True,
    recomputes=("none", "selective", "elementwise", "full"),
    mixes_recompute=True,
    offload=True,
    recomputes_in_halves=True,
    hosts_are_alike=True,
    not_in_slices=("windows", "experts", "sinks"),
)
JAX_MEMORY = MemoryTraits(
    ties_have_one_home=True,
    stages_are_programs=True,
    adds_in_turn_on_cpu=True,
    gradients_in_fp32=True,
)
