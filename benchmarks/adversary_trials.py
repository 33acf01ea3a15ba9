"""Disagreements between the ranks of a run: what one rank does differently, and when."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

import shardwright.torch as sw
from shardwright.core.plan.plan import Plan

WIDTH, MICROBATCHES, STEPS, RANKS = 8, 2, 4, 4
MESHES = ((2, 2, 1), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 4, 1))
"""(pp, dp, tp) of four ranks."""


class Block(nn.Module):
    def __init__(self, width: int, slope: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.slope = slope

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.leaky_relu(self.up(self.norm(x)), self.slope))


class OtherBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.down(nn.functional.leaky_relu(self.up(self.norm(x)), self.slope))


class Tower(nn.Module):
    def __init__(self, layers: int = 4, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear(width, width)
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x)) + self.shift


def build(seed: int = 0, **keys: Any) -> Tower:
    torch.manual_seed(seed)
    return Tower(**keys)


def batch_of(step: int, replica: int, rows: int = 2 * MICROBATCHES) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + replica)
    return torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made)


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out - y).square().mean()


@sw.step
def train_step(model, x, y, scale=1.0):
    loss = loss_of(model(x), y) * scale
    model.backward(loss)
    return loss


@sw.step
def other_step(model, x, y, scale=1.0):
    loss = (model(x) - y).abs().mean() * scale
    model.backward(loss)
    return loss


@sw.step
def evaluate(model, x, y, scale=1.0):
    return loss_of(model(x), y) * scale


@dataclass(frozen=True)
class Trial:
    """One run: ``kind`` happens on rank ``odd``, from step ``at`` on or before the first."""

    number: int
    mesh: tuple[int, int, int]
    kind: str
    odd: int
    at: int
    value: int
    mode: str
    from_plan: bool

    def __str__(self) -> str:
        mesh = ", ".join(f"{name} {size}" for name, size in zip(("pp", "dp", "tp"), self.mesh, strict=True))
        plan = " from a plan" if self.from_plan else ""
        return f"trial {self.number}: {self.kind} ({self.value}) on rank {self.odd} at step {self.at}; {mesh}{plan}"


def draw(seed: int, count: int) -> list[Trial]:
    """Random trials: every kind in turn, on random ranks, at random steps, on random meshes."""
    rng = random.Random(seed)
    kinds = [*CONFIGURATIONS, *PLANS, *MODELS, *BATCHES, *STATES, *CALLS]
    found = []
    while len(found) < count:
        rng.shuffle(kinds)
        for kind in kinds:
            mesh = rng.choice(MESHES)
            mode = "messages" if mesh[0] > 1 and mesh[2] == 1 and rng.random() < 0.2 else "auto"
            planned = kind in PLANS or (mode == "auto" and max(mesh[0], mesh[2]) > 1 and rng.random() < 0.15)
            if kind in PLANS and max(mesh[0], mesh[2]) == 1:
                mesh = MESHES[0]
            found.append(
                Trial(
                    len(found), mesh, kind, rng.randrange(RANKS), rng.randrange(STEPS), rng.randrange(1000),
                    "auto" if kind in PLANS else mode, planned,
                )
            )  # fmt: skip
    return found[:count]


# What can be different ----------------------------------------------------------------------------------------------

CONFIGURATIONS: dict[str, Callable[[Trial], dict[str, Any]]] = {
    "microbatches": lambda t: {"microbatches": MICROBATCHES + 1 + t.value % 3},
    "pipeline": lambda t: {"pipeline": ("gpipe", "zb-h1", "zbv")[t.value % 3]},
    "pipeline_parallel_degree": lambda t: {"pipeline_parallel_degree": 4 if t.mesh[0] != 4 else 2},
    "tensor_parallel_degree": lambda t: {"tensor_parallel_degree": 2 if t.mesh[2] == 1 else 1},
    "placement_strategy": lambda t: {"placement_strategy": ("TPD", "DPT", "TDP")[t.value % 3]},
    "seed of the configuration": lambda t: {"seed": 1 + t.value},
    "recompute": lambda t: {"recompute": "full"},
    "loss_scope": lambda t: {"loss_scope": "global"},
    "optimize": lambda t: {"optimize": "memory"},
    "prescaled_batch": lambda t: {"prescaled_batch": False},
    "active_microbatches": lambda t: {"active_microbatches": 1 + t.value % 2},
    "pipeline_mode": lambda t: {"pipeline_mode": "recorded"},
    "an unknown key": lambda t: {"pipeline_degre": 2},
    "ddp": lambda t: {"ddp": False},
    "compare_in_full_every": lambda t: {"compare_in_full_every": 7},
    "wait_timeout_s": lambda t: {"wait_timeout_s": 61.0},
}


def _moved_cut(plan: Plan) -> Plan:
    starts = list(plan.decision.stage_starts)
    end = [*starts[2:], len(plan.model.unit_classes)][0]
    others = [start for start in range(starts[0] + 1, end) if start != starts[1]] if len(starts) > 1 else []
    if not others:
        return _other_microbatch(plan)
    starts[1] = others[0]
    return replace(plan, decision=replace(plan.decision, stage_starts=tuple(starts)))


def _other_microbatch(plan: Plan) -> Plan:
    return replace(plan, decision=replace(plan.decision, batch=2 * plan.decision.batch))


PLANS: dict[str, Callable[[Plan], Plan | None]] = {
    "stages cut elsewhere": _moved_cut,
    "another schedule": lambda plan: replace(plan, decision=replace(plan.decision, schedule="gpipe")),
    "another batch": _other_microbatch,
    "another loss scope": lambda plan: replace(plan, decision=replace(plan.decision, loss_scope="global")),
    "no plan": lambda plan: None,
}


def _frozen(model: Tower) -> Tower:
    model.layers[1].up.weight.requires_grad_(False)
    return model


def _tied(model: Tower) -> Tower:
    model.layers[2].up.weight = model.layers[0].up.weight
    return model


def _swapped(model: Tower) -> Tower:
    model._modules["head"], model._modules["drop"] = model.drop, model.head
    model._modules = dict(reversed(model._modules.items()))
    return build_again(model)


def build_again(model: Tower) -> Tower:
    """The same modules in another order."""
    other = Tower.__new__(Tower)
    nn.Module.__init__(other)
    parts = build()
    for name in ("head", "drop", "layers"):
        setattr(other, name, getattr(parts, name))
    other.register_buffer("shift", torch.zeros(WIDTH))
    return other


def _with(path: str, make: Callable[[nn.Module], nn.Module]) -> Callable[[Tower, int], Tower]:
    def change(model: Tower, _: int) -> Tower:
        holder, _, last = path.rpartition(".")
        parent = model.get_submodule(holder)
        setattr(parent, last, make(getattr(parent, last)))
        return model

    return change


def _attribute(model: Tower, path: str, name: str, value: Any) -> Tower:
    setattr(model.get_submodule(path), name, value)
    return model


def _wider_buffer(model: Tower, _: int) -> Tower:
    model.register_buffer("shift", torch.zeros(1, WIDTH))
    return model


MODELS: dict[str, Callable[[Tower, int], Tower]] = {
    "a wider model": lambda model, v: build(width=2 * WIDTH),
    "one layer more": lambda model, v: build(layers=5),
    "one layer less": lambda model, v: build(layers=3),
    "another dtype": lambda model, v: model.double(),
    "half a model in another dtype": lambda model, v: (model.layers[v % 4].double(), model)[1],
    "a frozen weight": lambda model, v: _frozen(model),
    "a tie": lambda model, v: _tied(model),
    "another order of modules": lambda model, v: build_again(model),
    "another class of block": _with("layers.3", lambda old: OtherBlock(WIDTH)),
    "another slope": lambda model, v: _attribute(model, f"layers.{v % 4}", "slope", 0.25),
    "another dropout": lambda model, v: _attribute(model, "drop", "p", 0.5),
    "another epsilon": lambda model, v: _attribute(model, f"layers.{v % 4}.norm", "eps", 1e-2),
    "evaluation mode when wrapped": lambda model, v: model.eval(),
    "a buffer of another shape": _wider_buffer,
    "no bias": _with("head", lambda old: nn.Linear(WIDTH, WIDTH, bias=False)),
    "other first weights": lambda model, v: build(seed=1 + v),
    "one first weight changed": lambda model, v: _add_to(model, v),
    "a hook": lambda model, v: (model.layers.register_forward_hook(lambda *_: None), model)[1],
    "another first buffer": lambda model, v: (model.shift.fill_(1.0), model)[1],
}


FIRST_VALUES = ("other first weights", "one first weight changed", "another first buffer")


def _add_to(model: Tower, value: int) -> Tower:
    with torch.no_grad():
        model.layers[value % 4].up.weight[0, 0] += 1.0
    return model


Batch = dict[str, Any]

BATCHES: dict[str, Callable[[Batch, Trial], Batch]] = {
    "another batch of data": lambda b, t: b | {"x": batch_of(77 + t.value, 9)[0]},
    "other labels": lambda b, t: b | {"y": batch_of(77 + t.value, 9)[1]},
    "one entry": lambda b, t: b | {"x": _one_entry(b["x"], t.value)},
    "two samples swapped": lambda b, t: b | {"x": b["x"][[1, 0, *range(2, len(b["x"]))]]},
    "one sample less": lambda b, t: {k: v[:-1] for k, v in b.items()},
    "one sample more": lambda b, t: {k: torch.cat([v, v[:1]]) for k, v in b.items()},
    "no samples": lambda b, t: {k: v[:0] for k, v in b.items()},
    "inputs in another dtype": lambda b, t: b | {"x": b["x"].double()},
    "one dim more": lambda b, t: {k: v.unsqueeze(1) for k, v in b.items()},
    "inputs that take gradients": lambda b, t: b | {"x": b["x"].clone().requires_grad_()},
    "another Python value": lambda b, t: b | {"scale": 1.0 + t.value},
    "a Python value that the others leave out": lambda b, t: b | {"scale": 1.0},
    "an argument that is not known": lambda b, t: b | {"z": b["x"]},
    "labels left out": lambda b, t: {"x": b["x"]},
    "a list for a tensor": lambda b, t: b | {"scale": [1.0]},
}
"""Of ranks of one replica; of another replica these are different data, and a trial of it is judged by its result."""


def _one_entry(x: torch.Tensor, value: int) -> torch.Tensor:
    out = x.clone()
    out.view(-1)[value % x.numel()] += 1e-3
    return out


State = Callable[["Run", Trial], Any]


def _flip(run: "Run", trial: Trial) -> None:
    parameters = list(run.model.module.parameters())
    parameters[trial.value % len(parameters)].requires_grad_(False)


def _replace_module(run: "Run", trial: Trial) -> None:
    run.model.module.layers[trial.value % 4] = Block(WIDTH)


def _load(run: "Run", trial: Trial) -> None:
    run.model.load_state_dict(build(seed=5).state_dict())


def _nudge(run: "Run", trial: Trial) -> None:
    with torch.no_grad():
        for parameter in run.model.local_parameters():
            parameter.add_(0.01)


def _change_rate(run: "Run", trial: Trial) -> None:
    run.optimizer.param_groups[0]["lr"] *= 2


def _skip(run: "Run", trial: Trial) -> None:
    run.skips = True


def _other_schedule(run: "Run", trial: Trial) -> None:
    run.model.use_schedule("gpipe")


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, State] = {
    "the seed": lambda run, t: sw.set_seed(5 + t.value),
    "evaluation mode": lambda run, t: run.model.eval(),
    "one module in evaluation mode": lambda run, t: run.model.module.layers[t.value % 4].eval(),
    "a weight frozen later": _flip,
    "a module replaced": _replace_module,
    "other weights loaded": _load,
    "weights changed in place": _nudge,
    "another learning rate": _change_rate,
    "an optimizer step left out": _skip,
    "an optimizer step more": lambda run, t: run.optimizer.step(),
    "another schedule later": _other_schedule,
    "no gradients": lambda run, t: run.use(torch.no_grad),
    "inference mode": lambda run, t: run.use(torch.inference_mode),
    "autocast": lambda run, t: run.use(partial(torch.autocast, "cpu", torch.bfloat16)),
    "another default dtype": lambda run, t: run.use(_default_dtype),
    "weights moved to another dtype": lambda run, t: run.model.module.double(),
}


class Strange(Exception):
    """What a script of a user may raise."""


def _raise(run: "Run", trial: Trial) -> None:
    raise Strange("out of luck")


def _body_raises(run: "Run", trial: Trial) -> None:
    @sw.step
    def train_step(model, x, y, scale=1.0):
        raise Strange("in the body")

    train_step(run.model, **run.batch)


CALLS: dict[str, State] = {
    "clipping": lambda run, t: run.model.clip_grad_norm_(1.0),
    "the state dict": lambda run, t: run.model.state_dict(),
    "the state dict of rank 0": lambda run, t: run.model.state_dict(rank0_only=True),
    "the states of the optimizer": lambda run, t: run.optimizer.state_dict(),
    "a barrier": lambda run, t: sw.barrier(),
    "a step more": lambda run, t: train_step(run.model, **run.batch),
    "another step function": lambda run, t: other_step(run.model, **run.batch),
    "an evaluation": lambda run, t: evaluate(run.model, **run.batch),
    "an error before the step": _raise,
    "an error in the body of another step": _body_raises,
    "the end of training": lambda run, t: sw.shutdown(),
}


class Run:
    """One rank's training in a trial."""

    def __init__(self, trial: Trial, rank: int, plans: dict[tuple[int, int, int], Plan]) -> None:
        self.trial, self.rank, self.is_odd = trial, rank, rank == trial.odd
        self.plans = plans
        self.skips = False
        self.context: Callable[[], Any] = nullcontext
        self.batch: Batch = {}
        self.model: Any = None
        self.optimizer: Any = None

    def use(self, context: Callable[[], Any]) -> None:
        self.context = context

    def begin(self) -> None:
        trial = self.trial
        pp, _, tp = trial.mesh
        full = {"compare_in_full_every": 1} if trial.kind == "weights changed in place" else {}
        common: dict[str, Any] = {"wait_timeout_s": 60.0, **full}
        config = {
            "pipeline_parallel_degree": pp, "tensor_parallel_degree": tp, "microbatches": MICROBATCHES, "ddp": True,
            "pipeline_mode": trial.mode,
        }  # fmt: skip
        plan: Plan | None = self.plans[trial.mesh] if trial.from_plan else None
        other = CONFIGURATIONS[trial.kind](trial) if trial.kind in CONFIGURATIONS and self.is_odd else {}
        if trial.kind in PLANS and self.is_odd and plan is not None:
            plan = PLANS[trial.kind](plan)
        if plan is None:
            sw.init(config | common | other)
        else:
            sw.init(common | other, plan=plan)
        module = build()
        if trial.kind in MODELS and self.is_odd:
            module = MODELS[trial.kind](module, trial.value)
        self.model = sw.DistributedModel(module)
        self.optimizer = sw.DistributedOptimizer(torch.optim.SGD(self.model.parameters(), lr=0.05))

    def step(self, number: int) -> float:
        trial = self.trial
        x, y = batch_of(number, sw.rdp_rank())
        self.batch = {"x": x, "y": y}
        now = self.is_odd and number == trial.at
        if now and trial.kind in STATES:
            STATES[trial.kind](self, trial)
        if now and trial.kind in CALLS:
            CALLS[trial.kind](self, trial)
        if now and trial.kind in BATCHES:
            self.batch = BATCHES[trial.kind](self.batch, trial)
        self.optimizer.zero_grad()
        with self.context():
            loss = train_step(self.model, **self.batch).all_reduce_mean().item()
        if not (now and self.skips):
            self.optimizer.step()
        return float(loss)


