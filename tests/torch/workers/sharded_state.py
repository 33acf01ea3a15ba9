"""Trains small models on two replicas that share their state, and compares with torch alone on the whole batch.

Usage: sharded_state.py OUT.json CASE...
"""

import atexit
import copy
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launched import leave
from sharded_residency import freed, limited, watched
from sharded_training import (
    MICROBATCHES,
    OPTIMIZERS,
    STEPS,
    Net,
    Tower,
    build,
    compare,
    same_states,
    start,
    tokens,
    train,
    train_step,
    whole_run,
)
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison


def same(optimizer: str, level: int, backend: str = "auto") -> dict[str, Any]:
    expected = whole_run(build(), OPTIMIZERS[optimizer])
    model, wrapped = start(build(), OPTIMIZERS[optimizer], shard=level, ddp_dist_backend=backend)
    found = train(model, wrapped)
    report = compare(f"{optimizer}, shard {level}", model, wrapped, found, expected)
    held = sum(p.numel() for p in model.local_parameters())
    states = sum(t.numel() for s in wrapped.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    return {"same": report, "held": held, "states": states, "all": sum(p.numel() for p in build().parameters())}


def muon(level: int, others: str) -> dict[str, Any]:
    """Muon on the matrices of the blocks; what else there is by AdamW, or frozen."""

    def build_tower() -> Tower:
        torch.manual_seed(3)
        tower = Tower()
        for name, p in tower.named_parameters():
            p.requires_grad_(others == "adamw" or is_matrix(name, p))
        return tower

    def is_matrix(name: str, p: torch.Tensor) -> bool:
        return p.dim() == 2 and name.startswith("blocks")

    def optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
        named = dict(model.named_parameters())
        made: list[torch.optim.Optimizer] = [
            torch.optim.Muon([p for n, p in named.items() if is_matrix(n, p)], lr=1e-3)
        ]
        if others == "adamw":
            made.append(torch.optim.AdamW([p for n, p in named.items() if not is_matrix(n, p)], lr=1e-3))
        return made

    plain = build_tower()
    plain_optimizers = optimizers(plain)
    expected_losses, gradients = [], {}
    for step in range(STEPS):
        plain.zero_grad()
        loss = sum(plain(part) / (2 * MICROBATCHES) for part in tokens(step).chunk(2 * MICROBATCHES))
        loss.backward()
        expected_losses.append(float(loss.detach()))
        if step == 0:
            gradients = {n: None if p.grad is None else p.grad.clone() for n, p in plain.named_parameters()}
        for optimizer in plain_optimizers:
            optimizer.step()
    sw.init({"microbatches": MICROBATCHES, "ddp": True, "shard": level})
    model = sw.DistributedModel(build_tower())
    wrapped = [sw.DistributedOptimizer(optimizer) for optimizer in optimizers(model)]
    found = train(model, Both(wrapped))
    same = Comparison(f"muon, shard {level}").losses(found["losses"], expected_losses)
    same.gradients(found["gradients"], gradients)
    same.values(model.state_dict(), plain.state_dict(), relative=0.0, absolute=1e-4, what="weights")
    for own, alone in zip(wrapped, plain_optimizers, strict=True):
        same_states(same, own, alone.state_dict())
    flat = model.runtime.split_model.parts.flat

    def entries(optimizer: Any) -> int:
        held = [tensor for state in optimizer.state.values() for tensor in state.values()]
        return sum(tensor.numel() for tensor in held if isinstance(tensor, torch.Tensor) and tensor.dim())

    return {
        "same": same.report(),
        "held": sum(group.shard.untyped_storage().nbytes() for group in flat.groups if group.frees),
        "entries": sum(group.shard.numel() for group in flat.groups),
        "states": sum(map(entries, wrapped)),
        "all": sum(p.numel() for p in plain.parameters() if level == 3 or p.requires_grad),
        "all_states": sum(map(entries, plain_optimizers)),
    }


class Dropping(Tower):
    """Short sequences go past some layers."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            if tokens.shape[1] > 8 or number % 3:
                x = x + nn.functional.gelu(block(x))
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 37), tokens[:, 1:].reshape(-1))


def dropped(level: int) -> dict[str, Any]:
    """Layers that one replica leaves out in a step, and another does not; in the third step the other way round."""

    def of(step: int, rank: int) -> torch.Tensor:
        own = tokens(step).chunk(2)[rank]
        return own[:, :7] if step % 3 and rank == step % 2 else own

    torch.manual_seed(3)
    plain = Dropping()
    plain_optimizer, losses = OPTIMIZERS["adamw"](list(plain.parameters())), []
    for step in range(STEPS):
        plain_optimizer.zero_grad()
        parts = [part for rank in range(2) for part in of(step, rank).chunk(MICROBATCHES)]
        counts = [part[:, 1:].numel() for part in parts]
        loss = sum(plain(part) * count / sum(counts) for part, count in zip(parts, counts, strict=True))
        loss.backward()
        losses.append(float(loss.detach()))
        plain_optimizer.step()
    torch.manual_seed(3)
    model, optimizer = start(Dropping(), OPTIMIZERS["adamw"], shard=level)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found.append(float(train_step(model, of(step, sw.rdp_rank())).all_reduce_mean()))
        optimizer.step()
    same = Comparison(f"dropped, shard {level}").losses(found, losses)
    same.values(model.state_dict(), plain.state_dict(), relative=0.0, absolute=1e-4, what="weights")
    return {"same": same.report()}


def clipped(kind: str) -> dict[str, Any]:
    """Gradients clipped in the optimizers' steps, alone, in shards, by several optimizers, and with a scaler."""
    bound, level = 0.05, 3 if kind == "shard 3" else 0
    plain = build()
    plain_optimizer, losses = OPTIMIZERS["sgd"](list(plain.parameters())), []
    for step in range(STEPS):
        plain_optimizer.zero_grad()
        loss = sum(plain(part) / (2 * MICROBATCHES) for part in tokens(step).chunk(2 * MICROBATCHES))
        loss.backward()
        losses.append(float(loss.detach()))
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), bound)
        plain_optimizer.step()
    sw.init({"microbatches": MICROBATCHES, "ddp": True, "shard": level, "sdp_gradient_clipping": bound})
    model = sw.DistributedModel(build())
    own = list(model.parameters())
    parts = [own[:5], own[5:]] if kind == "two optimizers" else [own]
    if kind == "unwrapped":
        optimizers: list[Any] = [OPTIMIZERS["sgd"](part) for part in parts]
    else:
        optimizers = [sw.DistributedOptimizer(OPTIMIZERS["sgd"](part)) for part in parts]
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "scaler", init_scale=64.0)
    found = []

    @sw.step
    def scaled_step(model, tokens):
        loss = model(tokens)
        model.backward(scaler.scale(loss))
        return loss

    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch = tokens(step).chunk(2)[sw.rdp_rank()]
        found.append(float(scaled_step(model, batch).all_reduce_mean()))
        try:
            for optimizer in optimizers:
                scaler.step(optimizer)
        except ShardwrightError as error:
            return {"error": str(error)}
        scaler.update()
    same = Comparison(f"clipped, {kind}").losses(found, losses)
    same.values(model.state_dict(), plain.state_dict(), relative=0.0, absolute=1e-4, what="weights")
    return {"same": same.report(), "norm": float(norm)}


