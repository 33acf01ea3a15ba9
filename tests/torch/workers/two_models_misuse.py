"""What is refused of several models in one process, and of steps that are given several. Part of `two_models.py`."""

import sys

import torch
import torch.nn.functional as F
from pairs_of_models import (
    STEP_OF,
    adamw,
    batch,
    config,
    expect,
    of_labels,
    outputs,
    student,
    teacher,
    update,
    wrapped,
)
from torch import nn

import shardwright.torch as sw


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
        student.backward(student(x).mean())
        teacher.backward(teacher(x).mean())

    @sw.step
    def behind(student, teacher, x):
        found = student(x)
        student.backward(found.mean())
        return teacher(found)

    @sw.step
    def of_values(student, teacher, x):
        found = student(x)
        student.backward(teacher(found).mean() if found.sum() > 0 else found.mean())

    @sw.step
    def drawing(student, teacher, x):
        return joint.function(student, teacher, x + torch.randn_like(x))

    both = r"Student \(model 1\) and Teacher \(model 0\), and"
    expect(
        rf"adversary is given {both} gives each of Student .* and Teacher .* a loss; .*make a step of each.*ModuleDict",
        lambda: adversary(second, first, x),
    )
    expect(r"calls Teacher \(model 0\) after Student \(model 1\).backward", lambda: behind(second, first, x))
    expect(rf"of_values is given {both} what it does with each cannot be seen", lambda: of_values(second, first, x))
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
