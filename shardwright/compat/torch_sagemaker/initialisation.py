"""The first values of a module's own parameters, without its children's."""

from collections.abc import Callable

from torch import nn

from shardwright.core.errors import MissingCapabilityError


def default_init(model: nn.Module) -> Callable[[nn.Module], None]:
    """The function that gives a module of a model its first values: the model's ``_init_weights``, as Hugging Face's
    have it, or the modules' own ``reset_parameters``."""
    of_model = getattr(model, "_init_weights", None)

    def initialise(module: nn.Module) -> None:
        if not any(True for _ in module.parameters(recurse=False)):
            return
        if callable(of_model):
            of_model(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()
        else:
            raise MissingCapabilityError(
                f"{type(module).__name__} has parameters of its own, and neither it has reset_parameters() nor its "
                f"model _init_weights(module): give DelayedParamIniter an init_method_using_config"
            )

    return initialise
