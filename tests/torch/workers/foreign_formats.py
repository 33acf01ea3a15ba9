"""Weights and states of optimizers in forms that other programs write, under plans of two ranks.

Usage: foreign_formats.py FOLDER
"""

import copy
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from launched import run_checks
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import shardwright.torch as sw
from shardwright.backends.torch.state import weight_files
from shardwright.backends.torch.state.dcp_writer import write_dcp
from shardwright.backends.torch.state.plain_states import plain_optimizer_state, saved_state
from shardwright.core.checkpoint.boxes import Box
from shardwright.core.checkpoint.reader import Reader
from shardwright.core.checkpoint.safetensors_folder import SafetensorsModel, write_safetensors_folder
from shardwright.core.errors import DisagreementError, PlanError
from tests.comparison import Comparison

FOLDER = Path(sys.argv[1])
PLANS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_degree": 2},
    "tp2": {"tensor_parallel_degree": 2},
    "dp2": {},
    "dp2-s1": {"shard": 1},
    "dp2-s3": {"shard": 3},
}
SOURCES = {"hub": ("pp2", "tp2", "dp2-s1", "dp2-s3"), "dcp": ("pp2", "tp2", "dp2-s3"), "own": ("tp2", "dp2-s3")}
"""The folders of weights, and the plans that take them."""
SAMPLES, STEPS = 8, 2


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss, reduction="mean")
    return loss


def adamw(model: Any) -> torch.optim.Optimizer:
    """Two groups, in another order than the model has its parameters."""
    named = list(model.named_parameters())
    flat, rest = [p for _, p in named if p.dim() < 2], [p for _, p in named if p.dim() >= 2]
    return torch.optim.AdamW([{"params": flat, "weight_decay": 0.0}, {"params": rest}], lr=1e-3, weight_decay=0.1)


def trained() -> tuple[Any, torch.optim.Optimizer]:
    """The unsplit model after a few steps, and its optimizer, with the learning rate of a schedule."""
    model = models.build("gpt2")
    optimizer = adamw(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**models.batch("gpt2", step, SAMPLES)).loss.backward()
        optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 3e-4
    return model, optimizer


