"""Trains causal models in slices of their sequences, and compares every step with a run without slices.

Usage: slices.py [--all] OUT.json CASE...; a case is model:pp.dp.tp:schedule:lengths[:recompute], as
gpt2:2.1.1:1f1b:5+4+3, held against the plain model on one device; model@dropout against the same plan for whole
sequences; model+padded with a mask of the batch; "evaluation" runs steps that return logits, with gradients and
without; "misuse" tries what is refused.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from equality import GLOBAL_MICROBATCHES, Reference
from launched import ALL, leave, whole_gradients
from models import batch, build
from torch import nn

import shardwright as core
import shardwright.torch as sw
from shardwright.core.errors import ShardwrightError
from tests.comparison import Comparison

Gradients = dict[str, torch.Tensor | None]
STEPS = 3


def batch_of(name: str, step: int) -> dict[str, Any]:
    """A batch; of ``+padded`` models with sequences of unlike lengths, padded on the right."""
    kind, _, padded = name.partition("+")
    found = batch(kind, step)
    if padded:
        lengths = torch.arange(len(found["input_ids"])) % 5 + 8
        mask = (torch.arange(found["input_ids"].shape[1])[None] < lengths[:, None]).long()
        found |= {"attention_mask": mask, "labels": found["labels"].masked_fill(mask == 0, -100)}
    return found


def plan_of(model: nn.Module, name: str, degrees: str, schedule: str, recompute: str, **slices: Any) -> core.Plan:
    whole = batch_of(name, 0)
    samples = len(whole["input_ids"])
    graph = core.capture(model, {key: tensor[:2] for key, tensor in whole.items()})
    pp, dp, tp = map(int, degrees.split("."))
    cluster = core.Cluster("cpu", nodes=1, devices_per_node=pp * dp * tp)
    return core.plan(
        graph, cluster, batch=samples, pp=pp, tp=tp, dp=dp, microbatch=samples // GLOBAL_MICROBATCHES,
        schedule=schedule, recompute=recompute, shard=0, precision="fp32", **slices,
    )  # fmt: skip


def steps(name: str, dropout: float, plan: core.Plan, count: int) -> Iterator[tuple[float, Gradients]]:
    """The loss and this rank's gradients of each training step under a plan."""
    sw.init(plan=plan)
    sw.set_seed(5)
    plain = build(name.partition("+")[0], dropout)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model = sw.DistributedModel(plain)
    distributed = sw.DistributedOptimizer(optimizer)

    @sw.step
    def train_step(model, batch):
        loss = model(**batch).loss
        model.backward(loss, reduction="mean")
        return loss

    for step in range(count):
        distributed.zero_grad()
        whole = batch_of(name, step)
        own = {key: tensor.chunk(plan.decision.dp)[sw.rdp_rank()] for key, tensor in whole.items()}
        loss = float(train_step(model, own).all_reduce_mean())
        yield loss, whole_gradients(model)
        distributed.step()
    sw.shutdown()


def run(case: str, references: dict[str, Reference]) -> dict[str, object]:
    given, degrees, schedule, lengths, recompute = [*case.split(":"), "none"][:5]
    name, _, share = given.partition("@")
    dropout, sizes = float(share or 0), (degrees, schedule, recompute)
    if dropout or "+" in name:
        whole = plan_of(build(name.partition("+")[0], dropout), name, *sizes)
        expected = [(loss, {k: g.clone() for k, g in found.items() if g is not None}) for loss, found in
                    steps(name, dropout, whole, STEPS)]  # fmt: skip
    else:
        references[name] = references.get(name) or Reference(name)
        expected = list(zip(references[name].losses, references[name].gradients, strict=True))[: None if ALL else STEPS]
    plan = plan_of(
        build(name.partition("+")[0], dropout),
        name,
        *sizes,
        slice_lengths=[int(length) for length in lengths.split("+")],
    )
    same = Comparison(case)
    for number, (loss, found) in enumerate(steps(name, dropout, plan, len(expected))):
        same.where = f"step {number}"
        same.losses(loss, expected[number][0])
        same.gradients(found, expected[number][1], part=True)
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, same.report())
    return {"case": case, "same": every}


