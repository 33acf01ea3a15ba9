"""Checks of hooks in the place of sums over replicas, and of sums that are put off, on two ranks in one launch.

Prints `ok NAME` for each; a failure ends the launch.
"""

import contextlib
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
from shardwright.core.errors import DisagreementError, ShardwrightError
from tests.comparison import Comparison

Hook = Callable[[Any, Any], Any]


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def own_batch(step: int) -> dict[str, torch.Tensor]:
    return {key: t.chunk(2)[dist.get_rank()].clone() for key, t in batch("gpt2", step).items()}


def start(passes: int = 1, **given: Any) -> tuple[Any, torch.nn.Module]:
    sw.init({"microbatches": 1, "ddp": True, "wait_timeout_s": 60.0} | given)
    plain = build("gpt2")
    return sw.DistributedModel(copy.deepcopy(plain), backward_passes_per_step=passes), plain


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


def several_steps_are_summed_at_once() -> None:
    """By backward_passes_per_step and by no_sync, whatever is sharded: as torch alone over the same batches."""
    for given in ({}, {"shard": 2, "microbatches": 2}, {"shard": 3}, {"shard": 1, "bf16": True}, {"bf16": True}):
        for passes in (1, 3):
            model, plain = start(passes=passes, **given)
            optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            peer = torch.optim.SGD(plain.parameters(), lr=0.1)
            near = {"relative": 5e-2, "absolute": 5e-3} if "bf16" in given else {"relative": 1e-4, "absolute": 1e-5}
            for update in range(2):
                optimizer.zero_grad()
                peer.zero_grad()
                for number in range(3):
                    step = 3 * update + number
                    with contextlib.nullcontext() if passes > 1 or number == 2 else model.no_sync():
                        train_step(model, own_batch(step))
                    if number < 2:
                        assert all(p.grad is None for p in model.local_parameters())
                        with pytest.raises(ShardwrightError, match="run a step that sums them before"):
                            optimizer.step()
                        with pytest.raises(ShardwrightError, match="clip_grad_norm_ after a step whose gradients"):
                            model.clip_grad_norm_(1.0)
                    for half in range(2):
                        part = {key: t.chunk(2)[half] for key, t in batch("gpt2", step).items()}
                        (plain(**part).loss / 2).backward()
                optimizer.step()
                peer.step()
            same = Comparison(f"{given}, {passes}")
            same.values(model.state_dict(), plain.state_dict(), **near, what="weights").require()
            sw.shutdown()


def what_is_held_back_goes_with_zero_grad_and_ranks_agree_on_it() -> None:
    model, plain = start()
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for reset in (model.zero_grad, optimizer.zero_grad):
        with model.no_sync():
            train_step(model, own_batch(0))
        reset()
        optimizer.step()
    train_step(model, own_batch(1))
    for half in range(2):
        (plain(**{key: t.chunk(2)[half] for key, t in batch("gpt2", 1).items()}).loss / 2).backward()
    same = Comparison("after zero_grad")
    same.gradients({n: p.grad for n, p in model.local_named_parameters()},
                   {n: p.grad for n, p in plain.named_parameters()}).require()  # fmt: skip
    of_rank = contextlib.nullcontext() if dist.get_rank() else model.no_sync()
    with of_rank, pytest.raises(DisagreementError, match="whose gradients are not summed on rank 0"):
        train_step(model, own_batch(2))
    sw.shutdown()
    for bad in (0, 1.5, True):
        with pytest.raises(ShardwrightError, match="expected a whole number of 1 or more"):
            start(passes=bad)
        sw.shutdown()


CHECKS: tuple[Callable[[], None], ...] = (
    torchs_own_hooks_do_what_they_do_in_ddp,
    a_hook_is_asked_for_every_bucket_once,
    what_a_hook_gives_is_looked_at,
    hooks_that_cannot_be_are_refused,
    several_steps_are_summed_at_once,
    what_is_held_back_goes_with_zero_grad_and_ranks_agree_on_it,
)


if __name__ == "__main__":
    run_checks(check for check in CHECKS if len(sys.argv) == 1 or check.__name__ in sys.argv[1:])
