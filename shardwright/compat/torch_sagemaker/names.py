"""The names of SageMaker's second version (``torch.sagemaker``), and what becomes of each here.

The list is drawn from its public reference by hand, and from AWS's public scripts where these take more.
"""

from shardwright.compat.names import Name
from shardwright.core.errors import nearest

NAMES: tuple[Name, ...] = (
    Name("init", "other", "takes keys of shardwright.torch beside its own, such as bf16 and microbatches"),
    Name("is_initialized", "same"),
    Name(
        "transform", "other",
        "under hybrid_shard_degree=0 without a tensor axis the model itself, for the script's own FSDP; else a "
        "DistributedModel, which is sharded already and trains in a step: without FSDP. Weights and names are the "
        "original ones, load_state_dict_from_rank0=False included; config is refused",
    ),
    *(
        Name(f"state.{name}", "same")
        for name in (
            "hybrid_shard_degree", "rank", "rep_rank_process_group", "tensor_parallel_degree", "tp_size", "tp_rank",
            "tp_process_group", "world_size", "world_process_group", "expert_parallel_degree",
            "context_parallel_degree",
        )
    ),
    Name(
        "delayed_param.DelayedParamIniter", "other",
        "its default is the model's _init_weights, or reset_parameters(), which a DistributedModel has taken already",
    ),
    *(
        Name(
            f"distributed.checkpoint.{name}", "other",
            "torch.distributed.checkpoint's; what belongs to S3 is refused, and what steers its own writer has no "
            "effect, which a warning says",
        )
        for name in ("state_dict_saver.save", "state_dict_saver.async_save")
    ),
    Name("distributed.checkpoint.state_dict_saver.maybe_finalize_async_calls", "same"),
    Name(
        "distributed.checkpoint.state_dict_loader.load", "other",
        "torch.distributed.checkpoint's, of what torch.load(weights_only=True) reads; what belongs to S3 is refused",
    ),
    *(
        Name(f"nn.attn.{name}", "other", "torch's scaled dot-product attention, on any device and in any dtype")
        for name in ("FlashSelfAttention", "FlashGroupedQueryAttention")
    ),
    Name("utils.module_utils.empty_module_params", "other", "leaves parameters that are on the device already"),
    Name("utils.module_utils.move_buffers_to_device", "same"),
    Name("utils.process_group_utils.get_global_ranks", "same"),
    Name("grad_norm.clip_grad_norm_", "other", "the norm of the unsplit model's gradients"),
    Name("logger.get_logger", "other", "the logger of this library"),
    Name(
        "moe.moe_config.MoEConfig", "refused",
        "expert parallelism of SageMaker's own experts is not carried out: leave it out; the model's own experts are "
        "divided along the tensor axis",
    ),
    Name(
        "nn.huggingface.llama_flashattn.LlamaFlashAttention", "refused",
        "Llama's own attention takes a flash kernel where there is one: make the model with "
        "attn_implementation='sdpa'",
    ),
)  # fmt: skip
BY_NAME = {one.name: one for one in NAMES}


def refused(name: str) -> AttributeError:
    """The error for a name that SageMaker's second version does not have, or that is refused."""
    known = BY_NAME.get(name)
    return AttributeError(f"torch.sagemaker.{name}: {nearest(name, BY_NAME) if known is None else known.says}")