class Both:
    """Two optimizers, called as one."""

    def __init__(self, optimizers: Any = ()) -> None:
        self.optimizers = list(optimizers)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def frozen(level: int) -> dict[str, Any]:
    """A part without gradients, as under LoRA: the gradient goes through it."""

    def model() -> Net:
        made = build()
        for p in made.blocks.parameters():
            p.requires_grad_(False)
        return made

    expected = whole_run(model(), OPTIMIZERS["adamw"])
    split, optimizer = start(model(), OPTIMIZERS["adamw"], shard=level)
    found = train(split, optimizer)
    return {"same": compare(f"frozen, shard {level}", split, optimizer, found, expected)}


def moved(before: int, after: int) -> dict[str, Any]:
    """Training that goes on under another level, from the whole state dicts."""
    expected = whole_run(build(), OPTIMIZERS["adamw"])
    model, optimizer = start(build(), OPTIMIZERS["adamw"], shard=before)
    losses = train(model, optimizer, 0, 2)["losses"]
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    sw.shutdown()
    model, optimizer = start(build(), OPTIMIZERS["adamw"], shard=after)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    found = train(model, optimizer, 2, STEPS)
    comparison = Comparison(f"from shard {before} to {after}").losses(losses + found["losses"], expected["losses"])
    comparison.values(model.state_dict(), expected["state"], relative=0.0, absolute=1e-4, what="weights")
    same_states(comparison, optimizer, expected["optimizer"])
    return {"same": comparison.report()}


