"""``torch.sagemaker.utils.module_utils``: memory for parameters, and buffers on a device."""

import torch
from torch import nn


def empty_module_params(
    module: nn.Module, device: torch.device | int | None = None, recurse: bool = False
) -> nn.Module:
    """Give the parameters of a module memory on a device, by default torch's own; those that are there already keep
    theirs, with its values."""
    place = _device(device)
    for one in module.modules() if recurse else (module,):
        for name, parameter in list(one.named_parameters(recurse=False)):
            if parameter.device != place:
                empty = torch.empty_like(parameter, device=place, requires_grad=parameter.requires_grad)
                setattr(one, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return module


def move_buffers_to_device(module: nn.Module, device: torch.device | int, recurse: bool = False) -> nn.Module:
    """Move the buffers of a module to a device; those on the meta device get memory without values."""
    place = _device(device)
    for one in module.modules() if recurse else (module,):
        for name, buffer in list(one.named_buffers(recurse=False)):
            setattr(one, name, torch.empty_like(buffer, device=place) if buffer.is_meta else buffer.to(place))
    return module


def _device(device: torch.device | int | None) -> torch.device:
    if device is None:
        return torch.get_default_device()
    found = torch.device(device)
    if found.type == "cuda" and found.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return found
