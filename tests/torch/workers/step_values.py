"""What goes into steps and comes out of them as SageMaker's scripts have it: step_values.py PP."""

import logging
import sys
from typing import Any

import models
import numpy as np
import pytest
import torch
import torch.distributed as dist
from launched import chosen, run_checks
from torch import nn

import shardwright.compat.modelparallel as smp
import shardwright.torch as sw
from shardwright.core.errors import DisagreementError, ShardwrightError
from tests.comparison import Comparison

PP = int(sys.argv[1])
sys.argv[1:] = sys.argv[2:]


class Graph:
    """A batch of rows with what all of them share, as a library of graphs has them."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor, power: int = 2) -> None:
        self.held = {"x": x, "y": [y]}
        self.scale, self.power = scale, power

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> "Graph":
        x, y = (tensor.tensor_split(num_mb, axis)[mb] for tensor in (self.held["x"], self.held["y"][0]))
        return Graph(x, y, self.scale, self.power)


class Numbered(Graph):
    def smp_slice(self, num_mb: int, mb: int, axis: int) -> "Graph":
        part = super().smp_slice(num_mb, mb, axis)
        return Graph(part.held["x"], part.held["y"][0], part.scale, mb)


class Backwards(Graph):
    def smp_slice(self, num_mb: int, mb: int, axis: int) -> "Graph":
        return super().smp_slice(num_mb, num_mb - 1 - mb, axis)


def batch(step: int, samples: int = 7, kind: type[Graph] = Graph, power: int = 2) -> Graph:
    random = torch.Generator().manual_seed(step)
    x, y = torch.randn(samples, 6, generator=random), torch.randn(samples, 6, generator=random)
    return kind(x, y, torch.tensor([2.0 + step]), power)


def loss_of(model: Any, given: Graph) -> torch.Tensor:
    return ((model(given.held["x"]) - given.held["y"][0]).abs() ** given.power).mean() * given.scale[0]


@smp.step
def train_step(model: Any, given: Graph) -> torch.Tensor:
    loss = loss_of(model, given)
    model.backward(loss)
    return loss


@smp.step
def beside_rows(model: Any, given: Graph, rows: torch.Tensor) -> torch.Tensor:
    return loss_of(model, given) + rows.sum()


@smp.step
def nested_step(model: Any, given: Any) -> torch.Tensor:
    return model(given["x"][0].held["x"])


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))


def begin() -> Any:
    smp.init({"partitions": PP, "microbatches": 3})
    return smp.DistributedModel(build())


def objects_are_sliced_as_they_say() -> None:
    plain = build()
    reference = torch.optim.SGD(plain.parameters(), lr=0.05)
    model = begin()
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    compared = Comparison("objects")
    for step, power in enumerate((2, 2, 3, 2)):  # another number among its values is another program
        reference.zero_grad()
        expected = loss_of(plain, batch(step, power=power))
        expected.backward()
        optimizer.zero_grad()
        given = batch(step if smp.pp_rank() == 0 else 77, power=power)  # only that of the first rank counts
        found = train_step(model, given)
        compared.losses(found.all_reduce_mean(), expected.detach())
        reference.step()
        optimizer.step()
    compared.values(model.state_dict(), plain.state_dict(), relative=1e-5, absolute=1e-6).require()
    with torch.no_grad():
        rows = torch.ones(7, 2)
        found = beside_rows(model, batch(0), rows)
        parts = [batch(0).smp_slice(3, m, 0) for m in range(3)]
        wanted = [loss_of(plain, part) + 2.0 * len(part.held["x"]) for part in parts]
        Comparison("beside tensors").losses([*found.outputs], [*wanted]).require()
    for given, said in (
        (batch(0, kind=Numbered), r"given\.smp_slice gives microbatch 1 other values beside its tensors"),
        (batch(0, samples=2), "leaves a microbatch without samples"),
    ):
        with pytest.raises((ShardwrightError, DisagreementError), match=said):
            train_step(model, given)
    with pytest.raises(ShardwrightError, match=r"given is cut into microbatches of \[2, 2, 3\] samples, and the other"):
        beside_rows(model, batch(0, kind=Backwards), rows)
    with torch.no_grad():
        nested = nested_step(model, {"x": [batch(0)]}).concat()
        Comparison("nested").values(nested, plain(batch(0).held["x"]), relative=1e-5, absolute=1e-6).require()
    bare = type("Bare", (), {})()
    bare.x = torch.ones(3)
    with pytest.raises(ShardwrightError, match="a Bare among the arguments of the step holds tensors"):
        nested_step(model, {"x": [bare]})
    sw.shutdown()


def read(model: Any, batch: dict[str, torch.Tensor], label: str) -> Any:
    out = model(**batch)
    correct = (out.logits[:, :-1].argmax(-1) == batch["labels"][:, 1:]).sum()
    return {"loss": out.loss.item(), "correct": correct.item(), "any": (correct > 2).item(), "label": label,
            "none": None, "tensor": out.loss}  # fmt: skip


read_step = smp.step(read)


@smp.step
def reading_step(model: Any, batch: dict[str, torch.Tensor], label: str) -> Any:
    found = read(model, batch, label)
    return {**found, "twice": 2 * found["loss"]}


@smp.step
def text_step(model: Any, batch: dict[str, torch.Tensor], label: str) -> Any:
    return model(**batch).loss, label, 5


@smp.step
def step_with_optimizer(model: Any, optimizer: Any, given: Graph, where: str) -> torch.Tensor:
    loss = loss_of(model, given)
    model.backward(loss)
    if where == "inside":
        optimizer.step()
    return loss


def optimizers_are_arguments_and_step_behind_the_step() -> None:
    model = begin()
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        losses.append(float(step_with_optimizer(model, optimizer, batch(step), "after").all_reduce_mean()))
        optimizer.step()
    with pytest.raises(
        (ShardwrightError, DisagreementError), match=r"optimizer\.step\(\) is called inside of the step"
    ):
        step_with_optimizer(model, optimizer, batch(0), "inside")
    plain = build()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step, found in enumerate(losses):
        reference.zero_grad()
        loss = loss_of(plain, batch(step))
        loss.backward()
        Comparison("with an optimizer").losses([found], [loss.detach()]).require()
        reference.step()
    sw.shutdown()


LOG = logging.getLogger("a user's")


@smp.step
def logging_step(model: Any, x: torch.Tensor) -> Any:
    value = model(x).sum()
    LOG.warning("value %.3f", value.item())
    return value


@smp.step
def building_step(model: Any, x: torch.Tensor) -> Any:
    return torch.tensor([model(x).sum().item()])


def a_number_that_is_used_within_the_step_is_there() -> None:
    plain, x = build(), batch(0).held["x"]
    for step in (logging_step, building_step):
        model = begin()
        said: list[str] = []
        listens = logging.Handler()
        listens.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        LOG.addHandler(listens)
        with torch.no_grad():
            found = step(model, x)
        LOG.removeHandler(listens)
        Comparison(step.__name__).losses([float(one) for one in found.outputs], even(plain, x)).require()
        assert model.runtime.messages is not None
        if step is logging_step and smp.pp_rank() == 0:
            # Before its modules are divided over the ranks the body runs once, on the first microbatch.
            assert said[-3:] == [f"value {one:.3f}" for one in even(plain, x)], said
        sw.shutdown()


def even(plain: nn.Module, x: torch.Tensor) -> list[float]:
    """The values of the microbatches, which are cut as tensors are."""
    with torch.no_grad():
        return [float(plain(part).sum()) for part in x.split([3, 2, 2])]


def numbers_come_once_for_each_microbatch() -> None:
    smp.init({"partitions": PP, "microbatches": 3})
    torch.manual_seed(0)
    model = smp.DistributedModel(models.build("gpt2").eval())
    torch.manual_seed(0)
    plain = models.build("gpt2").eval()
    data = models.batch("gpt2", 0, 6)
    parts = [{key: tensor[2 * m : 2 * m + 2] for key, tensor in data.items()} for m in range(3)]
    with torch.no_grad():
        outs = [plain(**part) for part in parts]
        loss, label, five = text_step(model, data, "a label")
        assert model.runtime.messages is None
        assert (label, five) == (["a label"] * 3, [5] * 3)
        alike = {key: tensor[:2].repeat(3, 1) for key, tensor in data.items()}
        recorded = read_step(model, data, "a label"), read_step(model, alike, "a label")
        assert model.runtime.messages is None, "what is only returned is read when the step has run"
        by_messages = reading_step(model, data, "a label"), reading_step(model, alike, "a label")
        assert model.runtime.messages is not None
    losses = [float(out.loss) for out in outs]
    correct = [
        int((out.logits[:, :-1].argmax(-1) == part["labels"][:, 1:]).sum())
        for out, part in zip(outs, parts, strict=True)
    ]
    Comparison("tensors").losses(loss.outputs, losses).require()
    for found, same in (recorded, by_messages):
        assert all(type(one) is float for one in found["loss"])
        Comparison("numbers").losses(found["loss"], losses).losses(found["tensor"].outputs, losses).require()
        assert found["correct"] == correct
        assert all(type(one) is int for one in found["correct"])
        assert found["any"] == [one > 2 for one in correct]
        assert (found["label"], found["none"]) == (["a label"] * 3, None)
        assert same["correct"] == [correct[0]] * 3, "a list too where all are alike"
    Comparison("twice").losses(by_messages[0]["twice"], [2 * one for one in losses]).require()
    sw.shutdown()


@smp.step
def sized_step(model: Any, given: Graph) -> Any:
    loss = loss_of(model, given)
    model.backward(loss)
    rows = given.held["x"].shape[0]
    return loss, loss.item(), rows, f"{rows} rows"


def what_is_no_tensor_is_that_of_each_microbatch() -> None:
    model, plain, x = begin(), build(), batch(0).held["x"]
    loss, numbers, sizes, texts = sized_step(model, batch(0))
    assert model.runtime.messages is None, "what is only returned is read when the step has run"
    assert (sizes, texts) == ([3, 2, 2], ["3 rows", "2 rows", "2 rows"])
    Comparison("numbers").losses(numbers, [float(one) for one in loss.outputs]).require()
    loss_of(plain, batch(0)).backward()
    found = {name: p.grad for name, p in model.local_named_parameters()}
    wanted = {name: p.grad for name, p in plain.named_parameters() if name in found}
    Comparison("a loss that is read once it was given").gradients(found, wanted).require()
    counting, naming = sw.step(lambda model, x: (model(x), len(x))), sw.step(lambda model, x: (model(x), str(len(x))))
    scaling = sw.step(lambda model, x, factors: model(x).sum() * float(factors.sum()))
    factors, spread = np.zeros(2), slice(0, 2)
    placing = sw.step(lambda model, x: (model(x), x.device, slice(0, 2)))
    weighing = sw.step(lambda model, x: (model(x), 2.0**40 + len(x)))
    with torch.no_grad():
        assert [int(one) for one in counting(model, x)[1].outputs] == [3, 2, 2]
        for given in (factors, factors.astype(object), np.ma.masked_array(np.zeros(3), [False, True, False])):
            for value in (0.5, 1.5, 0.5):
                given[:] = value
                if isinstance(given, np.ma.MaskedArray):
                    given[1] = np.ma.masked
                scaled = [2 * value * one for one in even(plain, x)]
                Comparison("an array written to").losses(scaling(model, x, given).outputs, scaled).require()
        for count in (1, 2):  # another mask of the same entries
            given.mask = [False, True, count == 1]
            scaled = [0.5 * count * one for one in even(plain, x)]
            Comparison("a mask").losses(scaling(model, x, given).outputs, scaled).require()
        assert placing(model, x)[1:] == (torch.device("cpu"), spread)
        assert [one.tolist() for one in weighing(model, x)[1].outputs] == [2.0**40 + rows for rows in (3, 2, 2)]
        with pytest.raises(ShardwrightError, match="leaf 1 of what the step returned differs between microbatches"):
            naming(model, x)
    sw.shutdown()


def numbers_kept_for_the_next_microbatch_are_those_of_the_one_before() -> None:
    kept = {"factor": 1.0}

    def body(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean() * kept["factor"]
        model.backward(loss)
        kept["factor"] = 1.0 + loss.item()
        return loss

    for library in (smp, sw):
        plain, kept["factor"] = build(), 1.0
        given = batch(0)
        x, y = given.held["x"], given.held["y"][0]
        wanted, factor = [], 1.0
        for _ in range(2):
            for part, labels in zip(x.split([3, 2, 2]), y.split([3, 2, 2]), strict=True):
                loss = (plain(part) - labels).square().mean() * factor
                (loss * len(part) / len(x)).backward()
                factor = 1.0 + loss.item()
                wanted.append(loss.item())
        library.init(
            {
                "pipeline_parallel_degree": PP,
                "microbatches": 3,
                "pipeline_mode": "auto" if library is smp else "messages",
            }
        )
        model = library.DistributedModel(build())
        step = library.step(body)
        found = [one for _ in range(2) for one in step(model, x, y).outputs]
        assert model.runtime.messages is not None
        held = {name: p.grad for name, p in model.local_named_parameters()}
        same = Comparison(f"kept numbers, {library.__name__}").losses(found, wanted)
        same.gradients(held, {name: p.grad for name, p in plain.named_parameters() if name in held}).require()
        sw.shutdown()


CHECKS = (
    numbers_kept_for_the_next_microbatch_are_those_of_the_one_before,
    objects_are_sliced_as_they_say,
    numbers_come_once_for_each_microbatch,
    a_number_that_is_used_within_the_step_is_there,
    what_is_no_tensor_is_that_of_each_microbatch,
    optimizers_are_arguments_and_step_behind_the_step,
)

if __name__ == "__main__":
    run_checks(chosen(CHECKS))

    assert not dist.is_initialized()
