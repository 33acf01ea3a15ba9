"""Two models in one process, on two ranks: a teacher and a student, a generator and a discriminator. Each is held
against plain training in one process. Prints `ok NAME on RANK` for each check."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from launched import run_checks, whole_gradients
from pairs_of_models import (
    DATA,
    SAMPLES,
    STEP_OF,
    STEPS,
    Plain,
    Split,
    Ways,
    adamw,
    adversaries,
    batch,
    config,
    discriminator,
    distillation,
    expect,
    generator,
    of_critic,
    of_labels,
    own,
    same_as_plain,
    student,
    teacher,
    trained,
    update,
    wrapped,
)
from torch import nn
from two_models_chained import (
    a_cycle_of_two,
    a_discriminator_that_is_called_twice,
    a_generator_through_its_discriminator,
    gradients_of_inputs,
    one_mask_in_both_passes,
    statistics_of_batches_of_their_own,
    what_the_body_writes,
)
from two_models_misuse import misuse

import shardwright.torch as sw
from tests.comparison import Comparison


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
) -> Iterator[tuple[float, Gradients, float]]:
    """Updates of the discriminator and the generator by turns: each loss, with the gradients of both halves and their
    norm."""
    for step in range(STEPS):
        given = batch(step)
        for optimizer, loss in zip(optimizers, losses, strict=True):
            model.zero_grad()
            found = ways.backward(loss, model, given["noise"], given["x"])
            clip = getattr(model, "clip_grad_norm_", None) or partial(nn.utils.clip_grad_norm_, model.parameters())
            yield found, gradients(model), float(clip(1e6))
            optimizer.step()


def in_one_module(make: Callable[[], nn.Module], losses: Losses) -> sw.DistributedModel:
    def both(model: Any) -> list[torch.optim.Optimizer]:
        return [adamw(model.discriminator), adamw(model.generator)]

    plain = make()
    wanted = list(by_turns(Plain(), losses, plain, both(plain), lambda m: cloned(m.named_parameters())))
    model = sw.DistributedModel(make())
    optimizers = [sw.DistributedOptimizer(one) for one in both(model)]
    found = list(by_turns(Split(), losses, model, optimizers, whole_gradients))
    same = Comparison("adversaries in one module")
    same.losses([one[0] for one in found], [one[0] for one in wanted], moving=0.01)
    same.losses([one[2] for one in found], [one[2] for one in wanted], relative=1e-3, what="norms of gradients")
    for number, ((_, gradients, _), (_, expected, _)) in enumerate(zip(found, wanted, strict=True)):
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


TRAINING: tuple[Callable[[], None], ...] = (
    a_teacher_and_a_student,
    a_teacher_in_the_step_of_its_student,
    a_generator_and_a_discriminator,
    adversaries_in_one_module,
    adversaries_in_one_module_that_call_the_same_parts,
    a_generator_through_its_discriminator,
    gradients_of_inputs,
)


def checks_of(how: str) -> tuple[Callable[[], None], ...]:
    """The checks of a way to split models: all with stages, those of training otherwise."""
    if how == "one":
        return (dropout_of_each_model,)
    if how.startswith("dp"):  # what runs by messages holds whole parameters
        return tuple(check for check in TRAINING if check is not adversaries_in_one_module)
    if not how.startswith("pp"):
        return (*TRAINING, a_discriminator_that_is_called_twice, statistics_of_batches_of_their_own)
    checkpoints = partial(checkpoints_of_both, sys.argv[2])
    checkpoints.__name__ = checkpoints_of_both.__name__  # type: ignore[attr-defined]
    return (
        *TRAINING, a_discriminator_that_is_called_twice, a_cycle_of_two, one_mask_in_both_passes,
        what_the_body_writes, a_teacher_and_a_student_by_messages, dropout_of_each_model, checkpoints,
        hooks_of_each_model, a_scaler_of_both, a_plan_for_each, misuse,
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