def names_of(model: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    named = {parameter: name for name, parameter in model.named_parameters()}
    return [named[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def a_step(model: Any, optimizer: Any = None, number: int = STEPS) -> float:
    batch = models.batch("gpt2", number, SAMPLES)
    own = {key: tensor.chunk(sw.rdp_size())[sw.rdp_rank()] for key, tensor in batch.items()}
    if optimizer is not None:
        optimizer.zero_grad()
    return float(train_step(model, own).all_reduce_mean())


def start(plan: str) -> None:
    split = 1 if plan.startswith("dp") else 2
    sw.init({"ddp": True, "microbatches": split, **PLANS[plan]})


class Counted:
    """A context that counts the entries that are read of safetensors files."""

    def __enter__(self) -> "Counted":
        self.entries, self._boxes = 0, SafetensorsModel.boxes

        def counting(model: SafetensorsModel, name: str, box: Box) -> Any:
            self.entries += box.entries
            return self._boxes(model, name, box)

        SafetensorsModel.boxes = counting  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        SafetensorsModel.boxes = self._boxes  # type: ignore[method-assign]


def write_folders(model: Any) -> None:
    """The weights as a folder of indexed safetensors, and as a DCP folder in uneven chunks of two ranks."""
    if dist.get_rank() == 0:
        weights = {name: value.contiguous() for name, value in model.state_dict().items()}
        assert len(write_safetensors_folder(saved_state(weights), FOLDER / "hub", 40_000)) > 3
    mesh = init_device_mesh("cpu", (2,))
    cut = {
        name: distribute_tensor(value, mesh, [Shard(0) if value.dim() else Replicate()])
        for name, value in model.state_dict().items()
    }
    dcp.save({"model": cut}, checkpoint_id=FOLDER / "dcp")
    dist.barrier()


def weights_of_folders() -> None:
    reference, _ = trained()
    write_folders(reference)
    expected = reference.state_dict()
    for source, plans in SOURCES.items():
        for plan in plans:
            start(plan)
            with torch.device("meta"):
                empty = models.build("gpt2")
            with Counted() as counted:
                model = sw.DistributedModel(empty, weights=FOLDER / source)
                a_step(model)
            held = sum(p.numel() for p in model.local_parameters())
            if plan == "dp2-s1":  # parameters are whole in a step, and have their memory
                held = sum(p.numel() for p in reference.parameters())
            assert counted.entries == (held if source == "hub" else 0), (plan, source, counted.entries, held)
            Comparison(f"{plan} from {source}").equal(model.state_dict(), expected).require()
            if source == "dcp" and plan == "pp2":
                sw.save_checkpoint(FOLDER / "own", "last")
            sw.shutdown()


def folders_that_differ() -> None:
    """One rank has another folder, or none."""
    mine = FOLDER / ("hub" if dist.get_rank() else "dcp")
    start("dp2")
    with torch.device("meta"):
        empty = models.build("gpt2")
    with pytest.raises(DisagreementError, match="the weights"):
        sw.DistributedModel(empty, weights=mine)
    sw.shutdown()
    start("dp2")
    with torch.device("meta"):
        empty = models.build("gpt2")
    with pytest.raises((DisagreementError, ValueError), match="no such file or folder"):
        sw.DistributedModel(empty, weights=FOLDER / ("hub" if dist.get_rank() else "nowhere"))
    sw.shutdown()
    start("pp2")  # on every rank, whichever would hold it
    with torch.device("meta"):
        other = models.build("gpt2")
        other.transformer.ln_f = torch.nn.LayerNorm(7)
    with pytest.raises(PlanError, match=r"'transformer.ln_f.bias' of shape \(32,\): expected \(7,\)"):
        sw.DistributedModel(other, weights=FOLDER / "hub")
    sw.shutdown()


def by_name(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    names, state = names_of(model, optimizer), optimizer.state_dict()
    return {
        "state": {names[at]: held for at, held in state["state"].items()},
        "param_groups": [{**group, "params": [names[at] for at in group["params"]]} for group in state["param_groups"]],
    }


def states_of_plain_optimizers() -> None:
    """Loaded before the first step and after it, by position and by name, they are those of the unsplit run, which goes
    on alike."""
    reference, plain = trained()
    weights = {name: value.clone() for name, value in reference.state_dict().items()}
    named = copy.deepcopy(by_name(reference, plain))
    numbered = copy.deepcopy(plain.state_dict())
    plain.zero_grad()
    reference(**models.batch("gpt2", STEPS, SAMPLES)).loss.backward()
    plain.step()
    for plan in ("pp2", "tp2", "dp2-s1", "dp2-s3"):
        for form, state in (("by number", numbered), ("by name", named)):
            for is_late in (False, True) if form == "by number" else (plan in ("pp2", "dp2-s1"),):
                what = f"{plan} {form}, {'after' if is_late else 'before'} the first step"
                start(plan)
                model = sw.DistributedModel(models.build("gpt2"))
                optimizer = sw.DistributedOptimizer(adamw(model))
                if is_late:
                    a_step(model, optimizer, 7)
                    optimizer.step()
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
                if is_late:
                    found = optimizer.state_dict()
                    assert found["state"].keys() == named["state"].keys(), what
                    Comparison(what).equal(found["state"], named["state"]).require()
                    assert found["param_groups"] == named["param_groups"], what
                a_step(model, optimizer)
                if not is_late:
                    Comparison(what).equal(optimizer.state_dict()["state"], named["state"]).require()
                optimizer.step()
                same = Comparison(what).values(model.state_dict(), reference.state_dict(), relative=1e-4, absolute=1e-5)
                same.require()
                sw.shutdown()


def states_that_do_not_fit() -> None:
    _, plain = trained()
    state = plain.state_dict()
    start("pp2")
    model = sw.DistributedModel(models.build("gpt2"))
    one_group = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    with pytest.raises(PlanError, match=r"2 parameter groups were saved|in groups of \[\d+, \d+\], and this optimizer"):
        one_group.load_state_dict(state)
    for given, said in (
        ({"state": {}}, "expected the state dict of an optimizer, with 'state' and 'param_groups'"),
        ({"state": {}, "param_groups": [{"lr": 0.1}]}, "group 0 was saved without the parameters that it has"),
        ({"state": {}, "param_groups": [{"params": [0, "b"]}]}, "some parameters by number and some by name"),
    ):
        with pytest.raises(PlanError, match=said):
            one_group.load_state_dict(given)
    sw.shutdown()


def states_of_dcp_under_a_plan() -> None:
    """An optimizer's state dict by names, as DCP has it, of a pipeline is taken back."""
    reference, plain = trained()
    found = get_optimizer_state_dict(reference, plain)
    start("pp2")
    model = sw.DistributedModel(models.build("gpt2"))
    optimizer = sw.DistributedOptimizer(adamw(model))
    optimizer.load_state_dict(found)
    Comparison().equal(optimizer.state_dict()["state"], by_name(reference, plain)["state"]).require()
    sw.shutdown()


def exports_of_a_checkpoint() -> None:
    """A checkpoint of a pipeline as a DCP folder, a Hugging Face folder and a plain optimizer's state dict."""
    reference, plain = trained()
    start("pp2")
    model = sw.DistributedModel(models.build("gpt2"))
    optimizer = sw.DistributedOptimizer(adamw(model))
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    a_step(model, optimizer)
    optimizer.step()
    sw.save_checkpoint(FOLDER / "pipeline", "last")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()
    sw.shutdown()
    if dist.get_rank() == 0:
        reader, expected = Reader.open(FOLDER / "pipeline"), "as it was saved"
        write_dcp(reader, FOLDER / "exported")
        other, fresh = trained()
        held = {"model": other.state_dict(), "optim": get_optimizer_state_dict(other, fresh)}
        dcp.load(held, checkpoint_id=FOLDER / "exported", no_dist=True)
        Comparison(expected).equal(held["model"], weights).equal(held["optim"]["state"], states["state"]).require()
        names = names_of(other, fresh)
        fresh.load_state_dict(plain_optimizer_state(reader, names))
        numbers = {names[at]: state for at, state in fresh.state_dict()["state"].items()}
        Comparison(expected).equal(numbers, states["state"]).require()
        assert [group["lr"] for group in fresh.param_groups] == [3e-4, 3e-4]
        write_safetensors_folder(reader, FOLDER / "exported for others")
        found = dict(weight_files.opened(FOLDER / "exported for others"))
        Comparison(expected).equal(found, {name: weights[name] for name in found}).require()
        assert set(weights) - set(found) == {"lm_head.weight"}, "which is tied"
    dist.barrier()


CHECKS = (
    weights_of_folders,
    folders_that_differ,
    states_of_plain_optimizers,
    states_that_do_not_fit,
    states_of_dcp_under_a_plan,
    exports_of_a_checkpoint,
)


assert weight_files.opened({}) == {}
run_checks(check for check in CHECKS if len(sys.argv) <= 2 or check.__name__ in sys.argv[2:])
