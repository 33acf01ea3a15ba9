"""The names of ``smdistributed.modelparallel.torch``, version 1.x, and what becomes of each here.

The list is drawn from its public API pages by hand. A name that it lacks is refused as an unknown one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.compat.meanings import MEANS
from shardwright.core.errors import nearest

State = Literal["same", "other", "refused"]


@dataclass(frozen=True, slots=True)
class Name:
    """A name of SageMaker's library, with its module where it is in one.

    Attributes:
        state: "same": it does what it did; "other": it does, but for what ``says``; "refused": it is an error that says
            why, and what to do.
        says: what differs, or what to do.
    """

    name: str
    state: State
    says: str = ""


def _same(*names: str) -> tuple[Name, ...]:
    return tuple(Name(name, "same") for name in names)


NAMES: tuple[Name, ...] = (
    Name(
        "init", "other",
        "keys that theirs has and this library does not act on are named by a warning or an error; without a "
        "configuration it takes that of SM_HP_MP_PARAMETERS; a second call begins anew, where no model was wrapped yet",
    ),
    *_same("is_initialized"),
    Name(
        "step", "other",
        "its Python runs once for each form of its arguments, not once for each microbatch, but where it reads values "
        "(.item()): then the step runs by messages. Where ranks of a tensor axis have batches of their own a "
        "training step runs on the samples of all of them: a rank gets what is returned for its own samples, and "
        "losses and counts of all. "
        "detach_outputs=False has no effect, which a warning says: the backward pass has run within the step",
    ),
    *_same("StepOutput", "StepOutput.outputs", "StepOutput.concat", "StepOutput.stack"),
    Name(
        "StepOutput.reduce_mean", "other",
        "a loss counts by the share of its microbatch in the batch, where microbatches differ; all_reduce_mean() is "
        "that over all replicas",
    ),
    Name("StepOutput.reduce_sum", "other", "all_reduce_sum() is that over all replicas"),
    Name(
        "DistributedModel", "other",
        "a process may have several; original weights and names stay; arguments about tracing, buckets and overlap "
        "have no effect, which a warning says; broadcast_buffers=False of a model with buffers is refused over several "
        "replicas, which have the same buffers here; "
        "average_grads_across_microbatches=False beside a tensor axis whose ranks have batches of their own takes "
        "losses that are means or sums over samples",
    ),
    Name(
        "DistributedModel.backward", "other",
        "gradients are those of the whole batch: how a loss relates to its samples is told from its code, or by "
        "weight= and reduction=",
    ),
    *_same(
        *(
            f"DistributedModel.{name}"
            for name in (
                "partitioned", "get_module", "local_parameters", "local_named_parameters", "local_buffers",
                "local_named_buffers", "register_post_partition_hook", "register_comm_hook",
                "distributed_modules", "is_distributed_parameter",
            )
        )
    ),
    *(
        Name(f"DistributedModel.{name}", "other", "modules with parameters or buffers of their own, by original names")
        for name in ("local_modules", "local_named_modules")
    ),
    Name("DistributedModel.local_state_dict", "other", "loads under the same plan; state_dict() under any"),
    Name("DistributedModel.state_dict", "other", "original names; rank0_only=True gathers on rank 0"),
    Name("DistributedModel.load_state_dict", "other", "a whole one under any plan"),
    *(
        Name(
            f"DistributedModel.{name}", "other",
            "on a tensor axis every rank computes with the batches of all: so with all parameters",
        )
        for name in (
            "is_scaled_batch_parameter", "default_reducer_named_parameters", "scaled_batch_reducer_named_parameters",
        )
    ),
    Name(
        "DistributedModel.join", "other",
        "as under throw_on_early_termination=True: replicas that run different numbers of steps are an error on all "
        "ranks. A step of a pipeline takes every rank of a replica, and an idle one would have to run all of them: "
        "sampler gives every replica as many samples, and the last batch may be smaller",
    ),
    Name(
        "DistributedModel.cpu", "other",
        "on CPUs it changes nothing; over several other devices it is refused, as what runs there is a part of a "
        "split model: take state_dict(), which is whole and on the CPU",
    ),
    *_same("DistributedOptimizer", "DistributedOptimizer.step", "DistributedOptimizer.overflow"),
    *_same("DistributedOptimizer.loss_scale", "DistributedOptimizer.local_state_dict"),
    Name("DistributedOptimizer.state_dict", "other", "whole, by original names, under any plan"),
    Name("DistributedOptimizer.load_state_dict", "other", "of a plain optimizer of the unsplit model too"),
    Name("DistributedOptimizer.clip_master_grads", "other", "the norm is that of the unsplit model's gradients"),
    *_same(
        "rank", "size", "local_rank", "local_size", "mp_rank", "mp_size", "dp_rank", "dp_size", "tp_rank", "tp_size",
        "pp_rank", "pp_size", "rdp_rank", "rdp_size",
        "get_world_process_group", "get_mp_process_group", "get_dp_process_group", "get_tp_process_group",
        "get_pp_process_group", "get_rdp_process_group",
        "get_mp_group", "get_dp_group", "get_tp_group", "get_pp_group", "get_rdp_group",
        "CommGroup", "RankType", "WORLD", "MP_GROUP", "DP_GROUP", "TP_GROUP", "PP_GROUP", "RDP_GROUP",
        "WORLD_RANK", "MP_RANK", "DP_RANK", "TP_RANK", "PP_RANK", "RDP_RANK",
        "barrier", "mp_barrier", "dp_barrier",
    ),
    *(
        Name(name, "other", "objects are tensors, numbers, texts and their containers: nothing is pickled")
        for name in ("broadcast", "send", "recv_from", "allgather")
    ),
    *(
        Name(
            name, "other",
            "original modules are divided, with their names; settings of their own distributed modules have no effect, "
            "which a warning says, or are refused where they would change numbers",
        )
        for name in ("tensor_parallelism", "set_tensor_parallelism")
    ),
    *(
        Name(
            name, "other",
            "a distributed module with parameters of the same names and shapes takes over the values, so that state "
            "dicts stay; one with others is refused",
        )
        for name in ("tp_register", "tp_register_with_module")
    ),
    *_same("delay_param_initialization", "checkpoint"),
    *(
        Name(name, "other", "strategies of groups recompute each module by itself, which a warning says")
        for name in ("set_activation_checkpointing", "checkpoint_sequential")
    ),
    Name(
        "model_creation", "other",
        "settings of their own distributed modules have no effect, which a warning says, or are refused where they "
        "would change numbers",
    ),
    Name(
        "save", "other",
        "what torch.load(weights_only=True) reads, and objects with to_dict() as that dict, which a warning says",
    ),
    Name("load", "other", "partial files of stages load under any partition"),
    Name(
        "save_checkpoint", "other",
        "full ones have the optimizer too; safetensors and JSON, nothing is pickled: objects with to_dict() are saved "
        "as that dict, which a warning says",
    ),
    Name(
        "resume_from_checkpoint", "other",
        "under any partition; translate_function has no effect, as names are the model's own",
    ),
    *(
        Name(
            name, "other",
            "under auto_partition=False; otherwise it has no effect, which a warning says. Modules run where they are "
            "placed: as a recorded pipeline where that makes a row of stages, else by messages",
        )
        for name in ("partition", "set_partition")
    ),
    *_same("amp.GradScaler", "state.cfg", "state.module_manager", "model.DistributedModel"),
    Name("nn.FusedLayerNorm", "other", "torch's own LayerNorm, which is fused where units are compiled"),
    *(
        Name(
            name, "other",
            "an ordinary module with whole parameters, which the planner divides as any other; the residual connection "
            "is there under post_layernorm=False too; " + more,
        )
        for name, more in (
            ("nn.DistributedAttentionLayer", "add_residual=False leaves it out"),
            (
                "nn.DistributedTransformerOutputLayer",
                "add_residual=False leaves it out; fp32_residual_addition=True is refused",
            ),
            ("nn.DistributedTransformerLayer", "use_alibi=True takes no kernel of its own"),
            ("nn.DistributedTransformer", "use_alibi=True takes no kernel of its own"),
            (
                "nn.DistributedTransformerLMHead",
                "then a layer norm follows the last layer; with labels it returns the loss and the logits",
            ),
        )
    ),
    *(
        Name(name, "other", "torch's module, with a whole parameter, which the planner divides as it divides any")
        for name in ("nn.DistributedLinear", "nn.DistributedEmbedding")
    ),
    Name(
        "nn.FlashAttentionLayer", "other",
        "torch's scaled dot-product attention, on any device and in any dtype; triton_flash_attention=True takes no "
        "other kernel, and needs attention_dropout_prob=0",
    ),
    *_same("nn.DistributedModule"),
    *(
        Name(
            f"nn.huggingface.{name}", "other",
            "models made of Hugging Face's classes keep their names, and translating to those names leaves them; "
            "max_seq_len has no effect; nn.huggingface.distributed_form(model) makes the distributed form",
        )
        for name in ("gpt2", "bert", "roberta", "gptj", "gptneo", "gptneox")
    ),
    Name("is_tracing", "other", "whether the body of a step runs on stand-ins, to be recorded"),
    *(
        Name(
            name, "other",
            "NVIDIA's arguments, by torch's own operations, on any device; norms are those of whole parameters under "
            "any split; refused under offload_states",
        )
        for name in ("optimizers.FusedLAMB", "optimizers.FusedNovoGrad")
    ),
)  # fmt: skip
BY_NAME = {one.name: one for one in NAMES}


def refused(name: str) -> AttributeError:
    """The error for a name that is refused, or that SageMaker's library does not have."""
    known = BY_NAME.get(name)
    why = known.says if known is not None else nearest(name, BY_NAME)
    return AttributeError(f"smdistributed.modelparallel.torch.{name}: {why}")


def table(names: Sequence[Name] = NAMES, means: Mapping[str, str] = MEANS) -> str:
    """Names as a table in Markdown."""
    said = {"same": "the same", "other": "here, with a difference", "refused": "refused by name"}
    lines = ["| name | meaning | state | what differs, or why |", "|---|---|---|---|"]
    lines += [f"| `{one.name}` | {means[one.name]} | {said[one.state]} | {one.says} |" for one in names]
    return "\n".join(lines) + "\n"
