"""Checks of the torch runtime on two ranks, in one launch. Prints `ok NAME` for each; any failure ends the launch.

Usage: semantics.py FOLDER [--all] [CHECK...]; FOLDER holds what `reference.py` left.
"""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import ALL, run_checks
from models import batch, build
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright.torch as sw
from shardwright.backends.registry import load
from shardwright.core.errors import MissingCapabilityError, PlanError, ShardwrightError
from shardwright.core.plan.plan import Plan
from tests.comparison import Comparison

FOLDER = Path(sys.argv[1])
CONFIG = {"pipeline_parallel_degree": 2, "microbatches": 4, "wait_timeout_s": 60.0}


@sw.step
def train_step(model, batch):
    loss = model(**batch).loss
    model.backward(loss)
    return loss


@sw.step
def weighted_step(model, batch):
    loss = model(**batch).loss
    weight = (batch["labels"][:, 1:] != -100).sum()
    model.backward(loss, weight=weight)
    return {"loss": loss, "tokens": weight.float(), "text": "kept"}


@sw.step
def predict(model, batch):
    return model(**batch).logits


def expect(kind: type[Exception], match: str, run: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        run()
    assert match in str(caught.value), str(caught.value)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.local_named_parameters()}


def require_of_ranks(same: Comparison) -> None:
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, same.report())
    Comparison.of_ranks(reports).require()


def losses(model: Any, name: str, steps: int, rate: float = 1e-3) -> list[float]:
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=rate))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        whole = batch(name, step)
        size = sw.dp_size()
        own = {k: t.chunk(size)[sw.dp_rank()] for k, t in whole.items()}
        found.append(float(train_step(model, own).all_reduce_mean()))
        optimizer.step()
        scheduler.step()
    return found


def close(found: list[float], name: str) -> None:
    expected = json.loads((FOLDER / "losses.json").read_text())[name]
    Comparison(name).losses(found, expected, moving=1e-4).require()


def dropout_does_not_depend_on_the_split() -> None:
    for name in ("gpt2", "bert", "t5") if ALL else ("t5",):
        sw.init(CONFIG)
        sw.set_seed(5)
        model = sw.DistributedModel(build(name, dropout=0.2))
        state = torch.get_rng_state()
        close(losses(model, name, 4), f"{name} dropout")
        assert torch.equal(state, torch.get_rng_state()), "the user's generator was left changed"
        sw.shutdown()
    sw.init({"microbatches": 2, "ddp": True})
    sw.set_seed(5)
    close(losses(sw.DistributedModel(build("gpt2", dropout=0.2)), "gpt2", 4), "gpt2 dropout")
    sw.shutdown()


def a_weighted_mean_over_unequal_microbatches() -> None:
    whole = batch("gpt2", 0)
    for row in range(8):
        whole["labels"][row, row + 2 :] = -100
    plain = build("gpt2")
    parts = [{k: t.chunk(4)[m] for k, t in whole.items()} for m in range(4)]
    weights = torch.tensor([float((p["labels"][:, 1:] != -100).sum()) for p in parts])
    each = torch.stack([plain(**p).loss for p in parts])
    expected = (each * weights).sum() / weights.sum()
    expected.backward()
    for config in (CONFIG, {"microbatches": 2, "ddp": True}):
        sw.init(config)
        model = sw.DistributedModel(build("gpt2"))
        own = {k: t.chunk(sw.dp_size())[sw.dp_rank()] for k, t in whole.items()}
        out = weighted_step(model, own)
        same = Comparison("weighted").losses(out["loss"].all_reduce_mean(), expected)
        assert float(out["tokens"].all_reduce_sum()) == float(weights.sum())
        assert out["text"] == "kept"
        assert len(out["loss"].outputs) == config["microbatches"]
        wanted = {name: p.grad for name, p in plain.named_parameters()}
        require_of_ranks(same.gradients(gradients(model), wanted, part=True))
        weighted_step(model, own)  # what an earlier step left is divided by no weight again
        twice = Comparison("weighted, twice")
        require_of_ranks(twice.gradients(gradients(model), {n: 2 * g for n, g in wanted.items()}, part=True))
        sw.shutdown()


