"""Two models in one process, on two ranks: a teacher and a student, a generator and a discriminator. Each is held
against plain training in one process. Prints `ok NAME on RANK` for each check."""

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launched import run_checks, whole_gradients
from torch import nn

import shardwright.torch as sw
from tests.comparison import Comparison

STEPS, MICROBATCHES, SAMPLES, NOISE, DATA, CLASSES = 4, 2, 8, 6, 8, 5
MOST = 0.1
"""The norm to which the student's gradients are clipped."""


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return found


class Tower(nn.Module):
    """A row of blocks between two linear layers; a class for every role, since errors name it."""

    def __init__(self, before: int, width: int, after: int, *, blocks: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(before, width), nn.Linear(width, after)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.blocks(self.first(x)))
        return found


class Teacher(Tower):
    pass


class Student(Tower):
    pass


class Generator(Tower):
    pass


class Discriminator(Tower):
    pass


def teacher(dropout: float = 0.0) -> Teacher:
    torch.manual_seed(1)
    return Teacher(DATA, 24, CLASSES, blocks=3, dropout=dropout)


def student(dropout: float = 0.0) -> Student:
    torch.manual_seed(2)
    return Student(DATA, 16, CLASSES, dropout=dropout)


def generator() -> Generator:
    torch.manual_seed(3)
    return Generator(NOISE, 16, DATA)


def discriminator() -> Discriminator:
    torch.manual_seed(4)
    return Discriminator(DATA, 16, 1)