def assigned(level: int, *, steps: int = 3) -> dict[str, Any]:
    """Data that is assigned to parameters between steps, and an average of the weights that is exchanged with them."""
    plain = build()
    plain_optimizer = OPTIMIZERS["sgd"](list(plain.parameters()))
    model, optimizer = start(build(), OPTIMIZERS["sgd"], shard=level)
    comparison = Comparison(f"assigned, shard {level}")
    for step in range(steps):
        plain_optimizer.zero_grad()
        for part in tokens(step).chunk(2 * MICROBATCHES):
            (plain(part) / (2 * MICROBATCHES)).backward()
        plain_optimizer.step()
        train(model, optimizer, step, step + 1)
        for p in (*plain.parameters(), *model.local_parameters()):
            p.data = p.data * 0.9
    halved = {name: p.detach() * 0.5 for name, p in model.local_named_parameters()}

    def exchange() -> None:
        for name, p in model.local_named_parameters():
            p.data, halved[name] = halved[name], p.data

    half = copy.deepcopy(plain)
    half.load_state_dict({name: value * 0.5 for name, value in plain.state_dict().items()})
    with torch.no_grad():
        for reference in (plain, half, plain):
            comparison.losses([float(model(tokens(9)))], [float(reference(tokens(9)))], what="losses")
            exchange()
    exchange()
    comparison.values(model.state_dict(), plain.state_dict(), relative=0.0, absolute=1e-4, what="weights")
    return {"same": comparison.report()}


def exact(level: int) -> dict[str, Any]:
    """Frozen weights are kept to the bit in 16 bits, and may be trained later."""
    made = build()
    before = {name: p.detach().clone() for name, p in made.blocks.named_parameters(prefix="blocks")}
    for p in made.blocks.parameters():
        p.requires_grad_(False)
    model, optimizer = start(made, OPTIMIZERS["sgd"], shard=level, bf16=True)
    losses = train(model, optimizer, 0, 2)["losses"]
    after = model.state_dict()
    comparison = Comparison(f"exact, shard {level}").losses(losses, losses)
    comparison.equal({name: after[name] for name in before}, before, what="frozen weights")
    return {"same": comparison.report()}


def evaluated(level: int) -> dict[str, Any]:
    """The forward pass outside of steps, between two of them, and steps without gradients, also with weights that were
    copied before or after parameters were cut; a fork that ends by itself, which has the connections of its parent."""
    made = build()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(dist.get_rank())  # training begins with the weights of the first replica
    model, optimizer = start(made, OPTIMIZERS["adamw"], shard=level)
    plain = build()
    first = torch.optim.swa_utils.AveragedModel(model)
    with torch.no_grad():
        begun = float(plain(tokens(9)))
    train(model, optimizer, 0, 1)
    second = torch.optim.swa_utils.AveragedModel(model)
    second.update_parameters(model)
    third = copy.deepcopy(first)
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        comparison = Comparison(f"evaluated, shard {level}").losses(
            [float(model(tokens(9)))], [float(plain(tokens(9)))]
        )
    expected = whole_run(build(), OPTIMIZERS["adamw"])
    process = os.fork()
    if process == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
    found = train(model, optimizer, 1, STEPS)
    comparison.losses(found["losses"], expected["losses"][1:], what="losses after")
    by_step = sw.step(lambda model, tokens: model(tokens))
    with torch.no_grad():
        for averaged, wanted in ((second, float(plain(tokens(9)))), (third, begun), (first, begun)):
            stepped = float(by_step(averaged, tokens(9).chunk(2)[sw.rdp_rank()]).all_reduce_mean())
            comparison.losses([float(averaged(tokens(9))), stepped], [wanted, wanted], what="losses of copies")
        average = {name: (begun + now) / 2 for (name, begun), now in zip(
            build().state_dict().items(), plain.state_dict().values(), strict=True)}  # fmt: skip
        first.load_state_dict({f"module.{name}": entry for name, entry in build().state_dict().items()}, strict=False)
        second.update_parameters(first.module)
        plain.load_state_dict(average)
        comparison.losses([float(second(tokens(9)))], [float(plain(tokens(9)))], what="losses of an average")
    comparison.values(model.state_dict(), expected["state"], relative=0.0, absolute=1e-4, what="weights")
    return {"same": comparison.report()}


