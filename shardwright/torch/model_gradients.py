"""The gradients of a distributed model: when they are summed over the replicas, by what, and their norm."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shardwright.core.errors import ShardwrightError
from shardwright.torch.sagemaker_model import SageMakerModel
from shardwright.torch.scaler import require_unscaled


class ModelGradients(SageMakerModel):
    """What a distributed model does with the gradients of its steps."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients: those of the parameters that this rank holds."""
        if self.model_run.log is not None:
            self.model_run.log.restart()
        for parameter in self.runtime.ownership.local_parameters().values():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = parameter.grad.detach().zero_()
        self.runtime.gradients.forget_held(self.local_parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients of steps add up on every replica by itself; the next step outside of it sums
        all of them over the replicas. Every rank enters it. As `DistributedDataParallel.no_sync`, but that until then
        the gradients are not in ``.grad``, and take the memory of one more copy."""
        gradients = self.runtime.gradients
        before, gradients.is_held = gradients.is_held, True
        try:
            yield
        finally:
            gradients.is_held = before

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next step sums gradients over the replicas, as `DistributedDataParallel` has it: scripts set it
        to False for all but the last step of an update, in the place of `no_sync`. Every rank sets it alike."""
        return not self.runtime.gradients.is_held

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.runtime.gradients.is_held = not value

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the gradients by the norm of the unsplit model's gradients; every rank calls this. Returns that norm."""
        require_unscaled(self.model_run)
        call = f"model.clip_grad_norm_({float(max_norm)}, {float(norm_type)})"
        self.session.agreement.meet(self.model_run.of_model(call))
        return self.runtime.gradients.clip_norm(float(max_norm), float(norm_type), error_if_nonfinite)

    def norm_of_gradients(
        self, call: str, norm_type: float, error_if_nonfinite: bool, failure: Exception | None = None
    ) -> torch.Tensor:
        """The norm of the unsplit model's gradients, for a call of this name; every rank calls this."""
        try:
            if failure is None:
                require_unscaled(self.model_run)
        except ShardwrightError as error:
            failure = error
        self.session.agreement.meet(self.model_run.of_model(f"{call}(…, {norm_type})"), failure=failure)
        return self.runtime.gradients.checked_norm(norm_type, error_if_nonfinite)

    def register_comm_hook(self, state: Any, hook: Callable[[Any, Any], Any]) -> None:
        """Let a hook exchange the gradients of replicas, as `DistributedDataParallel.register_comm_hook`: the hooks of
        ``torch.distributed.algorithms.ddp_comm_hooks`` serve as they are. Every rank calls this, before the first step.

        Args:
            state: the first argument of the hook; for torch's own the process group of the replicas
                (`get_rdp_process_group`), or None where all ranks are replicas.
            hook: is called with ``state`` and a bucket that has the methods of `torch.distributed.GradBucket`, and
                returns a future of the mean of the bucket over the replicas, in a tensor like ``bucket.buffer()``.

        Raises:
            ShardwrightError: no replicas, sharded parameters, a second hook, or a step was run already.
        """
        name = getattr(hook, "__qualname__", type(hook).__name__)
        failure: Exception | None = None
        try:
            self.runtime.gradients.hook(state, hook)
        except ShardwrightError as error:
            failure = error
        call = self.model_run.of_model(f"model.register_comm_hook(…, {name})")
        self.session.agreement.meet(call, failure=failure)
