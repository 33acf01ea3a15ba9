"""Python values that a step or a model reads and that change between steps, against the unsplit model. Prints `ok NAME`
for each case; any failure ends the launch.

Usage: python_values.py KIND, where KIND is one, pp, tp or messages.
"""

import copy
import dataclasses
import os
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import impure_calls
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError, UnrecordableError
from tests.comparison import Comparison

KIND = sys.argv[1]
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {},
    "pp": {"pipeline_parallel_degree": 2, "pipeline_mode": "recorded"},
    "tp": {"tensor_parallel_degree": 2, "pipeline_mode": "recorded"},
    "messages": {"pipeline_parallel_degree": 2, "pipeline_mode": "messages"},
}
MICROBATCHES, WIDTH, STEPS = 2, 8, 3
beta = 0.25
"""A global that a step reads."""
settings: dict[str, Any] = {"beta": 0.5, "count": 0, "nested": {"gamma": [1.0, 2.0]}}


@dataclass
class LossConfig:
    kind: str = "l2"
    weight: float = 1.0


@dataclass(frozen=True)
class Frozen:
    scale: float = 1.0


class Schedule:
    """A value behind a method and a property."""

    def __init__(self) -> None:
        self._now = 1.0

    @property
    def value(self) -> float:
        return self._now * 2.0

    def at(self) -> float:
        return self._now


schedule = Schedule()


def criterion(output: torch.Tensor, target: torch.Tensor, power: float = 2.0) -> torch.Tensor:
    return ((output - target).abs() ** power).mean()


