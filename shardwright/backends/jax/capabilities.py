"""What the JAX runtime of this version can do."""

from shardwright.core.capabilities import Capabilities

CAPABILITIES = Capabilities(
    framework="jax",
    axes=("pp", "dp", "tp"),
    split_backward=True,
    uneven_shards=False,  # a NamedSharding of a jit argument cuts evenly
    partial_layouts=True,  # inside a jit the compiler keeps partial sums until they are needed
    block_layouts=True,  # a PartitionSpec splits a dim as one piece: the compiler moves the parts of a fused one
    point_to_point=False,
    single_controller=True,
    reduce_ops=("sum", "max", "min"),
)
