"""Checks of how steps run, on two ranks, in one launch. Prints `ok NAME` for each; any failure ends the launch.

Usage: engine.py [--all] [CHECK...]
"""

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from launched import ALL, chosen, run_checks
from models import batch, build, with_batch_norm

import shardwright.torch as sw
from shardwright.backends.torch.data_parallel import overlap
from shardwright.backends.torch.pipeline.action_times import clock_offset_s
from shardwright.core.errors import ScheduleError, ShardwrightError
from shardwright.core.schedule import Action
from tests.comparison import Comparison

CONFIG = {"pipeline_parallel_degree": 2, "microbatches": 4, "wait_timeout_s": 60.0}


@sw.step
def train_step(model, batch):
    out = model(**batch)
    model.backward(out.loss)
    return {"loss": out.loss, "logits": out.logits}


def cut(whole: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    return [{key: t.tensor_split(parts)[m] for key, t in whole.items()} for m in range(parts)]


def plain_run(model: torch.nn.Module, parts: list[dict[str, torch.Tensor]]) -> float:
    """The mean loss over the samples of all parts, in order; gradients add up in the model."""
    sizes = [len(part["input_ids"]) for part in parts]
    total = 0.0
    for part, size in zip(parts, sizes, strict=True):
        loss = model(**part).loss * size / sum(sizes)
        loss.backward()
        total += loss.item()
    return total


def same_gradients(model: Any, plain: torch.nn.Module) -> None:
    """On both ranks, which together hold all."""
    same = Comparison(type(plain).__name__)
    same.gradients(gradients(model), {name: p.grad for name, p in plain.named_parameters()}, part=True)
    require_of_ranks(same)


def gradients(model: Any) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


def require_of_ranks(same: Comparison) -> None:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, same.report())
    Comparison.of_ranks(reports).require()


def warned(run: Callable[[], Any], match: str) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    assert any(match in str(w.message) for w in caught), [str(w.message) for w in caught]
    return result


def batches_of_every_size() -> None:
    for pipeline in ("1f1b", "zb-h1", "interleaved"):
        sw.init(CONFIG, pipeline=pipeline)
        plain = build("gpt2")
        model = sw.DistributedModel(copy.deepcopy(plain))
        train_step(model, batch("gpt2", 0))
        for samples in (7, 3, 1, 8, 11) if ALL or pipeline == "1f1b" else (7, 3):
            model.zero_grad()
            plain.zero_grad()
            whole = batch("gpt2", 1, samples=samples)
            expected = plain_run(plain, cut(whole, min(4, samples)))
            if samples == 7 and pipeline == "1f1b":
                out = warned(lambda: train_step(model, whole), "given 7 samples, and the plan has 8")  # noqa: B023
            else:
                out = train_step(model, whole)
            Comparison().losses(out["loss"].all_reduce_mean(), expected).require()
            assert out["logits"].concat().shape[0] == samples
            same_gradients(model, plain)
            if samples == 7:
                with pytest.raises(ShardwrightError, match=r"do not stack: call .concat\(\)"):
                    out["logits"].reduce_mean()
        with pytest.raises(ShardwrightError, match="has no samples"):
            train_step(model, batch("gpt2", 0, samples=0))
        sw.shutdown()


