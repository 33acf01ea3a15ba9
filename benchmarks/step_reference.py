"""The plain model beside the plans of `step_time.py`: how fast the machine is at the moment.

Every rank runs the unsplit model of the profile forward and backward, one microbatch, at the same time as the others. A
profile and a plan that were taken minutes apart each have such a time taken beside them, and what the machine has
become faster or slower by in between is no error of a prediction.
"""

import time
from collections.abc import Callable
from typing import Any


def reference_of(framework: str, given: tuple[Any, Any, Any]) -> Callable[[], float]:
    """A function that runs the model twice on every rank and gives the seconds of the second time: what ran before the
    first has its data in the caches."""
    run = (_torch if framework == "torch" else _jax)(*given)

    def twice() -> float:
        run()
        return run()

    return twice


def _torch(model: Any, sample: Any, _: Any) -> Callable[[], float]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    model.train()

    def run() -> float:
        dist.barrier()
        began = time.perf_counter()
        result = model(**sample)
        (result if isinstance(result, torch.Tensor) else result.loss).backward()
        seconds = time.perf_counter() - began
        model.zero_grad()
        return seconds

    return run


def _jax(model: Any, sample: Any, loss: Any) -> Callable[[], float]:
    import jax
    from flax import nnx

    definition, parameters, others = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def gradients(parameters: Any, others: Any, batch: Any) -> Any:
        def of(parameters: Any) -> Any:
            return loss(nnx.merge(definition, parameters, others, copy=True), batch)

        return jax.value_and_grad(of)(parameters)

    everywhere = [jax.device_put((parameters, others, sample), device) for device in jax.devices()]

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready([gradients(*given) for given in everywhere])
        return time.perf_counter() - began

    return run
