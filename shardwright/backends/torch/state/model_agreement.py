"""The comparison of everything that must be the same on all ranks of a model: before it is split, and in every step."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwright.backends.torch.machine.agreement import Claim
from shardwright.backends.torch.machine.digests import code_of, digest_of, fingerprint
from shardwright.backends.torch.state.deferred_init import DeferredValues
from shardwright.backends.torch.state.ownership import buffer_names, parameter_names
from shardwright.backends.torch.state.weight_files import FileWeights

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype)
_OF_A_RANK = ("rank", "device")
"""Words in the names of attributes that differ between ranks by nature."""
_LONGEST = 32
"""The length above which only the lengths of sequences are compared."""
_BUILD_ALIKE = "Every rank builds the same model, from the same code and the same configuration, and then wraps it."


def model_claims(model: nn.Module) -> list[Claim]:
    """The claims of the class, parameters, buffers, modules and their plain attributes of a model, before it is
    split."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    modules = dict(model.named_modules(remove_duplicate=False))
    persistent = set(model.state_dict(keep_vars=True))
    said_parameters = {
        name: f"{_shape(parameters[name])}, {'trained' if parameters[name].requires_grad else 'frozen'}{tie}"
        for name, tie in _with_ties(parameter_names(model))
    }
    said_buffers = {
        name: f"{_shape(buffers[name])}{'' if name in persistent else ', not saved'}{tie}"
        for name, tie in _with_ties(buffer_names(model))
    }
    return [
        module_claim(modules),
        Claim.of("attributes of the model's modules", dict(_attributes(modules)), _BUILD_ALIKE),
        Claim.of("the parameters of the model", said_parameters, _BUILD_ALIKE),
        Claim.of("the buffers of the model", said_buffers, _BUILD_ALIKE),
        Claim(
            "the order of the model's parameters",
            digest_of(*parameters),
            lambda: ", ".join(list(parameters)[:6]),
            "Every rank makes its modules in the same order: sort what comes from a set.",
        ),
    ]


def module_claim(modules: Mapping[str, nn.Module]) -> Claim:
    """The claim of the classes of modules and the code of their forward functions."""
    code: dict[Any, str] = {}
    said = {}
    for path, module in modules.items():
        kind = type(module)
        if kind not in code:
            code[kind] = _short(digest_of(code_of(kind.forward)))
        mode = "training" if module.training else "evaluation"
        said[path or "the model"] = f"{kind.__qualname__} (forward {code[kind]}) in {mode} mode"
    return Claim.of("the modules of the model", said, _BUILD_ALIKE)


def parameters_claim(parameters: Mapping[str, torch.Tensor]) -> Claim:
    """The claim of the values of the parameters that this rank holds."""
    digests = {name: _short(fingerprint(tensor)) for name, tensor in parameters.items()}
    fix = "What changes parameters outside the optimizer's step is done on every rank."
    return Claim.of("the values of parameters", digests, fix, "holders")


def values_digest(model: nn.Module) -> int:
    """A digest of the values of all parameters and buffers."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return digest_of(*(f"{name} {fingerprint(tensor)}" for name, tensor in tensors))


def source_claim(weights: Any) -> Claim:
    """The claim of the source of a model's data, for one on the meta device. Raises OSError for a file that cannot be
    read."""
    fix = "Give every rank the same weights."
    if isinstance(weights, DeferredValues):
        said = f"an initialisation that draws {_short(weights.digest())}"
        fix = "Call torch.manual_seed with the same number on every rank before the model is built."
    elif isinstance(weights, FileWeights):
        said = f"files of content {_short(weights.digest())}"
    elif isinstance(weights, Mapping):
        said = f"a state dict of content {digest_of_state(weights)}"
    elif callable(weights):
        name = getattr(weights, "__qualname__", type(weights).__name__)
        said = f"the function {name} ({_short(digest_of(code_of(weights)))})"
    else:
        said = "not given"
    return Claim.of("the weights", said, fix)


def digest_of_state(state: Mapping[str, Any]) -> str:
    """A text that two state dicts share when their names and values are the same. A state dict may hold others."""
    parts = []
    for key, entry in state.items():
        if isinstance(entry, torch.Tensor):
            parts.append(f"{key} {fingerprint(entry)}")
        elif isinstance(entry, Mapping):
            parts.append(f"{key} {digest_of_state(entry)}")
    return _short(digest_of(*parts))


def _short(digest: int) -> str:
    return f"{digest & 0xFFFFFFFF:08x}"


def _shape(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _with_ties(names: Mapping[str, tuple[str, ...]]) -> Iterator[tuple[str, str]]:
    for first, all_names in names.items():
        for name in all_names:
            yield name, "" if name == first else f", tied to {first}"


def _attributes(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, str]]:
    seen: set[int] = set()
    for path, module in modules.items():
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield from _plain_items(path, vars(module).items())
        config = vars(module).get("config")
        if config is not None and hasattr(config, "__dict__") and id(config) not in seen:
            seen.add(id(config))
            yield from _plain_items(f"{path}.config" if path else "config", vars(config).items())


def _plain_items(path: str, items: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    for name, value in items:
        if name.startswith("_") or name == "training" or any(word in name.lower() for word in _OF_A_RANK):
            continue
        text = plain_text(value)
        if text is not None:
            yield (f"{path}.{name}" if path else name), text


def plain_text(value: Any) -> str | None:
    """A plain Python value as text; None for any other value."""
    if type(value) in _PLAIN:
        return repr(value)
    if type(value) in (tuple, list, torch.Size):
        if len(value) > _LONGEST:
            return f"a {type(value).__name__} of {len(value)}"
        texts = [plain_text(item) for item in value]
        if all(text is not None for text in texts):
            return f"({', '.join(str(text) for text in texts)})"
    return None


class LiveFlags:
    """The modules of a model that are in training mode and the parameters that are trained, as read in every step.

    Args:
        modules: by path.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)
        self._slots = [
            (f"{path}.{last}" if path else last, module._parameters, last)
            for path, module in modules.items()
            for last in module._parameters
            if module._parameters[last] is not None
        ]

    def claims(self) -> list[Claim]:
        training = bytes([module.training for module in self._modules.values()])
        trained = "".join([_state_of(store.get(last)) for _, store, last in self._slots])
        return [
            Claim(
                "which modules are in training mode", digest_of(training), self._said_training,
                "Call model.train() and model.eval() on every rank.",
            ),
            Claim(
                "which parameters are trained, and in which dtype", digest_of(trained), self._said_trained,
                "Set requires_grad and dtypes of all parameters on every rank, also of those that other ranks hold.",
            ),
        ]  # fmt: skip

    def _said_training(self) -> dict[str, str]:
        said = {True: "in training mode", False: "in evaluation mode"}
        return {path or "the model": said[module.training] for path, module in self._modules.items()}

    def _said_trained(self) -> dict[str, str]:
        return {name: _state_of(store.get(last)) for name, store, last in self._slots}


_STATES = {
    (dtype, is_trained): f"{'trained' if is_trained else 'frozen'} {str(dtype).removeprefix('torch.')}"
    for dtype in {entry for entry in vars(torch).values() if isinstance(entry, torch.dtype)}
    for is_trained in (True, False)
}


def _state_of(parameter: nn.Parameter | None) -> str:
    return "not there" if parameter is None else _STATES[parameter.dtype, parameter.requires_grad]
