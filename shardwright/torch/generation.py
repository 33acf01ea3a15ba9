"""``model.generate`` of Hugging Face's models, over ranks that hold parts of one."""

import copy
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.state.ownership import is_hollow
from shardwright.core.errors import MissingCapabilityError, ShardwrightError
from shardwright.torch.model import DistributedModel, of_one_model
from shardwright.torch.step import step

_LEAST = 16
"""The fewest tokens of a sequence that runs: shorter ones are filled up."""
_WAY_ROUND = (
    "generate from the plain model on one rank: plain.load_state_dict(model.state_dict()), which every rank calls, "
    "then plain.generate(...)"
)


@step
def _logits(model: Any, inputs: dict[str, torch.Tensor]) -> Any:
    return model(**inputs, use_cache=False, return_dict=True).logits


def of_split(model: DistributedModel, own: Callable[..., Any]) -> Callable[..., Any]:
    """The function in the place of a model's own ``generate``: that itself where this rank can call the whole model.

    Raises ShardwrightError for a model that has no values before its first step.
    """
    bound, runtime = model.session.bound, model.runtime
    if runtime.in_step_body or getattr(model.module, "config", None) is None:
        return own
    if runtime.stage_map is None:
        if any(p.is_meta or is_hollow(p) for p in model.module.parameters()):
            raise ShardwrightError("the model gets its values when it is split: run a step first, or give it a plan")
        return own
    is_whole = bound.size("pp") == bound.size("tp") == 1 and runtime.split_model.parts.flat is None
    return own if is_whole else functools.partial(generate, model)


class GenerateOfModule:
    """``generate`` of the module inside of a split model: that of the model. A copy of the module has its own.

    Args:
        model: the split model, and ``module``: the module in it; neither is kept alive.
    """

    def __init__(self, model: DistributedModel, module: nn.Module) -> None:
        self._model, self._module = weakref.ref(model), weakref.ref(module)
        kind: Any = type(module)
        functools.update_wrapper(self, kind.generate)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model, module = self._model(), self._module()
        assert module is not None
        own = _own(module)
        if model is None:
            return own(*args, **kwargs)
        running = model.session.running()
        if running is not None and running is not model.model_run:
            raise ShardwrightError(
                f"{model.model_run.label} is used (generate) in a step of {running.label}: {of_one_model()}"
            )
        return of_split(model, own)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _own(memo[id(self._module())])

    def __reduce__(self) -> Any:
        return getattr, (self._module(), "generate")


def _own(module: nn.Module) -> Callable[..., Any]:
    """The method of a module's class."""
    kind: Any = type(module)
    return MethodType(kind.generate, module)


def of_module(model: DistributedModel, module: nn.Module) -> GenerateOfModule:
    """What stands in the place of the ``generate`` of a module that is split."""
    return GenerateOfModule(model, module)


def generate(model: DistributedModel, *args: Any, **kwargs: Any) -> Any:
    """The model's own ``generate``, whose forward passes are evaluation steps: the whole sequence for each token,
    filled up on the right to a power of two, so that few lengths are recorded. Every rank calls this, with the same
    arguments on the ranks of a replica.

    Raises MissingCapabilityError for models that encode first, and for inputs other than tokens, their mask, positions
    and types.
    """
    module: Any = model.module
    if getattr(module.config, "is_encoder_decoder", False):
        raise MissingCapabilityError(
            f"{type(module).__name__}.generate encodes first, and its forward passes are other ones then; {_WAY_ROUND}"
        )
    if kwargs.get("past_key_values") is not None or kwargs.get("assistant_model") is not None:
        raise MissingCapabilityError(f"generate of a split model keeps no cache: leave it out; or {_WAY_ROUND}")
    if model.session.bound.size("dp") > 1:
        kwargs.setdefault("synced_gpus", True)  # all replicas go on until the last is done
    shown = copy.copy(module)
    vars(shown).pop("generate", None)
    shown.__class__ = _shown_class(module.__class__)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):  # which the step calls
        vars(shown)[hooks] = OrderedDict()
    vars(shown)["_run_split"] = functools.partial(_forward, model)
    vars(shown)["_run_device"] = model.session.bound.device
    return shown.generate(*args, **{**kwargs, "use_cache": False})


@functools.cache
def _shown_class(kind: type[nn.Module]) -> type[nn.Module]:
    """A class that looks like a model's to its ``generate``, and whose forward is that of the split model."""
    plain: Any = kind.forward

    @functools.wraps(plain)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._run_split(*args, **kwargs)

    device = property(lambda self: self._run_device)
    return type(kind.__name__, (kind,), {"forward": forward, "device": device, "__module__": kind.__module__})


def _forward(model: DistributedModel, **given: Any) -> Any:
    """What the model's forward returns that `generate` reads: the logits."""
    kept = given.pop("logits_to_keep", 0)
    inputs = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    tokens = inputs.get("input_ids")
    asked = [name for name, value in given.items() if not isinstance(value, torch.Tensor) and value]
    if left := set(asked) - {"return_dict"}:
        raise MissingCapabilityError(f"generate of a split model asks for {min(left)}; {_WAY_ROUND}")
    if tokens is None or any(value.shape != tokens.shape for value in inputs.values()):
        shapes = {name: tuple(value.shape) for name, value in inputs.items()}
        raise MissingCapabilityError(
            f"generate of a split model takes tokens, and what goes with each of them, and was given {shapes}; "
            f"{_WAY_ROUND}"
        )
    length = tokens.shape[1]
    most = getattr(model.module.config, "max_position_embeddings", None) or 1 << 62
    filled = max(length, min(most, max(_LEAST, 1 << (length - 1).bit_length())))
    inputs = {name: nn.functional.pad(value, (0, filled - length)) for name, value in inputs.items()}
    with torch.no_grad():
        logits: torch.Tensor = _logits(model, inputs).concat()[:, :length]
    from transformers.modeling_outputs import CausalLMOutput

    return CausalLMOutput(logits=logits if not isinstance(kept, int) or kept == 0 else logits[:, -kept:])
