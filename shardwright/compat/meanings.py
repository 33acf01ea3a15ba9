"""What each of SageMaker's names means, for the tables of `docs/sagemaker.md`."""

_AXES = {
    "mp": "the model-parallel group: ranks that hold one replica",
    "dp": "the data-parallel group: ranks that take different batches",
    "tp": "the tensor-parallel group",
    "pp": "the pipeline group",
    "rdp": "the group of ranks that hold the same part of the model",
}


def _places() -> dict[str, str]:
    found = {
        "rank": "number of this process among all", "size": "number of processes",
        "local_rank": "number of this process on its node", "local_size": "number of processes on this node",
        "get_world_process_group": "torch's process group of all ranks",
        "WORLD": "all ranks, for messages", "WORLD_RANK": "says that a number is a rank among all",
    }  # fmt: skip
    for axis, group in _AXES.items():
        found[f"{axis}_rank"] = f"number of this process in {group}"
        found[f"{axis}_size"] = f"size of {group}"
        found[f"get_{axis}_process_group"] = f"torch's process group: {group}"
        found[f"get_{axis}_group"] = f"list of ranks: {group}"
        found[f"{axis.upper()}_GROUP"] = f"{group}, for messages"
        found[f"{axis.upper()}_RANK"] = f"says that a number is a rank in {group}"
    return found


MEANS: dict[str, str] = {
    "init": "starts the library with a configuration",
    "is_initialized": "whether `init` was called",
    "is_tracing": "whether the model is being traced",
    "step": "decorates the function that is run for each microbatch",
    "StepOutput": "what a step returns in the place of a tensor",
    "StepOutput.outputs": "list of the values of all microbatches",
    "StepOutput.reduce_mean": "mean over the microbatches",
    "StepOutput.reduce_sum": "sum over the microbatches",
    "StepOutput.concat": "the values joined along the first dim",
    "StepOutput.stack": "the values along a new first dim",
    "DistributedModel": "wraps the model that is to be split",
    "DistributedModel.backward": "backward pass of a microbatch, as `torch.autograd.backward(tensors, grad_tensors)`",
    "DistributedModel.partitioned": "whether the model is split by now",
    "DistributedModel.get_module": "the module that was wrapped",
    "DistributedModel.local_parameters": "parameters that this rank holds",
    "DistributedModel.local_named_parameters": "the same, with names",
    "DistributedModel.local_buffers": "buffers that this rank holds",
    "DistributedModel.local_named_buffers": "the same, with names",
    "DistributedModel.local_modules": "modules that this rank holds",
    "DistributedModel.local_named_modules": "the same, with names",
    "DistributedModel.local_state_dict": "the part of the state dict that this rank holds, marked `_smp_is_partial`",
    "DistributedModel.state_dict": "the whole state dict, on every rank",
    "DistributedModel.load_state_dict": "loads a whole state dict, or this rank's part",
    "DistributedModel.register_post_partition_hook": "a function to be called when the model has been split",
    "DistributedModel.register_comm_hook": "a function that exchanges gradients, as that of `DistributedDataParallel`",
    "DistributedModel.join": "context for replicas that run different numbers of steps",
    "DistributedModel.cpu": "moves the parts to the CPU",
    "DistributedModel.distributed_modules": "modules that are divided over the tensor axis",
    "DistributedModel.is_distributed_parameter": "whether a parameter is divided over the tensor axis",
    "DistributedModel.is_scaled_batch_parameter": (
        "whether a parameter is used on the batches of all ranks of the tensor axis"
    ),
    "DistributedModel.default_reducer_named_parameters": (
        "parameters whose gradients are summed over the data-parallel group"
    ),
    "DistributedModel.scaled_batch_reducer_named_parameters": (
        "parameters whose gradients are summed over the ranks that hold the same part"
    ),
    "DistributedOptimizer": "wraps the optimizer; loss scales under `fp16`",
    "DistributedOptimizer.state_dict": "states of the optimizer",
    "DistributedOptimizer.load_state_dict": "loads them",
    "DistributedOptimizer.local_state_dict": "states of the parameters that this rank holds",
    "DistributedOptimizer.step": "updates the parameters",
    "DistributedOptimizer.clip_master_grads": "clips gradients by their norm, and returns it",
    "DistributedOptimizer.overflow": "whether the last step was skipped for gradients that overflowed",
    "DistributedOptimizer.loss_scale": "the factor of the loss",
    **_places(),
    "CommGroup": "names of groups",
    "RankType": "names of the groups that a rank may be counted in",
    "barrier": "waits for a group",
    "mp_barrier": "waits for the model-parallel group",
    "dp_barrier": "waits for the data-parallel group",
    "broadcast": "sends an object to all others of a group",
    "send": "sends an object to a rank",
    "recv_from": "receives an object from a rank",
    "allgather": "list of the objects of all ranks of a group",
    "tensor_parallelism": "context in which new modules are divided over the tensor axis",
    "set_tensor_parallelism": "the same of a module that is there",
    "tp_register": "decorates a class of modules, for which a distributed one is taken on the tensor axis",
    "tp_register_with_module": "the same of a class that is there",
    "delay_param_initialization": "context in which modules are made without memory for parameters",
    "model_creation": "context in which a model is made: tensor axis, dtype, memory",
    "checkpoint": "calls a module whose activations are computed again in the backward pass",
    "checkpoint_sequential": "the same of an `nn.Sequential`",
    "set_activation_checkpointing": "the same of a module, whenever it is called",
    "save": "saves an object, each rank its part or one the whole",
    "load": "loads it",
    "save_checkpoint": "saves model, optimizer and what the user adds",
    "resume_from_checkpoint": "loads them",
    "partition": "context in which new modules are placed on a pipeline rank",
    "set_partition": "the same of a module that is there",
    "amp.GradScaler": "scales losses in float16, and skips steps that overflow on any rank",
    "state.cfg": "the configuration of the run",
    "state.module_manager": "their table of modules, of which `transformers` asks for functions that translate names",
    "model.DistributedModel": "the class by its module",
    "nn.FusedLayerNorm": "layer norm in one kernel",
    "nn.DistributedAttentionLayer": "attention with its norm, dropout and residual connection",
    "nn.DistributedTransformerOutputLayer": "two linear layers with norm, dropout and residual connection",
    "nn.DistributedTransformerLayer": "attention, attention to another sequence, and output",
    "nn.DistributedTransformer": "a row of transformer layers",
    "nn.DistributedTransformerLMHead": "embeddings, transformer and the head of a language model",
    "nn.DistributedLinear": "linear layer that is divided over the tensor axis",
    "nn.DistributedEmbedding": "table that is divided over the tensor axis",
    "nn.FlashAttentionLayer": "attention of given queries, keys and values by a flash kernel",
    "nn.DistributedModule": "base of the distributed modules",
    **{
        f"nn.huggingface.{family}": f"translates state dicts of {name} to SageMaker's names and back"
        for family, name in {
            "gpt2": "GPT-2", "bert": "BERT", "roberta": "RoBERTa", "gptj": "GPT-J", "gptneo": "GPT-Neo",
            "gptneox": "GPT-NeoX",
        }.items()
    },
    "optimizers.FusedLAMB": "LAMB",
    "optimizers.FusedNovoGrad": "NovoGrad",
}  # fmt: skip