def evaluation() -> dict[str, object]:
    """Steps that return logits beside the loss, and steps without gradients, against the plain model."""
    sw.init(
        plan=plan_of(build("gpt2"), "gpt2", f"{dist.get_world_size()}.1.1", "1f1b", "none", slice_lengths=[5, 4, 3])
    )
    model, plain = sw.DistributedModel(build("gpt2")), build("gpt2")
    whole, same = batch_of("gpt2", 0), Comparison("evaluation")

    @sw.step
    def train_step(model, batch):
        made = model(**batch)
        model.backward(made.loss, reduction="mean")
        return made.loss, made.logits

    @sw.step
    def evaluate(model, batch):
        made = model(**batch)
        return made.loss, made.logits

    @sw.step
    def predict(model, ids):
        return model(input_ids=ids).logits

    expected = plain(**whole)
    expected.loss.backward()
    same.where = "training"
    loss, logits = train_step(model, whole)
    same.losses(loss.reduce_mean(), expected.loss.detach())
    same.values(logits.concat(), expected.logits.detach(), relative=1e-5, absolute=1e-5, what="logits")
    same.gradients(whole_gradients(model), {n: p.grad for n, p in plain.named_parameters()}, part=True)
    same.where = "evaluation"
    model.eval()
    with torch.no_grad():
        loss, logits = evaluate(model, whole)
        said = predict(model, whole["input_ids"]).concat()
    with torch.inference_mode():
        inferred = predict(model, whole["input_ids"].clone()).concat()
    same.losses(loss.reduce_mean(), expected.loss.detach())
    for found in (logits.concat(), said, inferred):
        same.values(found, expected.logits.detach(), relative=1e-5, absolute=1e-5, what="logits")
    every: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(every, same.report())
    sw.shutdown()
    return {"case": "evaluation", "same": every}


class OfItsLength(nn.Module):
    """A model that computes with the number of its tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first, self.last = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.table(input_ids)) / input_ids.shape[1]
        return nn.functional.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())


def of_its_length() -> dict[str, str]:
    tokens = torch.arange(96).reshape(8, 12) % 16
    graph = core.capture(OfItsLength(), (tokens[:2], tokens[:2]))
    pins = {
        "pp": dist.get_world_size(),
        "tp": 1,
        "dp": 1,
        "schedule": "gpipe",
        "recompute": "none",
        "precision": "fp32",
    }
    cluster = core.Cluster("cpu", devices_per_node=dist.get_world_size())
    sw.init(plan=core.plan(graph, cluster, batch=8, microbatch=2, slice_lengths=[6, 6], **pins))
    model = sw.DistributedModel(OfItsLength())

    @sw.step
    def train_step(model, tokens):
        loss = model(tokens, tokens)
        model.backward(loss, reduction="mean")
        return loss

    said = {}
    try:
        train_step(model, tokens)
    except ShardwrightError as error:
        said["a number of its length"] = str(error)
    sw.shutdown()
    return said


def misuse() -> dict[str, object]:
    """The messages of what is refused."""
    said: dict[str, str] = {}
    degrees = f"{dist.get_world_size()}.1.1"

    def refused(what: str, name: str, **asked: Any) -> None:
        try:
            plan_of(build(name), name, degrees, asked.pop("schedule", "1f1b"), "none", **asked)
        except ShardwrightError as error:
            said[what] = str(error)

    refused("a sum", "gpt2", slice_lengths=[5, 4])
    refused("a schedule", "gpt2", slices=2, schedule="zbv")
    refused("too many", "gpt2", slices=13)
    said |= of_its_length()
    plan = plan_of(build("gpt2"), "gpt2", degrees, "1f1b", "none", slice_lengths=[5, 4, 3])
    shorter = {key: tensor[:, :10] for key, tensor in batch("gpt2", 0).items()}
    left = dict(batch("gpt2", 0)) | {"attention_mask": torch.ones(8, 12).cumsum(1).gt(3).long()}
    for what, given in (("another length", shorter), ("padded on the left", left)):
        sw.init(plan=plan)
        model = sw.DistributedModel(build("gpt2"))

        @sw.step
        def train_step(model, batch):
            loss = model(**batch).loss
            model.backward(loss, reduction="mean")
            return loss

        try:
            train_step(model, given)
        except ShardwrightError as error:
            said[what] = str(error)
        sw.shutdown()
    sw.init(plan=plan)
    model = sw.DistributedModel(build("gpt2"))

    @sw.step
    def with_cache(model, batch):
        made = model(**batch, use_cache=True)
        model.backward(made.loss, reduction="mean")
        return made.past_key_values.layers[0].keys

    try:
        with_cache(model, batch("gpt2", 0))
    except ShardwrightError as error:
        said["a cache"] = str(error)
    sw.shutdown()
    return {"case": "misuse", "said": said}


def main() -> None:
    dist.init_process_group("gloo")
    out, *cases = [given for given in sys.argv[1:] if given != "--all"]
    references: dict[str, Reference] = {}
    others = {"misuse": misuse, "evaluation": evaluation}
    leave([others[case]() if case in others else run(case, references) for case in cases], out)


if __name__ == "__main__":
    main()