def batch(step: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return {
        "x": torch.randn(SAMPLES, DATA, generator=made),
        "labels": torch.randint(0, CLASSES, (SAMPLES,), generator=made),
        "noise": torch.randn(SAMPLES, NOISE, generator=made),
    }


def adamw(model: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


# The losses, as the plain loops and the steps compute them ----------------------------------------------------------


def of_labels(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), labels)


def of_distillation(model: Any, x: torch.Tensor, labels: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    found = model(x)
    soft = F.kl_div(found.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
    return soft + 0.5 * F.cross_entropy(found, labels)


def of_reconstruction(model: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(noise), x)


def of_critic(model: Any, x: torch.Tensor, fakes: torch.Tensor) -> torch.Tensor:
    return F.softplus(-model(x)).mean() + F.softplus(model(fakes)).mean()


def trained(loss: Callable[..., torch.Tensor]) -> Any:
    def body(model: Any, *given: torch.Tensor) -> torch.Tensor:
        found = loss(model, *given)
        model.backward(found)
        return found

    body.__name__ = body.__qualname__ = loss.__name__
    return sw.step(body)


STEP_OF = {loss: trained(loss) for loss in (of_labels, of_distillation, of_reconstruction, of_critic)}


@sw.step
def outputs(model, x):
    return model(x)


class Plain:
    """Plain training in one process, over the microbatches of all replicas."""

    def update(self, optimizer: Any, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        optimizer.zero_grad()
        found = self.backward(loss, model, *given)
        if loss is of_distillation:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)
        optimizer.step()
        return found

    def backward(self, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        replicas = sw.rdp_size()
        parts = list(zip(*(tensor.chunk(MICROBATCHES * replicas) for tensor in given), strict=True))
        losses = [loss(model, *part) / len(parts) for part in parts]
        for one in losses:
            one.backward()
        return float(sum(one.detach() for one in losses))

    def outputs(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(x)
        return found


class Split:
    """The same by steps of models that are split."""

    def update(self, optimizer: Any, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        optimizer.zero_grad()
        found = self.backward(loss, model, *given)
        if loss is of_distillation:
            norm = model.clip_grad_norm_(MOST)
            assert float(norm) > 2 * MOST, "nothing was clipped"
        optimizer.step()
        return found

    def backward(self, loss: Callable[..., torch.Tensor], model: Any, *given: torch.Tensor) -> float:
        return float(STEP_OF[loss](model, *map(own, given)).all_reduce_mean())

    def outputs(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        """Those of this replica's samples, for the step that takes them: `own` gives them as they are."""
        with torch.no_grad():
            found: torch.Tensor = outputs(model, own(x)).concat()
        return found


def own(tensor: torch.Tensor) -> torch.Tensor:
    """This replica's samples."""
    return tensor if tensor.shape[0] < SAMPLES else tensor.chunk(sw.rdp_size())[sw.rdp_rank()]


Ways = Plain | Split
Loop = Callable[[Ways, Any, Any, Any, Any], Iterator[float]]


def distillation(ways: Ways, first: Any, second: Any, of_first: Any, of_second: Any) -> Iterator[float]:
    """A teacher that learns for two steps, and a student that learns from it from the second on."""
    for step in range(STEPS):
        given = batch(step)
        if step < 2:
            yield ways.update(of_first, of_labels, first, given["x"], given["labels"])
        if step:
            wanted = ways.outputs(first, given["x"])
            yield ways.update(of_second, of_distillation, second, given["x"], given["labels"], wanted)


def adversaries(ways: Ways, first: Any, second: Any, of_first: Any, of_second: Any) -> Iterator[float]:
    """A discriminator that learns from the fakes of a generator, which learns by itself."""
    for step in range(STEPS):
        given = batch(step)
        fakes = ways.outputs(first, given["noise"])
        yield ways.update(of_second, of_critic, second, given["x"], fakes)
        yield ways.update(of_first, of_reconstruction, first, given["noise"], given["x"])


def same_as_plain(title: str, loop: Loop, make: Callable[[], tuple[nn.Module, nn.Module]]) -> None:
    plain = make()
    wanted = list(loop(Plain(), *plain, *map(adamw, plain)))
    models = [sw.DistributedModel(module) for module in make()]
    optimizers = [sw.DistributedOptimizer(adamw(model)) for model in models]
    found = list(loop(Split(), *models, *optimizers))
    same = Comparison(title).losses(found, wanted, moving=0.01)
    for model, module in zip(models, plain, strict=True):
        name = type(module).__name__
        same.values(model.state_dict(), module.state_dict(), relative=1e-4, absolute=1e-4, what=f"weights of {name}")
    same.require()
    assert models[0].runtime is not models[1].runtime


def a_teacher_and_a_student() -> None:
    same_as_plain("distillation", distillation, lambda: (teacher(), student()))


def a_teacher_in_the_step_of_its_student() -> None:
    """Called before the student or behind it, by itself or in a container; and a generator in the discriminator's."""
    plain, own = (teacher(), student()), (teacher(), student())
    (first, _), (second, optimizer) = wrapped(*own)
    of_plain = adamw(plain[1])

    def body(models, x, is_last):
        wanted = None
        if not is_last:
            with torch.no_grad():
                wanted = models["teacher"](x)
        found = models["student"](x)
        if wanted is None:
            with torch.no_grad():
                wanted = models["teacher"](x)
        loss = F.mse_loss(found, wanted)
        if models["student"] is plain[1]:
            loss.backward()
        else:
            models["student"].backward(loss)
        return loss

    joint, found, wanted = sw.step(body), [], []
    for number in range(4):
        x = batch(number)["x"]
        own_x = x.chunk(sw.rdp_size())[sw.rdp_rank()]
        optimizer.zero_grad()
        of_plain.zero_grad()
        together = {"teacher": first, "student": second}
        found.append(float(joint(together, own_x, is_last=number % 2 > 0).all_reduce_mean()))
        wanted.append(body({"teacher": plain[0], "student": plain[1]}, x, number % 2 > 0).item())
        optimizer.step()
        of_plain.step()
    Comparison("a joint step").losses(found, wanted, moving=1e-4).require()
    with torch.no_grad():

        @sw.step
        def both(one, other, x):
            return F.mse_loss(one(x), other(x))

        x = batch(0)["x"]
        apart = both(second, first, x.chunk(sw.rdp_size())[sw.rdp_rank()]).all_reduce_mean()
        Comparison("evaluation of both").losses([apart.item()], [F.mse_loss(plain[1](x), plain[0](x)).item()]).require()


def a_generator_and_a_discriminator() -> None:
    same_as_plain("adversaries", adversaries, lambda: (generator(), discriminator()))


# A loss that flows through both: one module, and two optimizers ------------------------------------------------------


class Adversaries(nn.Module):
    """Both in one module, whose forward is the loss of one of them. The discriminator is called once in either step, so
    that both make the calls of one plan."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = generator(), discriminator()

    def forward(self, noise: torch.Tensor, x: torch.Tensor, *, trains_generator: bool) -> torch.Tensor:
        if trains_generator:
            return F.softplus(-self.discriminator(self.generator(noise))).mean()
        with torch.no_grad():
            fakes = self.generator(noise)
        real, made = self.discriminator(torch.cat([x, fakes])).chunk(2)
        found: torch.Tensor = F.softplus(-real).mean() + F.softplus(made).mean()
        return found


def of_generator_in_both(model: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(noise, x, trains_generator=True)
    return found


def of_discriminator_in_both(model: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model(noise, x, trains_generator=False)
    return found


def of_generator_by_parts(model: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.softplus(-model.discriminator(model.generator(noise))).mean()


def of_discriminator_by_parts(model: Any, noise: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return of_critic(model.discriminator, x, model.generator(noise).detach())


BY_FORWARD = of_discriminator_in_both, of_generator_in_both
BY_PARTS = of_discriminator_by_parts, of_generator_by_parts
STEP_OF |= {loss: trained(loss) for loss in (*BY_FORWARD, *BY_PARTS)}
Gradients = dict[str, torch.Tensor | None]
Losses = tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]
"""That of the discriminator, and that of the generator."""


def by_turns(
    ways: Ways, losses: Losses, model: Any, optimizers: Any, gradients: Callable[[Any], Gradients]
) -> Iterator[tuple[float, Gradients]]:
    """Updates of the discriminator and the generator by turns: each loss, with the gradients of both halves."""
    for step in range(STEPS):
        given = batch(step)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            model.zero_grad()
            found = ways.backward(loss, model, given["noise"], given["x"])
            yield found, gradients(model)
            optimizer.step()


def in_one_module(make: Callable[[], nn.Module], losses: Losses) -> sw.DistributedModel:
    def both(model: Any) -> list[torch.optim.Optimizer]:
        return [adamw(model.discriminator), adamw(model.generator)]

    plain = make()
    wanted = list(by_turns(Plain(), losses, plain, both(plain), lambda m: cloned(m.named_parameters())))
    model = sw.DistributedModel(make())
    optimizers = [sw.DistributedOptimizer(one) for one in both(model)]
    found = list(by_turns(Split(), losses, model, optimizers, whole_gradients))
    same = Comparison("adversaries in one module").losses([f for f, _ in found], [w for w, _ in wanted], moving=0.01)
    for number, ((_, gradients), (_, expected)) in enumerate(zip(found, wanted, strict=True)):
        same.where = f"update {number}"
        same.gradients(gradients, expected, part=True, none_is_zero=True)
    same.where = ""
    same.values(model.state_dict(), plain.state_dict(), relative=1e-4, absolute=1e-4, what="weights")
    reports: list[Any] = [None] * sw.size()
    dist.all_gather_object(reports, same.report())
    Comparison.of_ranks(reports).require()
    through = wanted[1][1]
    assert all(g is not None and bool(g.any()) for n, g in through.items() if n.startswith("discriminator")), "no half"
    return model


def adversaries_in_one_module() -> None:
    """By messages with stages, since the steps call different parts."""

    def make() -> nn.Module:
        return nn.ModuleDict({"generator": generator(), "discriminator": discriminator()})

    model = in_one_module(make, BY_PARTS)
    assert (model.runtime.messages is not None) == (max(sw.pp_size(), sw.tp_size()) > 1)


def adversaries_in_one_module_that_call_the_same_parts() -> None:
    model = in_one_module(Adversaries, BY_FORWARD)
    assert model.runtime.messages is None, "not recorded"


def a_teacher_and_a_student_by_messages() -> None:
    sw.shutdown()
    sw.init(config(sys.argv[1]) | {"pipeline_mode": "messages"})
    same_as_plain("distillation by messages", distillation, lambda: (teacher(), student()))


def cloned(named: Any) -> Gradients:
    return {name: None if p.grad is None else p.grad.clone() for name, p in named}


def config(how: str) -> dict[str, Any]:
    axis, degree, *more = f"{how}:1".split(":") if how == "one" else how.split(":")
    keys = {"pp": "pipeline_parallel_degree", "tp": "tensor_parallel_degree"}
    found: dict[str, Any] = {"microbatches": MICROBATCHES, "wait_timeout_s": 60.0, "ddp": axis == "dp", "log_every": 0}
    if axis in keys:
        found[keys[axis]] = int(degree)
    return found | ({"shard": int(more[0])} if more else {})


def update(model: Any, optimizer: Any, step: int) -> float:
    given = batch(step)
    return Split().update(optimizer, of_labels, model, given["x"], given["labels"])


def wrapped(*modules: nn.Module) -> Iterator[tuple[sw.DistributedModel, sw.DistributedOptimizer]]:
    for module in modules:
        model = sw.DistributedModel(module)
        yield model, sw.DistributedOptimizer(adamw(model))


# Random numbers -----------------------------------------------------------------------------------------------------


def dropout_of_each_model() -> None:
    """Twins draw different numbers. Those of the second do not depend on the steps of the first, nor on the split: the
    test compares what is printed with a launch of one process."""
    (first, of_first), (second, of_second) = wrapped(student(0.3), student(0.3))
    losses = [update(second, of_second, 0)]
    twin = update(first, of_first, 0)
    assert abs(twin - losses[0]) > 1e-4 * abs(twin), "twins drew the same numbers"
    for _ in range(2):
        update(first, of_first, 1)
    losses += [update(second, of_second, step) for step in (1, 2)]
    if sw.rank() == 0:
        print("losses with dropout", *(f"{one:.9g}" for one in (twin, *losses)), flush=True)
    sw.set_seed(9)
    assert first.runtime.split_model.seed == 9 != second.runtime.split_model.seed
    sw.shutdown()
    sw.init(config(sys.argv[1]))
    first = sw.DistributedModel(student(0.3))
    ((second, of_second),) = wrapped(student(0.3))
    again = [update(second, of_second, step) for step in range(3)]
    assert again == losses, (again, losses)


# Checkpoints --------------------------------------------------------------------------------------------------------


def checkpoints_of_both(folder: str) -> None:
    """Each model is saved to its own folder, after different numbers of steps, and goes on from there to the same
    bits, whichever is read first."""
    (first, of_first), (second, of_second) = pairs = list(wrapped(teacher(0.2), student(0.2)))
    assert sw.resume_from_checkpoint(f"{folder}/none", model=first, missing_ok=True) is None
    update(first, of_first, 0)
    for step in range(3):
        update(second, of_second, step)
    sampler = sw.sampler(range(100), batch_size=4, model=second)
    expect("expected the state of a sampler", lambda: sampler.load_state_dict({}))
    update(second, of_second, 3)
    assert sampler.state_dict()["samples"] == SAMPLES
    update(first, of_first, 1)
    both = sw.sampler(range(100), batch_size=4)
    update(second, of_second, 4)
    assert both.state_dict()["samples"] == SAMPLES
    update(second, of_second, 5)
    update(first, of_first, 2)
    expect(r"different numbers of samples .*Teacher \(model 0\): 8, Student \(model 1\): 16", both.state_dict)
    expect(
        r"is of one model, and this run has Teacher .* and Student .*: say which, model=",
        lambda: sw.save_checkpoint(folder, "a"),
    )
    expect(
        r"has the parameters of Student \(model 1\), and the checkpoint is of Teacher",
        lambda: sw.save_checkpoint(f"{folder}/teacher", "a", model=first, optimizer=of_second),
    )
    sw.save_checkpoint(f"{folder}/teacher", "a", model=first, user_content="teacher")
    expect(
        "has checkpoints of Teacher .* give Student .* a folder of its own",
        lambda: sw.save_checkpoint(f"{folder}/teacher", "b", model=second),
    )
    sw.save_checkpoint(f"{folder}/student", "a", model=second, optimizer=[of_second], user_content="student")
    expect("is of one model", lambda: sw.resume_from_checkpoint(f"{folder}/student"))
    expect("teacher/a .*Student|Student|blocks", lambda: sw.resume_from_checkpoint(f"{folder}/teacher", model=second))
    counts = first.runtime.split_model.steps_run, second.runtime.split_model.steps_run
    assert counts == (3, 6), counts
    ends = []
    for again in (False, True):
        if again:
            sw.shutdown()
            sw.init(config(sys.argv[1]) | {"seed": 77})
            pairs = list(wrapped(teacher(0.2), student(0.2)))
            (first, _), (second, _) = pairs
            assert sw.resume_from_checkpoint(f"{folder}/student", model=second) == "student"
            assert (first.runtime.split_model.steps_run, second.runtime.split_model.steps_run) == (0, 6)
            assert sw.resume_from_checkpoint(f"{folder}/teacher", model=first) == "teacher"
            assert (first.runtime.split_model.steps_run, second.runtime.split_model.steps_run) == counts
            assert second.model_run.samples_before + second.model_run.samples_trained == 6 * SAMPLES
        losses = [update(*pair, step) for step in (6, 7) for pair in pairs]
        ends.append((losses, [model.state_dict() for model, _ in pairs]))
    Comparison("gone on").equal(ends[1], ends[0]).require()


# Hooks, a scaler, a plan for each ------------------------------------------------------------------------------------


def hooks_of_each_model() -> None:
    (first, of_first), (second, of_second) = wrapped(teacher(), student())
    called: list[tuple[Any, Any]] = []
    for model in (first, second):
        model.register_post_partition_hook(lambda model, optimizer: called.append((model, optimizer)))
    update(second, of_second, 0)
    assert called == [(second, of_second)], called
    update(first, of_first, 0)
    assert called == [(second, of_second), (first, of_first)], called


def a_scaler_of_both() -> None:
    """An overflow in the gradients of one model skips its update on all ranks, and not that of the other."""
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    @sw.step
    def scaled(model, x, labels):
        loss = of_labels(model, x, labels)
        model.backward(scaler.scale(loss))
        return loss

    pairs = list(wrapped(teacher(), student()))
    for number in range(2):
        before = [model.state_dict() for model, _ in pairs]
        for model, optimizer in pairs:
            optimizer.zero_grad()
            scaled(model, own(batch(0)["x"]), own(batch(0)["labels"]))
        (first, of_first), (second, of_second) = pairs
        if number and sw.rank() == 0:
            next(p for p in first.local_parameters() if p.grad is not None).grad.fill_(float("inf"))
        scaler.unscale_(of_second)
        expect("call scaler.unscale_", lambda first=first: first.clip_grad_norm_(1.0))
        second.clip_grad_norm_(1.0)
        scaler.step(of_first)
        scaler.step(of_second)
        scaler.update()
        moved = [
            any(not torch.equal(value, held[name]) for name, value in model.state_dict().items())
            for (model, _), held in zip(pairs, before, strict=True)
        ]
        assert moved == [not number, True], (number, moved)


def plan_of(module: nn.Module, pp: int = 2, dp: int = 1, schedule: str = "gpipe") -> sw.Plan:
    graph = sw.capture(module, {"x": torch.randn(4, DATA)}, loss=lambda out: out.square().mean())
    cluster = sw.Cluster("cpu", nodes=1, devices_per_node=2)
    return sw.plan(
        graph, cluster, batch=8, pp=pp, tp=1, dp=dp, microbatch=4 // dp, schedule=schedule, recompute="none", shard=0
    )


def a_plan_for_each() -> None:
    of_teacher, of_student = plan_of(teacher()), plan_of(student())
    sw.shutdown()
    sw.init(plan=of_teacher, log_every=0, wait_timeout_s=60.0)
    first = sw.DistributedModel(teacher())
    expect(
        r"init was given a plan, and Teacher \(model 0\) runs under it: give Student one of its own",
        lambda: sw.DistributedModel(student()),
    )
    expect("another model than Student: the plan has blocks.2", lambda: sw.DistributedModel(student(), plan=of_teacher))
    expect(
        r"lays the model over .*pp 1.*, and the run has .*pp 2|pp 1 .* dp 2",
        lambda: sw.DistributedModel(student(), plan=plan_of(student(), pp=1, dp=2)),
    )
    given = of_student if sw.rank() else plan_of(student(), schedule="1f1b")
    expect(
        "the ranks disagree on the plan of the model .*: schedule of the plan is 1f1b on rank 0, gpipe on rank 1",
        lambda: sw.DistributedModel(student(), plan=given),
    )
    second = sw.DistributedModel(student(), plan=of_student)
    assert (first.model_run.plan, second.model_run.plan) == (of_teacher, of_student)
    expect("session.plan is the plan of the only model", lambda: first.session.plan)
    losses = [update(model, sw.DistributedOptimizer(adamw(model)), 0) for model in (first, second)]
    for module, loss in zip((teacher(), student()), losses, strict=True):
        wanted = float(of_labels(module, batch(0)["x"], batch(0)["labels"]))
        Comparison("a plan for each").losses(loss, wanted).require()


# Misuse --------------------------------------------------------------------------------------------------------------


def expect(match: str, run: Callable[[], Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(sw.ShardwrightError, match=match):
        run()
    assert time.monotonic() - begun < 30.0, "an error, not the end of a wait"


def misuse() -> None:
    (first, of_first), (second, of_second) = wrapped(teacher(), student())
    x, labels = batch(0)["x"], batch(0)["labels"]

    @sw.step
    def joint(student, teacher, x):
        with torch.no_grad():
            wanted = teacher(x)
        loss = F.mse_loss(student(x), wanted)
        student.backward(loss)
        return loss

    @sw.step
    def adversary(student, teacher, x):
        student.backward(teacher(student(x)).mean())

    @sw.step
    def drawing(student, teacher, x):
        return joint.function(student, teacher, x + torch.randn_like(x))

    both = r"Student \(model 1\) and Teacher \(model 0\), and"
    expect(
        rf"adversary is given {both} gradients flow .* in a step of its own.*ModuleDict",
        lambda: adversary(second, first, x),
    )
    expect(rf"drawing is given {both} draws random numbers", lambda: drawing(second, first, x))
    expect(
        "adversary is given|adversary, of|different calls",
        lambda: (adversary if sw.rank() else joint)(second, first, x),
    )
    assert joint(second, first, x).reduce_mean() > 0

    @sw.step
    def reaching(model, x):
        loss = model(x).mean() + first(x).mean()
        model.backward(loss)
        return loss

    expect(r"Teacher \(model 0\) is called in a step of Student \(model 1\)", lambda: reaching(second, x))

    @sw.step
    def with_a_part(model, x):
        loss = F.mse_loss(model(x), first.last(first.blocks(first.first(x))).detach())
        model.backward(loss)
        return loss

    expect(r"Teacher \(model 0\) is used \(last\) in a step of Student", lambda: with_a_part(second, x))

    @sw.step
    def of_the_other(model, x):
        loss = model(x).mean()
        first.backward(loss)

    expect(r"Teacher \(model 0\) is asked for the gradient .* in a step of Student", lambda: of_the_other(second, x))

    @sw.step
    def of_none(x):
        loss = second(x).mean()
        second.backward(loss)
        return loss

    expect(r"of_none is given no model, and this run has Teacher .*and Student .*: pass the one", lambda: of_none(x))
    expect(
        r"disagree on the model of the step .*: Teacher \(model 0\) on rank 0, Student \(model 1\) on rank 1",
        lambda: outputs(second if sw.rank() else first, x),
    )
    expect(
        r"different calls: rank 0 in model.clip_grad_norm_\(1.0, 2.0\) of Teacher .*, rank 1 in .* of Student",
        lambda: (second if sw.rank() else first).clip_grad_norm_(1.0),
    )
    expect("disagree on the model of the step", lambda: joint(second, first if sw.rank() else second, x))
    many = [*first.parameters(), *second.parameters()]
    expect(
        r"has parameters of Teacher \(model 0\) and Student \(model 1\): make one for each",
        lambda: sw.DistributedOptimizer(torch.optim.SGD(many, lr=0.1)),
    )
    stray = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    expect("has parameters of no model, and this run has Teacher", lambda: sw.DistributedOptimizer(stray))
    expect(
        r"optimizer of Teacher \(model 0\) is given a parameter of Student",
        lambda: of_first.add_param_group({"params": list(second.parameters())}),
    )
    expect(r"wrapped already, as Student \(model 1\)", lambda: sw.DistributedModel(second.module))
    expect("takes a plain module, and the module is one", lambda: sw.DistributedModel(second))
    expect("holds a DistributedModel, 0", lambda: sw.DistributedModel(nn.Sequential(second)))
    expect(
        r"Sequential shares 0.weight with Teacher \(model 0\)",
        lambda: sw.DistributedModel(nn.Sequential(first.module.first, nn.Linear(24, 2))),
    )
    expect(
        r"record_timeline is for the steps of one model, and this run has .*sw.record_timeline\(model\)",
        lambda: sw.record_timeline().__enter__(),
    )
    with sw.record_timeline(second) as timelines:
        update(first, of_first, 0)
        update(second, of_second, 0)
    assert len(timelines) == 1
    third, plain = sw.DistributedModel(student()), student()
    early = adamw(plain)
    early.add_param_group({"params": list(third.parameters())})
    mixed = sw.DistributedOptimizer(early)
    expect("has parameters of this Student, which was wrapped after it", lambda: sw.DistributedModel(plain))
    del mixed
    sw.shutdown()
    sw.init(config(sys.argv[1]))
    model = sw.DistributedModel(student())
    expect("Teacher was wrapped before sw.shutdown", lambda: STEP_OF[of_labels](first, x, labels))
    update(model, sw.DistributedOptimizer(adamw(model)), 0)


TRAINING: tuple[Callable[[], None], ...] = (
    a_teacher_and_a_student,
    a_teacher_in_the_step_of_its_student,
    a_generator_and_a_discriminator,
    adversaries_in_one_module,
    adversaries_in_one_module_that_call_the_same_parts,
)


def checks_of(how: str) -> tuple[Callable[[], None], ...]:
    """The checks of a way to split models: all with stages, those of training otherwise."""
    if how == "one":
        return (dropout_of_each_model,)
    if how.startswith("dp"):  # what runs by messages holds whole parameters
        return tuple(check for check in TRAINING if check is not adversaries_in_one_module)
    if not how.startswith("pp"):
        return TRAINING
    checkpoints = partial(checkpoints_of_both, sys.argv[2])
    checkpoints.__name__ = checkpoints_of_both.__name__  # type: ignore[attr-defined]
    return (
        *TRAINING, a_teacher_and_a_student_by_messages, dropout_of_each_model, checkpoints, hooks_of_each_model,
        a_scaler_of_both, a_plan_for_each, misuse,
    )  # fmt: skip


def main() -> None:
    """Arguments: how models are split, a folder, and names of checks; default: all."""
    how, names = sys.argv[1], sys.argv[3:]

    def begun(check: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            sw.init(config(how))
            check()
            sw.shutdown()

        run.__name__ = check.__name__
        return run

    run_checks(begun(check) for check in checks_of(how) if not names or check.__name__ in names)


if __name__ == "__main__":
    main()