class Clamped(nn.Module):
    """A block that changes its weight through ``.data`` whenever it is called."""

    def __init__(self, block: nn.Module, assigns: bool) -> None:
        super().__init__()
        self.block, self.assigns = block, assigns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.block[1].weight
        if self.assigns:
            weight.data = weight.data * 0.9
        else:
            weight.data.mul_(0.9)
        return self.block(x)


def refused(what: str) -> dict[str, Any]:
    try:
        if what == "coupled":
            train(*start(build(), OPTIMIZERS["coupled"], shard=1))
        elif what == "written":
            train(*start(build(max_norm=0.5), OPTIMIZERS["sgd"], shard=3))
        elif what == "late":
            model, _ = start(build(), OPTIMIZERS["sgd"], shard=2)
            train(model, sw.DistributedOptimizer(OPTIMIZERS["sgd"](list(model.parameters()))), 0, 1)
            sw.DistributedOptimizer(OPTIMIZERS["lamb"](list(model.parameters())))
        elif what == "unwrapped":
            model, _ = start(build(), OPTIMIZERS["sgd"], shard=2)
            train(model, OPTIMIZERS["lamb"](list(model.parameters())), 0, 1)
        elif what == "hooked":
            model, optimizer = start(build(), OPTIMIZERS["adamw"], shard=1)
            optimizer.optimizer.register_step_pre_hook(lambda *_: None)
            train(model, optimizer, 0, 1)
        elif what == "clipped":
            model, optimizer = start(build(), OPTIMIZERS["sgd"], shard=1)
            train(model, optimizer, 0, 1)
            torch.nn.utils.clip_grad_norm_([p for p in model.local_parameters() if p.grad is not None][:1], 1.0)
        elif what == "scaler":
            model, _ = start(build(), OPTIMIZERS["sgd"], shard=1)
            optimizer, scaler = OPTIMIZERS["sgd"](list(model.parameters())), torch.amp.GradScaler("cpu")
            scaler.scale(torch.ones(()))
            train_step(model, tokens(0).chunk(2)[sw.rdp_rank()])
            scaler.step(optimizer)
        elif what == "outside":
            model, optimizer = start(build(), OPTIMIZERS["sgd"], shard=1)
            train(model, optimizer, 0, 1)
            model(tokens(0)).backward()
        elif what in ("data", "reassigned"):
            made = build()
            made.blocks[0] = Clamped(made.blocks[0], what == "reassigned")
            train(*start(made, OPTIMIZERS["sgd"], shard=3))
        elif what == "group":
            sw.init({"ddp": True, "sharded_data_parallel_degree": 3})
        elif what == "both":
            sw.init({"ddp": True, "bf16": True, "fp16": True})
        elif what == "twice":
            sw.init({"ddp": True, "shard_optimizer_state": True, "sharded_data_parallel_degree": 2})
        elif what == "messages":
            sw.init({"ddp": True, "pipeline_mode": "messages", "shard": 1, "microbatches": MICROBATCHES})
            model = sw.DistributedModel(build())
            train_step(model, tokens(0).chunk(2)[sw.rdp_rank()])
    except ShardwrightError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    kind.__name__: kind
    for kind in (
        same, muon, dropped, limited, clipped, frozen, moved, assigned, exact, evaluated, freed, watched, refused,
    )
}  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    for case in sys.argv[2:]:
        kind, *rest = case.split(":")
        arguments = [int(part) if part.isdigit() else part for part in rest]
        found = KINDS[kind](*arguments)
        sw.shutdown()
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        results[case] = every
    leave(results, sys.argv[1])


if __name__ == "__main__":
    main()