def replicas_with_batches_of_different_sizes() -> None:
    sw.init({"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0})
    plain = build("gpt2")
    model = sw.DistributedModel(copy.deepcopy(plain))
    schedule = model.runtime.stage_map.schedule
    assert [action.text for action in schedule.table[0]] == ["0F0", "0B0", "0F1", "0B1"], "of one rank, 1f1b by default"
    for first, second in ((4, 3), (1, 4), (4, 4)):
        model.zero_grad()
        plain.zero_grad()
        whole = batch("gpt2", 1, samples=first + second)
        halves = [{k: t[:first] for k, t in whole.items()}, {k: t[first:] for k, t in whole.items()}]
        parts = [part for half, n in zip(halves, (first, second), strict=True) for part in cut(half, min(2, n))]
        expected = plain_run(plain, parts)
        out = train_step(model, halves[sw.dp_rank()])
        Comparison().losses(out["loss"].all_reduce_mean(), expected).require()
        same_gradients(model, plain)
    sw.shutdown()


def timelines_are_measured_and_predict() -> None:
    sw.init(CONFIG)
    model = sw.DistributedModel(build("gpt2"))
    with pytest.raises(ShardwrightError, match="not split yet"):
        model.use_schedule("zb-h1")
    train_step(model, batch("gpt2", 0))
    first = model.runtime.stage_map.schedule
    with sw.record_timeline() as timelines:
        for step in range(3):
            train_step(model, batch("gpt2", step))
        with pytest.raises(ShardwrightError, match="recorded already"), sw.record_timeline():
            pass
    assert len(timelines) == 3
    for timeline in timelines:
        assert timeline.actions == first.table
        for rank in range(2):
            spans = timeline.spans(rank)
            assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
    # Processes of one machine share its clock, so the offset between them is what the comparison is off by.
    offset, error = clock_offset_s(sw.session.current().bound, sw.session.current().watchdog)
    assert abs(offset) <= error, (offset, error)
    assert (error > 0) == (sw.pp_rank() > 0)
    every: list[Any] = [None, None]
    dist.all_gather_object(every, [t.makespan_s for t in timelines])
    assert every[0] == every[1], "the ranks were told different timelines"
    costs = sw.measured_costs(timelines)
    assert min(costs.forward_s) > 0
    assert costs.input_grad_s == costs.weight_grad_s
    with pytest.raises(ShardwrightError, match="for 8 microbatches"):
        model.use_schedule(sw.Schedule.build("1f1b", ranks=2, microbatches=8))
    with pytest.raises(ShardwrightError, match="places the stages"):
        model.use_schedule(sw.Schedule.build("zbv", ranks=2, microbatches=4, virtual_stages=2))
    plain = build("gpt2")
    plain_run(plain, cut(batch("gpt2", 0), 4))
    for name in ("zb-h1", "auto", "gpipe"):
        model.use_schedule(name, sw.StageCosts.uniform(2))
        model.zero_grad()
        with sw.record_timeline() as timelines:
            train_step(model, batch("gpt2", 0))
        same_gradients(model, plain)
        assert {a.kind for a in timelines[0].actions[0]} == {a.kind for a in model.runtime.stage_map.schedule.table[0]}
    model.use_schedule(sw.split_backward(sw.Schedule.build("1f1b", ranks=2, microbatches=4), range(1, 4, 2), delay=1))
    model.zero_grad()
    with sw.record_timeline() as timelines:
        train_step(model, batch("gpt2", 0))
    same_gradients(model, plain)
    costs = sw.measured_costs(timelines)
    assert costs.whole_backward_s is not None, "backwards of both kinds ran"
    assert sw.simulate(sw.Schedule.build("zb-h1", ranks=2, microbatches=4), costs).makespan_s > 0
    sw.shutdown()


@sw.step
def evaluate(model, batch):
    return model(**batch).loss


def schedules_that_do_not_train_are_refused() -> None:
    """At once and by name, where they enter: evaluation runs under a schedule without backwards, training does not."""
    orders = (("0F0", "0B0", "0F1", "0B1"), ("1F0", "1F1", "1B0", "1B1"))
    table = tuple(tuple(Action.parse(cell) for cell in order) for order in orders)
    crossed = dataclasses.replace(sw.Schedule.build("gpipe", ranks=2, microbatches=2), name="crossed", table=table)
    settings = {**CONFIG, "microbatches": 2}
    with pytest.raises(ScheduleError, match="crossed: the schedule stops before its end"):
        sw.init(settings, pipeline=crossed)
    sw.init(settings, pipeline="forward-only")
    model = sw.DistributedModel(build("gpt2"))
    plain = build("gpt2")
    expected = plain_run(plain, cut(batch("gpt2", 0), 2))
    with torch.no_grad():
        found = float(evaluate(model, batch("gpt2", 0)).all_reduce_mean())
    assert abs(found - expected) <= 1e-5 * abs(expected)
    begun = time.monotonic()
    for _ in range(2):
        with pytest.raises(ScheduleError, match="forward-only has no backward passes, and training needs them"):
            train_step(model, batch("gpt2", 0))
    with pytest.raises(ScheduleError, match="deadlock"):
        model.use_schedule(crossed)
    assert time.monotonic() - begun < 30
    assert all(parameter.grad is None for parameter in model.parameters())
    model.use_schedule("1f1b")
    train_step(model, batch("gpt2", 0))
    same_gradients(model, plain)
    sw.shutdown()


def gradients_are_summed_while_the_backward_runs() -> None:
    """Every bucket is on its way before the step waits for them; what no replica uses has no gradient."""
    sent: list[tuple[int, int]] = []
    finish, size = overlap.Exchange.finish, overlap.READY_BYTES
    overlap.READY_BYTES = 4096

    def noted(exchange: overlap.Exchange) -> dict[str, torch.Tensor | None]:
        sent.append((len(exchange._buckets) - len(exchange._queue), len(exchange._buckets)))
        return finish(exchange)

    overlap.Exchange.finish = noted
    try:
        for pipeline in ("1f1b", "zb-h1"):
            sw.init({"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0, "pipeline": pipeline})
            plain = build("gpt2")
            model = sw.DistributedModel(copy.deepcopy(plain))
            for step in range(2):  # the second adds to the first
                whole = batch("gpt2", step)
                plain_run(plain, cut(whole, 4))
                train_step(model, {k: t.chunk(2)[sw.dp_rank()] for k, t in whole.items()})
            same_gradients(model, plain)
            sw.shutdown()
    finally:
        overlap.Exchange.finish, overlap.READY_BYTES = finish, size
    assert len(sent) == 4
    assert all(now == of > 5 for now, of in sent), sent


def batch_norm_sees_what_the_loss_scope_says() -> None:
    for scope in ("replica", "global"):
        for config in ({}, {"pipeline_parallel_degree": 2, "microbatches": 4, "ddp": False}):
            whole = {key: t.clone() for key, t in batch("gpt2", 0).items()}
            parts = cut(whole, 4)
            sw.init({"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0, "loss_scope": scope} | config)
            if scope == "global" and sw.dp_size() == 2:  # the m-th microbatches of both replicas make one
                halves = [cut(half, 2) for half in cut(whole, 2)]
                parts = [{k: torch.cat([h[m][k] for h in halves]) for k in whole} for m in range(2)]
            plain = with_batch_norm(dropout=0.0)
            plain.blocks[1].norm.momentum = None
            model = sw.DistributedModel(copy.deepcopy(plain))
            for _ in range(2):
                plain.zero_grad()
                expected = plain_run(plain, parts)
                model.zero_grad()
                out = train_step(model, {k: t.chunk(sw.dp_size())[sw.dp_rank()] for k, t in whole.items()})
            Comparison().losses(out["loss"].all_reduce_mean(), expected).require()
            same_gradients(model, plain)
            same = Comparison(f"{scope} {config}")
            held, wanted = dict(model.local_named_buffers()), dict(plain.named_buffers())
            require_of_ranks(same.values(held, wanted, relative=1e-5, absolute=1e-5, part=True))
            sw.shutdown()
            assert all("forward" not in m.__dict__ for m in model.module.modules())
    sw.init({"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0, "loss_scope": "global"})
    model = sw.DistributedModel(with_batch_norm())
    with pytest.raises(ShardwrightError, match="different numbers of microbatches"):
        train_step(model, batch("gpt2", 0, samples=1 + 3 * sw.dp_rank()))
    sw.shutdown()


def two_optimizers(model: Any, wrap: Callable[[Any], Any]) -> tuple[list[Any], list[Any]]:
    """One of matrices and one of the rest, with a schedule of learning rates each."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizers = [
        wrap(torch.optim.AdamW(matrices, lr=1e-3, weight_decay=0.1)),
        wrap(torch.optim.SGD([{"params": rest[::2]}, {"params": rest[1::2], "lr": 0.02}], lr=0.1, momentum=0.9)),
    ]
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5),
        torch.optim.lr_scheduler.OneCycleLR(optimizers[1], max_lr=[0.1, 0.02], total_steps=8),
    ]
    return optimizers, schedules


def several_optimizers_and_learning_rates_over_accumulated_gradients() -> None:
    for pipeline in ("1f1b", "zb-h1") if ALL else ("zb-h1",):
        plain = build("gpt2")
        sw.init(CONFIG, pipeline=pipeline)
        model = sw.DistributedModel(copy.deepcopy(plain))
        ours, ours_rates = two_optimizers(model, sw.DistributedOptimizer)
        theirs, their_rates = two_optimizers(plain, lambda optimizer: optimizer)
        for step in range(4):
            for part in range(2):  # two steps add up before each update
                given = batch("gpt2", 2 * step + part)
                plain_run(plain, cut(given, 4))
                train_step(model, given)
            norm = model.clip_grad_norm_(0.5)
            Comparison("norm").losses(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)).require()
            for acting in (ours, theirs, ours_rates, their_rates):
                for one in acting:
                    one.step()
            for acting in (ours, theirs):
                for one in acting:
                    one.zero_grad()
        assert ours_rates[1].get_last_lr() == their_rates[1].get_last_lr()
        Comparison(pipeline).values(model.state_dict(), plain.state_dict(), relative=1e-4, absolute=1e-5).require()
        sw.shutdown()


def optimizer_states_move_to_another_split() -> None:
    """Two steps under one split, two under another, against four of the plain model."""
    plain = build("gpt2")
    theirs, _ = two_optimizers(plain, lambda optimizer: optimizer)
    for step in range(4):
        plain.zero_grad()
        plain_run(plain, cut(batch("gpt2", step), 4))
        for one in theirs:
            one.step()
    configs = (CONFIG | {"pipeline": "zb-h1"}, {"microbatches": 2, "ddp": True, "wait_timeout_s": 60.0})
    for first, second in (configs, configs[::-1]):
        weights: Any = build("gpt2").state_dict()
        states: list[Any] = []
        for number, config in enumerate((first, second)):
            sw.init(config)
            model = sw.DistributedModel(build("gpt2"))
            model.load_state_dict(weights)
            ours, _ = two_optimizers(model, sw.DistributedOptimizer)
            for optimizer, state in zip(ours, states, strict=bool(number)):
                optimizer.load_state_dict(state)
            for step in (2 * number, 2 * number + 1):
                model.zero_grad()
                given = {k: t.chunk(sw.dp_size())[sw.dp_rank()] for k, t in batch("gpt2", step).items()}
                train_step(model, given)
                for one in ours:
                    one.step()
            weights, states = model.state_dict(), [one.state_dict() for one in ours]
            only = ours[0].state_dict(rank0_only=True)
            assert bool(only) == (sw.rank() == 0)
            assert set(states[0]["state"]) == {n for n, p in plain.named_parameters() if p.dim() > 1}
            assert states[1]["param_groups"][1]["lr"] == theirs[1].param_groups[1]["lr"]
            if number:
                states[0]["param_groups"][0]["params"][0] += "s"
                with pytest.raises(ShardwrightError, match="did you mean"):
                    ours[0].load_state_dict(states[0])
            sw.shutdown()
        Comparison("moved").values(weights, plain.state_dict(), relative=1e-4, absolute=1e-5).require()


def autocast_is_that_of_the_plain_model() -> None:
    often = [("1f1b", "llama"), ("zb-h1", "gpt2")]
    for pipeline, name in [*often, ("1f1b", "gpt2"), ("zb-h1", "llama")] if ALL else often:
        plain, given = build(name), batch(name, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = plain_run(plain, cut(given, 4))
        sw.init(CONFIG, pipeline=pipeline)
        model = sw.DistributedModel(build(name))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = train_step(model, given)
        assert out["logits"].outputs[0].dtype is torch.bfloat16
        Comparison().losses(out["loss"].all_reduce_mean(), expected).require()
        wanted = {key: parameter.grad for key, parameter in plain.named_parameters()}
        assert {gradient.dtype for gradient in wanted.values()} == {torch.float32}
        # Sums over rows round to bfloat16 in another order.
        same = Comparison(f"{pipeline} {name}")
        require_of_ranks(same.gradients(gradients(model), wanted, part=True, relative=4e-3, of_all=1e-4))
        sw.shutdown()


def units_can_be_compiled() -> None:
    plain, given = build("bert", layers=2), batch("bert", 0)
    expected = plain_run(plain, cut(given, 4))
    sw.init(CONFIG, compile="aot_eager")
    model = sw.DistributedModel(build("bert", layers=2))
    with record_graphs() as graphs:
        out = train_step(model, given)
    assert len(graphs) > 0, "nothing was compiled"
    Comparison().losses(out["loss"].all_reduce_mean(), expected).require()
    same_gradients(model, plain)
    sw.shutdown()
    for refused, config in (("draws random numbers", {}), ("weight gradients apart", {"pipeline": "zb-h1"})):
        sw.init(CONFIG, compile="aot_eager", **config)
        model = sw.DistributedModel(build("bert", dropout=0.0 if config else 0.2, layers=2))
        with pytest.raises(ShardwrightError, match=refused):
            train_step(model, given)
        sw.shutdown()
    with pytest.raises(ShardwrightError, match="expected True, False or a backend"):
        sw.init(CONFIG, compile="fast")


@contextmanager
def record_graphs() -> Iterator[list[int]]:
    """One entry for each graph that torch.compile makes in here."""
    found: list[int] = []
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    yield found
    found += range(torch._dynamo.utils.counters["stats"]["unique_graphs"] - before)


def trained(model: torch.nn.Module, steps: list[dict[str, torch.Tensor]], autocast: bool, **config: Any) -> Any:
    """Losses, gradients and buffers after some steps without an optimizer, and how often each module was called."""
    sw.init(CONFIG | {"loss_scope": "replica"}, **config)
    sw.set_seed(5)
    split = sw.DistributedModel(copy.deepcopy(model))
    calls: dict[str, int] = {}
    found = []
    for number, given in enumerate(steps):
        if number == 1:  # after recording
            for path, module in split.module.named_modules():
                calls[path] = 0
                module.register_forward_pre_hook(
                    lambda *_, path=path: calls.update({path: calls[path] + (not torch._C._is_tracing())})
                )
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            found.append(float(train_step(split, given)["loss"].all_reduce_mean()))
    held, buffers = gradients(split), dict(split.local_named_buffers())
    sw.shutdown()
    return found, held, buffers, calls


def recompute_changes_nothing_but_the_calls() -> None:
    often = [("gpt2", True), ("t5", False), ("batch norm", False)]
    for name, autocast in [*often, ("gpt2", False)] if ALL else often:
        model = with_batch_norm() if name == "batch norm" else build(name, dropout=0.2, layers=8 if name == "t5" else 4)
        steps = [batch("gpt2" if name == "batch norm" else name, step) for step in range(3)]
        losses, held, buffers, calls = trained(model, steps, autocast)
        again = trained(model, steps, autocast, recompute="full")
        same = Comparison(f"{name}, recomputed").equal(again[0], losses)
        near = {"relative": 1.3e-6, "absolute": 1e-5}
        same.values([again[1], again[2]], [held, buffers], **near).require()
        blocks = [path for path in calls if path.split(".")[-1].isdigit() and path.count(".") < 3 and calls[path]]
        # T5's first blocks are one of their kind, and those are not recomputed.
        alone = {"encoder.block.0", "decoder.block.0"}
        for path in blocks:
            assert again[3][path] == calls[path] * (1 if path in alone else 2), (path, calls[path], again[3][path])
        assert set(blocks) - alone, blocks


CHECKS: tuple[Callable[[], None], ...] = (
    batches_of_every_size,
    replicas_with_batches_of_different_sizes,
    timelines_are_measured_and_predict,
    schedules_that_do_not_train_are_refused,
    recompute_changes_nothing_but_the_calls,
    gradients_are_summed_while_the_backward_runs,
    batch_norm_sees_what_the_loss_scope_says,
    units_can_be_compiled,
    several_optimizers_and_learning_rates_over_accumulated_gradients,
    autocast_is_that_of_the_plain_model,
    optimizer_states_move_to_another_split,
)


if __name__ == "__main__":
    run_checks(chosen(CHECKS))
