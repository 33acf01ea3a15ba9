"""Checks of communication hooks, on two ranks in one launch. Prints `ok NAME` for each; a failure ends the launch."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import run_checks
from models import batch, build
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison

Hook = Callable[[Any, Any], Any]


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def own_batch(step: int) -> dict[str, torch.Tensor]:
    return {key: t.chunk(2)[dist.get_rank()].clone() for key, t in batch("gpt2", step).items()}


def start(**given: Any) -> tuple[Any, torch.nn.Module]:
    sw.init({"microbatches": 1, "ddp": True, "wait_timeout_s": 60.0} | given)
    plain = build("gpt2")
    return sw.DistributedModel(copy.deepcopy(plain)), plain


def torchs_own_hooks_do_what_they_do_in_ddp() -> None:
    """The same losses and gradients as DistributedDataParallel's with the hook, over steps that its state sees."""
    for make, hook, near in (
        (lambda: None, allreduce_hook, {}),
        (lambda: None, fp16_compress_hook, {"relative": 2e-2, "absolute": 1e-3}),
        (lambda: PowerSGDState(None, 4, start_powerSGD_iter=4, min_compression_rate=1), powerSGD_hook, {}),
    ):
        model, plain = start()
        peer = DistributedDataParallel(plain)
        model.register_comm_hook(make(), hook)
        peer.register_comm_hook(make(), hook)
        for step in range(3):
            model.zero_grad()
            peer.zero_grad()
            own = own_batch(step)
            loss = train_step(model, own)
            expected = peer(**own).loss
            expected.backward()
            same = Comparison(hook.__name__).losses(float(loss.outputs[0]), float(expected))
            found = {name: p.grad for name, p in model.local_named_parameters()}
            whole = {name: p.grad for name, p in plain.named_parameters()}
            if near:
                same.values(found, whole, **near).require()
            else:
                same.gradients(found, whole).require()
        sw.shutdown()


def a_hook_is_asked_for_every_bucket_once() -> None:
    seen: list[tuple[int, bool, int]] = []

    def hook(state: str, bucket: Any) -> torch.futures.Future:
        assert state == "mine"
        assert sum(g.numel() for g in bucket.gradients()) == sum(p.numel() for p in bucket.parameters())
        seen.append((bucket.index(), bucket.is_last(), sum(p.numel() for p in bucket.parameters())))
        summed = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
        return summed.get_future().then(lambda done: done.value()[0])

    model, plain = start(microbatches=2)
    model.register_comm_hook("mine", hook)
    train_step(model, own_batch(0))
    assert [number for number, *_ in seen] == list(range(len(seen)))
    assert [last for _, last, _ in seen] == [False] * (len(seen) - 1) + [True]
    assert sum(count for *_, count in seen) == sum(p.numel() for p in plain.parameters())
    sw.shutdown()


def what_a_hook_gives_is_looked_at() -> None:
    def gives(value: Any) -> Hook:
        def hook(state: None, bucket: Any) -> torch.futures.Future:
            future = torch.futures.Future()
            future.set_result(value(bucket.buffer()))
            return future

        return hook

    for hook, said in (
        (gives(lambda flat: flat[:-1]), r"gives.<locals>.hook gave torch.float32 of shape .* expected torch.float32"),
        (gives(lambda flat: flat.double()), "gave torch.float64"),
        (gives(lambda flat: None), "gave <class 'NoneType'>"),
        (lambda state, bucket: bucket.buffer(), "returned Tensor: expected a torch.futures.Future"),
    ):
        model, _ = start()
        model.register_comm_hook(None, hook)
        with pytest.raises(ShardwrightError, match=said):
            train_step(model, own_batch(0))
        assert all(p.grad is None for p in model.local_parameters())
        sw.shutdown()


def hooks_that_cannot_be_are_refused() -> None:
    model, _ = start()
    with pytest.raises(ShardwrightError, match="expected a function of"):
        model.register_comm_hook(None, "mean")
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ShardwrightError, match="allreduce_hook is there: register one, once"):
        model.register_comm_hook(None, allreduce_hook)
    sw.shutdown()
    model, _ = start()
    train_step(model, own_batch(0))
    with pytest.raises(ShardwrightError, match="register it before the first one"):
        model.register_comm_hook(None, allreduce_hook)
    sw.shutdown()
    model, _ = start(pipeline_parallel_degree=2, ddp=False)
    with pytest.raises(ShardwrightError, match="there is one replica"):
        model.register_comm_hook(None, allreduce_hook)
    sw.shutdown()
    model, _ = start(shard=1)
    model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ShardwrightError, match="plan with shard=0"):
        train_step(model, own_batch(0))
    sw.shutdown()


CHECKS: tuple[Callable[[], None], ...] = (
    torchs_own_hooks_do_what_they_do_in_ddp,
    a_hook_is_asked_for_every_bucket_once,
    what_a_hook_gives_is_looked_at,
    hooks_that_cannot_be_are_refused,
)


if __name__ == "__main__":
    run_checks(check for check in CHECKS if len(sys.argv) == 1 or check.__name__ in sys.argv[1:])