class Model(nn.Module):
    """Blocks, and between them whatever a case is about."""

    factor = 1.0

    def __init__(self, glue: Callable[["Model", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.drop = nn.Dropout(0.0)
        self.glue = glue
        self.tau, self.mode, self.act = 1.0, "plus", torch.tanh
        self.config = types.SimpleNamespace(loss=LossConfig(), name="x")
        self.frozen = Frozen()
        self.beta_0, self.beta_1 = 0.5, 0.25
        self.table = [1.0, 2.0]
        self.constant = torch.tensor(0.5)
        self.register_buffer("scale", torch.tensor(0.5))
        self.n = 0
        self.average = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.glue(self, x)


def plain_glue(model: Model, x: torch.Tensor) -> torch.Tensor:
    return x


def loss_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = criterion(model(x), y)
    model.backward(loss)
    return loss


class Reference:
    """The unsplit model as a step sees it: gradients add up over the microbatches."""

    def __init__(self, module: Model) -> None:
        self.module = module

    def __call__(self, *given: Any, **named: Any) -> Any:
        return self.module(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / MICROBATCHES).backward()


@dataclass
class Case:
    """A value and how it changes: ``change(model, step)`` is called before each step, for either model.

    ``recordings``: the most that there may be, over all steps.
    """

    change: Callable[[Any, int], Any]
    glue: Callable[[Model, torch.Tensor], torch.Tensor] = plain_glue
    step: Callable[..., Any] = loss_step
    given: Callable[[int], tuple[Any, ...]] = lambda step: ()
    recordings: int | None = None


CASES: dict[str, Case] = {}


def case(**fields: Any) -> Callable[[Callable[[Any, int], Any]], None]:
    def add(change: Callable[[Any, int], Any]) -> None:
        CASES[change.__name__] = Case(change, **fields)

    return add


@case(glue=lambda model, x: x / model.tau)
def an_attribute(model: Any, step: int) -> None:
    model.tau = 1.0 - 0.1 * step


@case(glue=lambda model, x: x * 2.0 if model.mode == "plus" else x * -1.0)
def a_text(model: Any, step: int) -> None:
    model.mode = "plus" if step % 2 else "minus"


@case(glue=lambda model, x: model.act(x))
def a_function(model: Any, step: int) -> None:
    model.act = (torch.tanh, F.gelu)[step % 2]


@case(glue=lambda model, x: x * model.config.loss.weight)
def a_nested_object(model: Any, step: int) -> None:
    model.config.loss.weight = 1.0 + step


@case(glue=lambda model, x: x * model.frozen.scale)
def a_replaced_object(model: Any, step: int) -> None:
    model.frozen = dataclasses.replace(model.frozen, scale=1.0 + step)


@case(glue=lambda model, x: x * getattr(model, f"beta_{model.table.index(2.0)}"))
def an_attribute_by_its_name_in_parts(model: Any, step: int) -> None:
    model.beta_1 = 0.25 * step


@case(glue=lambda model, x: x * model.table[0] + sum(model.table))
def items_of_a_list(model: Any, step: int) -> None:
    model.table[0] = 3.0 + step
    if step == 2:
        model.table.append(4.0)


@case(glue=lambda model, x: x * model.factor)
def an_attribute_of_a_class(model: Any, step: int) -> None:
    if step < 2:
        Model.factor = 1.0 + step
    else:
        model.factor = 7.0 + step


@case(glue=lambda model, x: x + model.constant)
def a_tensor_that_is_no_buffer(model: Any, step: int) -> None:
    model.constant = torch.tensor(0.5 + step)


@case(glue=lambda model, x: x * model.scale)
def a_buffer_in_place(model: Any, step: int) -> None:
    model.scale.fill_(1.0 + step)


@case(glue=lambda model, x: model.drop(x))
def dropout(model: Any, step: int) -> None:
    model.drop.p = float(step % 2)


def global_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = criterion(model(x), y) * beta
    model.backward(loss)
    return loss


@case(step=global_step)
def a_global(model: Any, step: int) -> None:
    global beta
    beta = 0.25 + step


def dict_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = criterion(model(x), y) * settings["beta"] + settings["nested"]["gamma"][1]
    model.backward(loss)
    return loss


@case(step=dict_step)
def entries_of_a_dict(model: Any, step: int) -> None:
    settings["beta"] = 0.5 + step
    settings["nested"]["gamma"][1] = 2.0 * step


def schedule_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = criterion(model(x), y) * schedule.value + schedule.at()
    model.backward(loss)
    return loss


@case(step=schedule_step)
def a_property_and_a_method(model: Any, step: int) -> None:
    schedule._now = 1.0 + step


def default_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = criterion(model(x), y)
    model.backward(loss)
    return loss


@case(step=default_step)
def a_default(model: Any, step: int) -> None:
    criterion.__defaults__ = (2.0 + step,)


def environment_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = criterion(model(x), y) * float(os.environ.get("BETA", "1.0"))
    model.backward(loss)
    return loss


@case(step=environment_step)
def the_environment(model: Any, step: int) -> None:
    os.environ["BETA"] = str(1.0 + step)


def argument_step(model: Any, x: torch.Tensor, y: torch.Tensor, weight: float, config: Any) -> torch.Tensor:
    loss = criterion(model(x), y) * weight * config.weight
    model.backward(loss)
    return loss


CONFIG = LossConfig()


@case(step=argument_step, given=lambda step: (1.0 + step, CONFIG))
def arguments(model: Any, step: int) -> None:
    CONFIG.weight = 1.0 + step % 2


def make_closure() -> tuple[Callable[..., Any], Callable[[Any, int], None]]:
    weight = 1.0
    inner = {"more": 0.0}

    def closure_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = criterion(model(x), y) * weight + inner["more"]
        model.backward(loss)
        return loss

    def set_weight(model: Any, step: int) -> None:
        nonlocal weight
        weight, inner["more"] = 1.0 + step, float(step)

    return closure_step, set_weight


CLOSURE_STEP, set_closure = make_closure()


@case(step=CLOSURE_STEP)
def a_closure(model: Any, step: int) -> None:
    set_closure(model, step)


def module_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = smooth(model(x), y)
    model.backward(loss)
    return loss


smooth = nn.HuberLoss(delta=1.0)


@case(step=module_step)
def an_attribute_of_a_loss(model: Any, step: int) -> None:
    smooth.delta = 0.1 + step


@case(step=default_step, glue=lambda model, x: x * torch.ones(1, dtype=torch.get_default_dtype()).to(x.dtype).sum())
def nothing(model: Any, step: int) -> None:
    model.unread = step


def counting(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.n += 1
    return x * (1.0 + 0.1 * model.n)


@case(glue=counting)
def a_counter_in_forward(model: Any, step: int) -> None:
    pass


def averaging(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.average = 0.9 * model.average + 0.1 * model.tau
    return x + model.average


@case(glue=averaging)
def an_average_in_forward(model: Any, step: int) -> None:
    model.tau = 1.0 + step


def remembering(model: Model, x: torch.Tensor) -> torch.Tensor:
    if model.mode == "plus":
        model.mode = "minus"
        return x + 1.0
    model.table.append(2.0)
    return x - float(len(model.table))


@case(glue=remembering)
def a_flag_and_a_list_in_forward(model: Any, step: int) -> None:
    pass


def counting_step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    settings["count"] += 1
    loss = criterion(model(x), y) * float(settings["count"])
    model.backward(loss)
    return loss


@case(step=counting_step)
def a_counter_in_the_step(model: Any, step: int) -> None:
    settings["count"] = 0


def keeping(model: Model, x: torch.Tensor) -> torch.Tensor:
    last, model.last = model.last, x.detach()
    return x if last is None else x + last


def kept_tensor() -> None:
    """A tensor that a model keeps for its next step is refused where it would be lost."""
    sw.init(CONFIGS[KIND], microbatches=MICROBATCHES, wait_timeout_s=60.0)
    model = Model(keeping)
    model.last = None
    distributed, step = sw.DistributedModel(model), sw.step(loss_step)
    with pytest.raises(UnrecordableError, match=r"Model\.last, and reads what is there"):
        step(distributed, torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    sw.shutdown()
    report("a_tensor_kept_in_forward")


def changed_on_one_rank() -> None:
    """A value that changes on one of several ranks ends the step on all of them."""
    sw.init(CONFIGS[KIND], microbatches=MICROBATCHES, wait_timeout_s=60.0)
    distributed, step = sw.DistributedModel(Model(lambda model, x: x / model.tau)), sw.step(loss_step)
    for _ in range(2):
        step(distributed, torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    if dist.get_rank() == 1:
        distributed.tau = 0.5
    with pytest.raises(
        ShardwrightError, match=r"numbers that the step reads|whether there is a recording|what the step does"
    ):
        step(distributed, torch.ones(4, WIDTH), torch.ones(4, WIDTH))
    sw.shutdown()
    report("changed_on_one_rank")


def report(name: str, more: str = "") -> None:
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"ok {name}{more}", flush=True)


def run(name: str, given: Case) -> None:
    start = {k: copy.deepcopy(globals()[k]) for k in ("beta", "settings")}
    sw.init(CONFIGS[KIND], microbatches=MICROBATCHES, wait_timeout_s=60.0)
    model = Model(given.glue)
    reference = Reference(copy.deepcopy(model))
    distributed = sw.DistributedModel(model)
    step = sw.step(given.step)
    optimizers = (
        torch.optim.SGD(reference.module.parameters(), lr=0.1),
        sw.DistributedOptimizer(torch.optim.SGD(distributed.parameters(), lr=0.1)),
    )
    same = Comparison(name)
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        x, y = (torch.randn(4, WIDTH, generator=generator) for _ in range(2))
        extra = given.given(number)
        for optimizer in optimizers:
            optimizer.zero_grad()
        given.change(reference.module, number)
        losses = [given.step(reference, *part, *extra) for part in zip(x.chunk(2), y.chunk(2), strict=True)]
        given.change(distributed, number)
        loss = step(distributed, x, y, *extra)
        same.where = f"step {number}"
        same.losses(loss.reduce_mean(), torch.stack(losses).mean().detach())
        for optimizer in optimizers:
            optimizer.step()
    same.values(distributed.state_dict(), reference.module.state_dict(), relative=1e-4, absolute=1e-6, what="weights")
    same.require()
    made = distributed.runtime.split_model.bodies.recorded
    assert given.recordings is None or made <= given.recordings, (name, made)
    sw.shutdown()
    globals().update(start)
    report(name, f" ({made} recordings)")


def main() -> None:
    warnings.simplefilter("ignore")
    if KIND != "one":
        dist.init_process_group("gloo")
    only = sys.argv[2:]
    for name in only or list(CASES):
        run(name, CASES[name])
        if KIND != "one":
            dist.barrier()
    if KIND in ("one", "pp"):
        for check in impure_calls.CHECKS:
            check({**CONFIGS[KIND], "microbatches": MICROBATCHES, "wait_timeout_s": 60.0}, KIND == "one")
            report(check.__name__)
    if KIND in ("pp", "tp"):
        kept_tensor()
        dist.barrier()
        changed_on_one_rank()
        dist.barrier()
    if KIND != "one":
        dist.destroy_process_group()


main()