def reference(trial: Trial) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and the last weights of the model that is not split."""
    model = build()
    if trial.odd == 0 and trial.kind in FIRST_VALUES:  # those of rank 0 are taken
        model = MODELS[trial.kind](model, trial.value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for number in range(STEPS):
        parts = []
        for replica in range(trial.mesh[1]):
            batch = dict(zip(("x", "y"), batch_of(number, replica), strict=True))
            if trial.kind in BATCHES and number == trial.at and replica_of(trial) == replica and is_alone(trial):
                batch = BATCHES[trial.kind](batch, trial)
            parts.append(batch)
        optimizer.zero_grad()
        sizes = [len(part["x"]) for part in parts]
        loss = sum(
            (
                len(part["x"]) / sum(sizes) * loss_of(model(part["x"]), part["y"]) * part.get("scale", 1.0)
                for part in parts
            ),
            torch.zeros(()),
        )
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses, copy.deepcopy(model.state_dict())


def replica_of(trial: Trial) -> int:
    """The dp coordinate of the odd rank: axes lie pp, dp, tp."""
    return trial.odd // trial.mesh[2] % trial.mesh[1]


def is_alone(trial: Trial) -> bool:
    """Whether the odd rank is a replica by itself, so that another batch is its own to choose."""
    return trial.mesh[0] == trial.mesh[2] == 1
