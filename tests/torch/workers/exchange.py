"""Checks of hooks in the place of sums over replicas, and of sums that are put off, on two ranks in one launch.

Prints `ok NAME` for each; a failure ends the launch.
"""

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import run_checks
from models import batch, build
from torch import nn
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
    plain = build("gpt2", layers=2)
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
                    if passes == 1 and update:  # as scripts for DDP say it
                        model.require_backward_grad_sync = number == 2
                    with contextlib.nullcontext() if passes > 1 or number == 2 or update else model.no_sync():
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


class Unusual(nn.Module):
    """A sparse embedding, tied to the head; weights that are complex, of double precision and without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 8, sparse=True)
        self.turn = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.exact = nn.Linear(8, 8).double()
        self.none = nn.Parameter(torch.zeros(0, 8))
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = (x.to(torch.complex64) @ self.turn.conj()).real
        x = self.exact(x.double()).float()
        x = torch.cat([x, x @ self.none.t()], -1)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Pulled(nn.Module):
    """Adds the gradient of what its layers make to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            seen = x.detach().requires_grad_()
            (pull,) = torch.autograd.grad(self.layers(seen).square().sum(), seen, create_graph=True)
        return x + pull


class Descent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.pulled = nn.Linear(8, 8), nn.ModuleList(Pulled() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for pulled in self.pulled:
            x = pulled(x)
        return x.square().mean()


@sw.step
def mean_step(model, x):
    loss = model(x)
    model.backward(loss, reduction="mean")
    return loss


@sw.step
def weighted_step(model, x, counts):
    loss = model(x)
    model.backward(loss, weight=counts.sum())
    return loss


def whole_gradients(model: Any) -> dict[str, torch.Tensor | None]:
    parts, found = model.runtime.split_model.parts, {}
    for name, parameter in sorted(model.local_named_parameters()):
        grad = parameter.grad
        if parts.is_part(name):
            grad = parts.whole(name, parameter.new_empty(0) if grad is None else grad)
        found[name] = grad
    return found


def numbers(gradient: Any) -> torch.Tensor:
    """A gradient as real numbers, side by side."""
    dense = gradient.to_dense().resolve_conj()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def trains_as_plain(
    title: str, made: nn.Module, x: torch.Tensor, near: dict[str, float], hook: Hook | None = None, **given: Any
) -> None:
    """The loss, every gradient and their norm, in two steps that add up."""
    sw.init({"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0, "loss_scope": "replica"} | given)
    model, plain = sw.DistributedModel(copy.deepcopy(made)), made
    if hook is not None:
        model.register_comm_hook(None, hook)
    replicas = 1 if "pipeline_parallel_degree" in given else 2
    for _ in range(2):
        loss = mean_step(model, x.chunk(replicas)[sw.rdp_rank()]).all_reduce_mean().float()
        expected = 0.0
        for part in x.chunk(2 * replicas):
            own = plain(part) / (2 * replicas)
            own.backward()
            expected += float(own.detach())
        same = Comparison(f"{title}, {given}")
        same.values({"loss": loss}, {"loss": torch.tensor(expected)}, **near, what="losses").require()
    found = whole_gradients(model)
    whole = {name: p.grad for name, p in plain.named_parameters() if name in found and p.numel()}
    same.values({name: numbers(found[name]) for name in whole}, {name: numbers(g) for name, g in whole.items()}, **near)
    same.require()
    norm = torch.stack([g.to_dense().abs().double().norm() for p in plain.parameters() if (g := p.grad) is not None])
    same.values({"norm": model.clip_grad_norm_(1e9).double()}, {"norm": norm.norm()}, **near, what="norms").require()
    sw.shutdown()


def unusual_parameters_have_their_gradients() -> None:
    exact = {"relative": 1e-4, "absolute": 1e-6}
    torch.manual_seed(0)
    tokens = torch.randint(0, 19, (8, 5))
    for given in ({}, {"hook": allreduce_hook}, {"shard": 1}, {"shard": 3}, {"pipeline_parallel_degree": 2}):
        torch.manual_seed(1)
        trains_as_plain("unusual", Unusual(), tokens, exact, **given)
    x = torch.randn(8, 8)
    torch.manual_seed(1)
    trains_as_plain("descent", Descent(), x, exact, shard=3, recompute="full")
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(8, 8), Squared())
    plain.none = nn.Parameter(torch.zeros(0, 8))
    trains_as_plain("in 16 bits", plain, x, {"relative": 2e-2, "absolute": 2e-3}, bf16=True, shard=3)


def small_parameters_are_gathered_once_a_step() -> None:
    """The norm at the end stays whole: one gather and one sum of it a step, however many microbatches there are."""
    torch.manual_seed(0)
    x, small = torch.randn(16, 64), 2 * 64
    for microbatches in (1, 4):
        torch.manual_seed(1)
        plain = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.LayerNorm(64), Squared())
        keys = {"shard": 3, "ddp_dist_backend": "gloo"}  # where gathers are messages that can be seen
        sw.init({"microbatches": microbatches, "ddp": True, "wait_timeout_s": 60.0} | keys)
        model, sent = sw.DistributedModel(copy.deepcopy(plain)), list[int]()
        for _ in range(2):
            with noted_messages(sent):
                mean_step(model, x.chunk(2)[sw.rdp_rank()])
        for part in x.chunk(2 * microbatches):
            (plain(part) / microbatches).backward()
        Comparison("small").gradients(
            whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}
        ).require()
        flat = model.runtime.split_model.parts.flat
        assert [group.names for group in filter(flat.stays, flat.groups)] == [("3.weight", "3.bias")]
        assert sent.count(small // 2) == 2 * 2, sent
        assert len(sent) > 2 * 2 + 2 * 3 * microbatches
        sw.shutdown()


@contextlib.contextmanager
def noted_messages(sent: list[int]) -> Iterator[None]:
    """In here ``sent`` gets the number of entries of every message to the other replica."""
    with pytest.MonkeyPatch.context() as patch:
        send = dist.isend
        patch.setattr(
            dist, "isend", lambda tensor, *args, **how: (sent.append(tensor.numel()), send(tensor, *args, **how))[1]
        )
        yield


def a_replica_without_gradients_goes_on_with_the_others() -> None:
    """Its samples count nothing in a step whose gradients are held back, and then in one that sums them."""
    for given in ({}, {"shard": 2}, {"shard": 3}):
        sw.init({"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0} | given)
        torch.manual_seed(1)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), Squared())
        model = sw.DistributedModel(copy.deepcopy(plain))
        for number in range(3):
            x, counts = torch.randn(8, 8), torch.ones(8)
            if number != 1:
                counts[4:] = 0.0
            own = slice(4 * sw.rdp_rank(), 4 * sw.rdp_rank() + 4)
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                weighted_step(model, x[own], counts[own])
            for part, counted in zip(x.split(2), counts.split(2), strict=True):
                (plain(part) * counted.sum() / counts.sum()).backward()
        found = whole_gradients(model)
        Comparison(f"{given}").gradients(found, {n: p.grad for n, p in plain.named_parameters()}).require()
        sw.shutdown()


class Squared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


CHECKS: tuple[Callable[[], None], ...] = (
    torchs_own_hooks_do_what_they_do_in_ddp,
    a_hook_is_asked_for_every_bucket_once,
    what_a_hook_gives_is_looked_at,
    hooks_that_cannot_be_are_refused,
    several_steps_are_summed_at_once,
    what_is_held_back_goes_with_zero_grad_and_ranks_agree_on_it,
    unusual_parameters_have_their_gradients,
    small_parameters_are_gathered_once_a_step,
    a_replica_without_gradients_goes_on_with_the_others,
)


if __name__ == "__main__":
    run_checks(check for check in CHECKS if len(sys.argv) == 1 or check.__name__ in sys.argv[1:])
