"""``torch.sagemaker.delayed_param``: values for the parameters of a model on the meta device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from shardwright.backends.torch.machine.process import choose_device, this_launch
from shardwright.compat.torch_sagemaker.initialisation import default_init
from shardwright.compat.torch_sagemaker.transformed import TransformedModel
from shardwright.compat.torch_sagemaker.utils.module_utils import empty_module_params, move_buffers_to_device
from shardwright.core.errors import ShardwrightError


class DelayedParamIniter:
    """The functions that FSDP takes to give a model's parameters values once they are sharded.

    Args:
        model: the model, on the meta device.
        init_method_using_config: is called with every module, and gives its own parameters values. Default: the model's
            own initialisation.
        verbose: has no effect.

    Raises:
        ShardwrightError: an own function for a model that `transform` made a `DistributedModel` of.
    """

    def __init__(
        self, model: nn.Module, init_method_using_config: Callable[[nn.Module], None] | None = None,
        verbose: bool = False,
    ) -> None:  # fmt: skip
        if isinstance(model, TransformedModel) and init_method_using_config is not None:
            raise ShardwrightError(
                "DelayedParamIniter(init_method_using_config=…): the model of transform has its initialisation "
                "already; in the place of transform call shardwright.torch.DistributedModel(model, weights=function), "
                "whose function gives values to the parameters that a module has"
            )
        self.model, self._init, self.verbose = model, init_method_using_config, verbose
        self.initialised = 0
        """The number of entries of the parameters that were given values."""

    def get_param_init_fn(self) -> Callable[[nn.Module], None]:
        """The function for FSDP's ``param_init_fn``."""
        default = None if isinstance(self.model, TransformedModel) else default_init(self.model)

        def initialise(module: nn.Module) -> None:
            if self._init is not None:
                self._init(module)
            elif default is not None:
                device = choose_device(this_launch())
                empty_module_params(module, device)
                default(module)
                move_buffers_to_device(module, device)
            self.count_num_params(module)

        return initialise

    def get_post_param_init_fn(self) -> Callable[[nn.Module], None]:
        """The function for ``post_param_init_fn``, which ties weights again."""

        def tie(module: nn.Module) -> None:
            if callable(ties := getattr(module, "tie_weights", None)):
                ties()

        return tie

    def count_num_params(self, module: nn.Module, *args: nn.Parameter) -> None:
        """Count a module's own parameters, or those that are given, as initialised."""
        self.initialised += sum(p.numel() for p in (args or module.parameters(recurse=False)))

    @contextmanager
    def validate_params_and_buffers_inited(self, enabled: bool = True) -> Iterator[None]:
        """A context behind which all parameters and buffers of the model must have values. Raises AssertionError where
        some are on the meta device still."""
        yield
        if not enabled or isinstance(self.model, TransformedModel):
            return
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        left = [name for name, tensor in tensors if tensor.is_meta]
        if left:
            raise AssertionError(f"{len(left)} of {len(tensors)} parameters and buffers have no values, as {left[0]}")
