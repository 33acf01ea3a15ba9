"""``smp.DistributedModel``, with SageMaker's order of arguments, its partial state dicts, and the names that its own
modules have in scripts that walk a model of Hugging Face's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import shardwright.torch as _torch
from shardwright.backends.torch.capture.tensor_parallel_marks import is_marked
from shardwright.backends.torch.loss.shares import OF_RANKS, OF_REPLICAS

PARTIAL = "_smp_is_partial"
"""The key of state dicts that are one rank's part."""
_ORDER = (
    "trace_device", "trace_execution_times", "trace_memory_usage", "overlapping_allreduce", "backward_passes_per_step",
    "average_grads_across_microbatches", "bucket_cap_mb", "broadcast_buffers", "gradient_as_bucket_view",
)  # fmt: skip


class DistributedModel(_torch.DistributedModel):
    """As `shardwright.torch.DistributedModel`.

    Under marks of the tensor axis SageMaker replaces models of Hugging Face's by its own modules; here they stay what
    they are, and their parts have those modules' names too: ``transformer.seq_layers``, and of each layer
    ``attention`` and ``output``. SageMaker has wrappers of its own around the module, so that scripts reach it by
    ``model.module.module``, in 16 bits once more: the module is found there, however often.

    Args:
        module: the model.
        sagemaker: its arguments in SageMaker's order, from ``trace_device`` on.
        more: the same by name, and those of `shardwright.torch.DistributedModel`.
    """

    def __init__(self, module: nn.Module, *sagemaker: Any, **more: Any) -> None:
        if len(sagemaker) > len(_ORDER):
            raise TypeError(f"DistributedModel takes {len(_ORDER)} arguments behind the module, given {len(sagemaker)}")
        by_place = dict(zip(_ORDER, sagemaker, strict=False))
        if twice := by_place.keys() & more.keys():
            raise TypeError(f"DistributedModel was given {min(twice)} twice, by its place and by its name")
        if isinstance(module, nn.Module) and is_marked(module):
            name_parts(module)
        if isinstance(module, nn.Module) and not hasattr(module, "module"):
            vars(module)["module"] = module
        if isinstance(weights := more.get("weights"), Mapping) and isinstance(module, nn.Module):
            more["weights"] = _with_own_names(module, weights)
        super().__init__(module, **by_place, **more)

    def _sum(self) -> str:
        """SageMaker's: over microbatches a sum, over the ranks that have batches of their own the mean."""
        config = self.session.config
        return OF_REPLICAS if config.prescaled_batch or config.tensor_parallel_degree == 1 else OF_RANKS

    def local_state_dict(self) -> dict[str, Any]:
        """The part of the state dict that this rank holds, with SageMaker's mark that it is a part."""
        return {**super().local_state_dict(), PARTIAL: True}

    def state_dict(self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any) -> Any:
        """As `shardwright.torch.DistributedModel.state_dict`; a script of AWS's has another name for ``rank0_only``."""
        return super().state_dict(*args, **({"rank0_only": True} if gather_to_rank0 else {}), **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As `shardwright.torch.DistributedModel.load_state_dict`, of state dicts with that mark too, and with names
        of SageMaker's modules, under which its runs with a tensor axis saved models of Hugging Face's."""
        plain = {key: value for key, value in state_dict.items() if key != PARTIAL}
        return super().load_state_dict(_with_own_names(self.module, plain), strict, assign)


def _with_own_names(module: nn.Module, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict with the names of a class of Hugging Face's, where the module is of one and the state dict has those
    of SageMaker's modules. Raises ShardwrightError where a name among them is unknown."""
    from shardwright.compat.nn.huggingface.forms import FAMILIES  # which are made of modules of this interface

    family = FAMILIES.get(getattr(getattr(module, "config", None), "model_type", ""))
    if family is None or not family.translation.has_smdistributed_names(state):
        return state
    own = dict.fromkeys((name for name, _ in module.named_parameters()), torch.empty(0))
    return state if family.translation.has_smdistributed_names(own) else family.translation.to_hugging_face(state)


def name_parts(model: nn.Module) -> None:
    """Give the parts of a model of Hugging Face's for text the names, beside their own, that SageMaker's modules have.
    State dicts and lists of modules stay as they are."""
    for around, layers, attention, output in _PARTS:
        holder = model if around == "" else getattr(model, around, None)
        blocks = getattr(holder, layers, None)
        if not isinstance(holder, nn.Module) or not isinstance(blocks, nn.ModuleList):
            continue
        vars(holder).setdefault("seq_layers", blocks)
        if holder is not model and not hasattr(model, "transformer"):
            vars(model)["transformer"] = holder
        for block in blocks:
            for name, own in (("attention", attention), ("output", output)):
                if not hasattr(block, name) and isinstance(getattr(block, own, None), nn.Module):
                    vars(block)[name] = getattr(block, own)
        return


_PARTS = (
    ("transformer", "h", "attn", "mlp"), ("gpt_neox", "layers", "attention", "mlp"), ("", "h", "attn", "mlp"),
    ("", "layers", "attention", "mlp"),
)  # fmt: skip
"""Of models of GPT's families: the module around the layers, the layers, and of each its attention and the rest."""