MEANS_IN_SECOND: dict[str, str] = {
    "init": "starts the library with a configuration",
    "is_initialized": "whether `init` was called",
    "transform": "makes the model one of the library's",
    **{
        f"state.{name}": meaning
        for name, meaning in {
            "hybrid_shard_degree": "number of ranks that share state", "rank": "number of this process",
            "rep_rank_process_group": "ranks that hold the same shard",
            "tensor_parallel_degree": "degree that was asked for", "tp_size": "size of the tensor axis",
            "tp_rank": "number of this process on it", "tp_process_group": "torch's process group of it",
            "world_size": "number of processes", "world_process_group": "torch's process group of all",
            "expert_parallel_degree": "degree that was asked for",
            "context_parallel_degree": "degree that was asked for",
        }.items()
    },
    "delayed_param.DelayedParamIniter": "makes a model without memory, and gives it values when it is sharded",
    "distributed.checkpoint.state_dict_saver.save": "saves a sharded state dict",
    "distributed.checkpoint.state_dict_saver.async_save": "the same in the background",
    "distributed.checkpoint.state_dict_saver.maybe_finalize_async_calls": "waits for saves in the background",
    "distributed.checkpoint.state_dict_loader.load": "loads a sharded state dict",
    "nn.attn.FlashSelfAttention": "attention of packed queries, keys and values",
    "nn.attn.FlashGroupedQueryAttention": "attention with fewer keys and values than queries",
    "utils.module_utils.empty_module_params": "gives the parameters of a module memory without values",
    "utils.module_utils.move_buffers_to_device": "moves buffers",
    "utils.process_group_utils.get_global_ranks": "ranks of a process group",
    "grad_norm.clip_grad_norm_": "clips gradients by their norm, and returns it",
    "logger.get_logger": "the library's logger",
    "moe.moe_config.MoEConfig": "settings of mixtures of experts",
    "nn.huggingface.llama_flashattn.LlamaFlashAttention": "Llama's attention by a flash kernel",
}  # fmt: skip