def gradients_are_clipped_by_the_norm_of_the_whole_model() -> None:
    """Of every kind; a tied weight counts once."""
    plain = build("gpt2")
    for part in range(4):
        (plain(**{k: t.chunk(4)[part] for k, t in batch("gpt2", 0).items()}).loss / 4).backward()
    left = {name: p.grad.clone() for name, p in plain.named_parameters()}
    for config in (CONFIG, {"microbatches": 2, "ddp": True}):
        sw.init(config)
        model = sw.DistributedModel(build("gpt2"))
        train_step(model, {k: t.chunk(sw.dp_size())[sw.dp_rank()] for k, t in batch("gpt2", 0).items()})
        found = {name: gradient.clone() for name, gradient in gradients(model).items()}
        for kind in (2.0, 1.0, 3.0, float("inf")):
            same = Comparison(f"norm {kind}")
            for limit in (0.01, 1e6):
                for held, gradients_of in ((model.local_named_parameters(), found), (plain.named_parameters(), left)):
                    for name, parameter in held:
                        parameter.grad = gradients_of[name].clone()
                same.where = f"limit {limit}"
                wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, kind)
                same.losses(model.clip_grad_norm_(limit, kind), wanted, what="norms")
                same.gradients(gradients(model), {name: p.grad for name, p in plain.named_parameters()}, part=True)
            require_of_ranks(same)
        if sw.pp_rank() == 0:
            next(iter(model.local_parameters())).grad[0] = float("inf")
        clip = functools.partial(model.clip_grad_norm_, 1.0, error_if_nonfinite=True)
        expect(ShardwrightError, "expected a finite number", clip)
        sw.shutdown()


def gradients_add_up_over_steps() -> None:
    sw.init(CONFIG)
    model = sw.DistributedModel(build("gpt2"))
    train_step(model, batch("gpt2", 0))
    twice = {name: 2 * gradient for name, gradient in gradients(model).items()}
    train_step(model, batch("gpt2", 0))
    Comparison("twice").gradients(gradients(model), twice).require()
    sw.shutdown()


def evaluation_and_changing_shapes() -> None:
    sw.init(CONFIG)
    plain = build("llama").eval()
    model = sw.DistributedModel(build("llama"))
    train_step(model, batch("llama", 0))
    model.eval()
    for length in (7, 12):
        given = batch("llama", 0, length=length)
        with torch.no_grad():
            logits = predict(model, {"input_ids": given["input_ids"]})
            wanted = plain(given["input_ids"]).logits
        Comparison("logits").values(logits.concat(), wanted, relative=1e-4, absolute=1e-5).require()
        assert logits.stack().shape == (4, 2, length, 64)
    expect(ShardwrightError, "@sw.step", lambda: model(given["input_ids"]))
    sw.shutdown()


def a_state_dict_goes_around() -> None:
    sw.init(CONFIG)
    plain = build("gpt2")
    expected = {k: t.clone() for k, t in plain.state_dict().items()}
    model = sw.DistributedModel(plain)
    losses(model, "gpt2", 1, rate=0.0)
    state = model.state_dict()
    assert list(state) == list(expected)
    Comparison("state").equal(state, expected).require()
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()
    only = model.state_dict(rank0_only=True)
    if sw.rank() == 0:
        Comparison("state of rank 0").equal(only, expected).require()
    else:
        assert not only
    changed = {k: t + 1 for k, t in expected.items()}
    model.load_state_dict(changed)
    Comparison("loaded").equal(model.state_dict(), changed).require()
    wrong = {k.replace("ln_f", "lnf"): t for k, t in expected.items()}
    expect(PlanError, "did you mean 'transformer.lnf.weight'", lambda: model.load_state_dict(wrong))
    assert model.load_state_dict(wrong, strict=False).missing_keys == [
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    ]
    short = expected | {"transformer.ln_f.bias": torch.zeros(3)}
    expect(PlanError, "(3,)", lambda: model.load_state_dict(short))
    sw.shutdown()


class Allocated(TorchDispatchMode):
    """Counts the elements of new memory on real devices: each result whose memory no argument had."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {_memory(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in pytree.tree_leaves(out):
            real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"
            if real and _memory(tensor) not in given:
                self.total += tensor.numel()
        return out


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def from_the_meta_device() -> None:
    files = {"gpt2": FOLDER / "gpt2.pt", "llama": FOLDER / "llama.safetensors", "bert": FOLDER / "bert.pt"}
    for name, weights in files.items():
        with sw.delay_param_initialization() if name == "bert" else torch.device("meta"):
            empty = build(name)
        sw.init(plan=FOLDER / f"{name}.plan.json", wait_timeout_s=60.0)
        whole = sum(p.numel() for p in empty.parameters())
        largest = max(p.numel() for p in empty.parameters())
        with Allocated() as allocated:
            model = sw.DistributedModel(empty, weights=str(weights))
        held = sum(p.numel() for p in model.local_parameters())
        assert held <= 1.15 * whole / 2 + largest, (name, held, whole)
        # Two copies at most of what this rank holds: what the file gives, and the parameter.
        assert allocated.total <= 2 * held + 10_000, (name, allocated.total, held)
        assert held < whole
        close(losses(model, name, 3), name)
        sw.shutdown()


def from_an_init_function() -> None:
    def init(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter, std=0.05)

    sums = []
    for config in (CONFIG, {"microbatches": 4, "ddp": True}):
        with torch.device("meta"):
            empty = build("gpt2")
        optimizer = torch.optim.AdamW(empty.parameters(), lr=1e-3)
        sw.init(config)
        model = sw.DistributedModel(empty, weights=init)
        distributed = sw.DistributedOptimizer(optimizer)
        train_step(model, batch("gpt2", 0))
        before = [p.clone() for p in model.local_parameters()]
        distributed.step()
        assert all(not torch.equal(a, b) for a, b in zip(before, model.local_parameters(), strict=True))
        sums.append({k: float(t.sum()) for k, t in model.state_dict().items()})
        sw.shutdown()
    Comparison("weights depend on the split").values(*sums, relative=0.0, absolute=2e-2).require()
    with torch.device("meta"):
        empty = build("gpt2")
    sw.init(plan=FOLDER / "gpt2.plan.json")
    expect(ShardwrightError, "on the meta device", lambda: sw.DistributedModel(empty))
    sw.shutdown()


def a_backend_compiles_a_plan() -> None:
    plan = Plan.load(FOLDER / "gpt2.plan.json")
    model = build("gpt2")
    executable = load("torch").compile(plan, model)
    close([executable.step(batch("gpt2", step)) for step in range(3)], "gpt2")
    whole = executable.whole_parameters()
    assert {k: tuple(t.shape) for k, t in whole.items()} == {n: tuple(p.shape) for n, p in model.named_parameters()}


def wrong_inputs() -> None:
    sw.init(CONFIG)
    expect(ShardwrightError, "init was called twice", lambda: sw.init(CONFIG))
    model = sw.DistributedModel(build("gpt2"))
    expect(ShardwrightError, "wrapped already, as GPT2LMHeadModel (model 0)", lambda: sw.DistributedModel(model.module))
    seven = batch("gpt2", 0)
    seven["labels"] = seven["labels"][:7]
    expect(ShardwrightError, "7 samples, which 4 microbatches do not divide", lambda: train_step(model, seven))
    expect(
        ShardwrightError,
        "the ranks disagree on the contents of the batch",
        lambda: train_step(model, batch("gpt2", sw.rank())),
    )
    expect(ShardwrightError, "inside a function decorated", lambda: model.backward(torch.ones(())))
    train_step(model, batch("gpt2", 0))
    plain = build("gpt2")
    plain(**batch("gpt2", 0)).loss.backward()
    for kind in (float("inf"), 2.0):  # torch's own functions, over the gradients of all ranks
        same = Comparison(f"norm {kind}")
        same.losses(
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, kind),
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9, kind),
        ).require()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    same = Comparison("clipped")
    own = {name: p.grad for name, p in model.local_named_parameters()}
    same.gradients(own, {name: p.grad for name, p in plain.named_parameters() if name in own}).require()
    one = [next(model.parameters())]
    expect(MissingCapabilityError, "of a split model", lambda: torch.nn.utils.clip_grad_norm_(one, 1.0))
    whole = model.module.state_dict()  # as scripts for DDP save it
    assert list(whole) == list(plain.state_dict())
    Comparison("state").values(whole, plain.state_dict(), relative=0.0, absolute=0.0).require()
    with model.as_held():
        assert any(entry.is_meta for entry in model.module.state_dict().values())
    sw.shutdown()
    expect(ShardwrightError, "do not divide the 2 ranks", lambda: sw.init({"pipeline_parallel_degree": 3}))
    expect(PlanError, "for 4 ranks", lambda: sw.init(plan=FOLDER / "four.plan.json"))
    expect(
        ShardwrightError, "the plan decides that", lambda: sw.init({"microbatches": 2}, plan=FOLDER / "four.plan.json")
    )
    sw.init(plan=FOLDER / "gpt2.plan.json")
    expect(PlanError, "for another model", lambda: sw.DistributedModel(build("llama")))
    sw.shutdown()


def data_goes_on_where_it_was() -> None:
    """Under other replicas and another batch size each sample of an epoch is trained on once, in the same order."""

    @sw.step
    def train(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).mean()
        model.backward(loss)
        return loss

    @sw.step
    def look(model: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = model(x).mean()
        return found

    def run(config: dict[str, Any], batch_size: int, steps: int, state: Any = None) -> tuple[list[int], Any]:
        sw.init(config)
        model = sw.DistributedModel(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)))
        own = sw.sampler(range(24), batch_size=batch_size, seed=3)
        if state is not None:
            own.load_state_dict(state)
        own.set_epoch(own.epoch or 1)
        loader = torch.utils.data.DataLoader(range(24), batch_size=batch_size, sampler=own)
        taken, left = [], len(own) // batch_size - steps
        batches = iter(loader)
        for _ in range(steps):
            batch = next(batches)
            every = [torch.empty_like(batch) for _ in range(2)]
            dist.all_gather(every, batch)
            taken += torch.cat(every[: sw.rdp_size()]).tolist()
            train(model, batch[:, None].float())
        assert len(list(batches)) == left, "the rest of the epoch"
        with torch.no_grad():
            look(model, torch.ones(4, 1))  # takes no samples
        state = own.state_dict()
        own.set_epoch(own.epoch + 1)
        assert len(list(own)) == 24 // sw.rdp_size(), "the next epoch is whole"
        sw.shutdown()
        return taken, state

    first, state = run({"microbatches": 1, "ddp": True}, 2, 3)
    assert (state["epoch"], state["samples"]) == (1, 12)
    second, _ = run(CONFIG, 4, 3, state)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4)).tolist()
    assert first + second == order
    sw.init(CONFIG)
    with pytest.raises(sw.ShardwrightError, match="samples_in_dataset=24, and this one has 10"):
        sw.sampler(range(10), seed=3).load_state_dict(state)
    with pytest.raises(sw.ShardwrightError, match="expected the state of a sampler"):
        sw.sampler(range(24), seed=3).load_state_dict({"epoch": 1})
    sw.shutdown()


def data_is_shared_out() -> None:
    sw.init({"microbatches": 1, "ddp": True})
    mine = torch.tensor(list(sw.sampler(range(10), shuffle=False)))
    every = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(every, mine)
    assert sorted(torch.cat(every).tolist()) == list(range(10))
    shuffled = sw.sampler(range(13), batch_size=2, seed=3, drop_last=True)
    first = list(shuffled)
    shuffled.set_epoch(1)
    assert len(first) == len(shuffled) == 6
    assert list(shuffled) != first
    mine = torch.tensor(first).view(-1, 2)
    every = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(every, mine)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(3))[:12]
    assert torch.cat(every, dim=1).flatten().tolist() == order.tolist(), "batches laid end to end are the unsplit run's"
    sw.shutdown()
    sw.init(CONFIG)
    assert list(sw.sampler(range(10), shuffle=False)) == list(range(10))
    assert (sw.pp_rank(), sw.pp_size(), sw.dp_size(), sw.tp_size()) == (sw.rank(), 2, 1, 1)
    assert sw.get_pp_process_group().size() == 2
    assert sw.get_dp_process_group().size() == 1
    sw.barrier()
    sw.shutdown()


CHECKS = (
    dropout_does_not_depend_on_the_split,
    a_weighted_mean_over_unequal_microbatches,
    gradients_are_clipped_by_the_norm_of_the_whole_model,
    gradients_add_up_over_steps,
    evaluation_and_changing_shapes,
    a_state_dict_goes_around,
    from_the_meta_device,
    from_an_init_function,
    a_backend_compiles_a_plan,
    wrong_inputs,
    data_is_shared_out,
    data_goes_on_where_it_was,
)


if __name__ == "__main__":
    names = [name for name in sys.argv[2:] if name != "--all"]
    run_checks(check for check in CHECKS if not names or check.__name__ in names)
