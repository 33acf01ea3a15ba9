"""Runs whose parameters, gradients and optimizer states are on the host, against the same runs on the device.

Usage: host_states.py [--all] [CHECK...], on two ranks.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launched import ALL, chosen, run_checks
from memory_policies import planned
from tp_models import VOCABULARY, batch, build
from transformers import GPT2Config, GPT2LMHeadModel

import shardwright.torch as sw
from benchmarks.tracked import held_by, tracking
from shardwright.backends.torch.machine.host_store import is_in_file
from tests.comparison import Comparison

STEPS = 3
PLACES = {"optimizer": 2, "parameters": 3}


@sw.step
def train_step(model: Any, given: dict[str, torch.Tensor]) -> Any:
    loss = model(**given).loss
    model.backward(loss, reduction="mean")
    return loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


class Counted(torch.optim.Optimizer):
    """One that counts its steps among the options of a group, as some do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 0.5)
                    parameter.sub_(mean, alpha=group["lr"] / group["steps"])


def in_file(tensors: Any) -> list[bool]:
    return [is_in_file(tensor.untyped_storage()) for tensor in tensors if tensor.numel()]


def wider() -> torch.nn.Module:
    """A model each of whose calls has parameters enough to be gathered by themselves."""
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=4, n_embd=96, n_head=4, vocab_size=VOCABULARY * 4, n_positions=64, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


class Run:
    """A model split by a plan, and its optimizer."""

    def __init__(
        self, name: str = "gpt2", make: Callable[..., torch.optim.Optimizer] = adamw, dropout: float = 0.1,
        freeze: bool = False, passes: int = 1, **pins: Any,
    ) -> None:  # fmt: skip
        torch.manual_seed(0)
        model = wider() if name == "wider" else build(name, dropout)
        if freeze:
            next(module for module in model.modules() if isinstance(module, torch.nn.Embedding)).requires_grad_(False)
        given = batch("gpt2" if name == "wider" else name, 0)
        self.whole = {key: torch.cat([value] * 4) for key, value in given.items()}
        self.plan = planned(
            (name, dropout, freeze), model, {key: value[:4] for key, value in self.whole.items()}, **pins
        )
        with tempfile.TemporaryDirectory() as folder:
            self.plan.save(Path(folder) / "plan.json")
            sw.init(plan=str(Path(folder) / "plan.json"), wait_timeout_s=60.0)
        sw.set_seed(5)
        self.model = sw.DistributedModel(model, backward_passes_per_step=passes)
        self.optimizer = sw.DistributedOptimizer(make(self.model.parameters()))
        self.own = self.plan.decision.batch // self.plan.decision.dp

    def given(self, step: int) -> dict[str, torch.Tensor]:
        return {key: value[: self.own].roll(step, 0) for key, value in self.whole.items()}

    def trained(self, clips: bool = False, each: int = 1) -> dict[str, Any]:
        losses, norms = [], []
        for step in range(STEPS):
            self.optimizer.zero_grad()
            losses += [
                float(train_step(self.model, self.given(step * each + n)).all_reduce_mean()) for n in range(each)
            ]
            if clips:
                norms.append(float(self.model.clip_grad_norm_(0.5)))
            held = self.model.local_named_parameters()
            gradients = {key: None if p.grad is None else p.grad.clone() for key, p in held}
            self.optimizer.step()
        return {"losses": losses + norms, "gradients": gradients, "weights": self.weights()}

    def weights(self) -> dict[str, torch.Tensor]:
        return {key: value.clone() for key, value in self.model.state_dict().items()}

    def close(self) -> None:
        sw.shutdown()


def require_same(title: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Not to the bit: kernels sum in another order where memory begins elsewhere in a line."""
    same = (
        Comparison(title).losses(found["losses"], wanted["losses"]).gradients(found["gradients"], wanted["gradients"])
    )
    same.values(found["weights"], wanted["weights"], relative=1e-4, absolute=1e-4, what="weights").require()


def compared(title: str, pins: dict[str, Any], run: Callable[[Run], dict[str, Any]], **options: Any) -> None:
    """That runs with the state on the host are what they are with it on the device."""
    for place, level in PLACES.items():
        # Where parameters are cut over replicas, so are those that it is held against.
        found, wanted = [], []
        for rows, on_host in ((wanted, {}), (found, {"offload_states": place})):
            shard = level if on_host or pins.get("dp", 1) > 1 else 0
            one = Run(**options, **pins, shard=shard, **on_host)
            rows.append(run(one))
            if on_host:
                trained = [p for _, p in one.model.local_named_parameters() if p.requires_grad]
                states = [value for p in trained for value in one.optimizer.state[p].values()]
                assert all(in_file(trained)), title
                assert all(in_file(state for state in states if isinstance(state, torch.Tensor) and state.dim())), title
            one.close()
        require_same(f"{title}, {place}", found[0], wanted[0])


def training_is_that_on_the_device() -> None:
    splits: list[tuple[str, dict[str, Any]]] = [("gpt2", {"tp": 2}), ("t5", {"pp": 2}), ("images", {"dp": 2})]
    for name, pins in [*splits, ("gpt2", {"dp": 2})] if ALL else splits:
        compared(f"{name}, {pins}", pins, lambda run: run.trained(), name=name)


def policies_for_activations_go_with_it() -> None:
    for pins in ({"dp": 2, "recompute": "full"}, {"pp": 2, "recompute": "elementwise", "precision": "bf16"}):
        compared(f"{pins}", pins, lambda run: run.trained())


def clipping_accumulation_and_frozen_parameters_go_with_it() -> None:
    compared("clipped, two passes", {"dp": 2}, lambda run: run.trained(clips=True, each=2), passes=2)
    compared(
        "clipped, added up, frozen, bf16", {"pp": 2, "precision": "bf16"},
        lambda run: run.trained(clips=True, each=2), freeze=True,
    )  # fmt: skip
    if not ALL:
        return
    compared("clipped", {"pp": 2}, lambda run: run.trained(clips=True))
    compared("two passes", {"dp": 2}, lambda run: run.trained(each=2), passes=2)
    compared("added up, frozen", {"dp": 2}, lambda run: run.trained(each=2), freeze=True)
    compared("frozen, bf16", {"pp": 2, "precision": "bf16"}, lambda run: run.trained(), freeze=True)


def steps_that_are_counted_in_a_group_count_once() -> None:
    def counted(run: Run) -> dict[str, Any]:
        found = run.trained()
        assert [group["steps"] for group in run.optimizer.param_groups] == [STEPS]
        return found

    compared("counted", {"dp": 2, "shard_group": 2}, counted, make=Counted)


def state_dicts_go_from_the_host_to_the_device_and_back() -> None:
    for place, level in PLACES.items():
        for pins in ({"dp": 2},) if place == "optimizer" else ({"dp": 2}, {"pp": 2}) if ALL else ({"pp": 2},):
            first = Run(**pins, shard=level, offload_states=place)
            first.trained()
            weights, states = first.weights(), first.optimizer.state_dict()
            wanted = first.trained()
            first.close()
            second = Run(**pins, shard=level if "dp" in pins else 0)
            second.model.load_state_dict(weights)
            second.optimizer.load_state_dict(states)
            for _ in range(STEPS):  # the numbers of steps say which values dropout draws
                second.model.runtime.split_model.steps_run += 1
            found = second.trained()
            kept = second.weights(), second.optimizer.state_dict()
            second.close()
            require_same(f"{pins}, {place}, loaded on the device", found, wanted)
            third = Run(**pins, shard=level, offload_states=place)
            third.model.load_state_dict(kept[0])
            third.optimizer.load_state_dict(kept[1])
            third.trained()
            held = [p for _, p in third.model.local_named_parameters() if p.numel()]
            assert all(in_file(v for p in held for v in third.optimizer.state[p].values() if v.dim()))
            third.close()


def memory_is_as_predicted() -> None:
    splits: list[dict[str, Any]] = [{"dp": 2}, {"pp": 2, "precision": "bf16", "recompute": "full"}, {"pp": 2}]
    for pins in splits if ALL else splits[:2]:
        peaks = {}
        for place, level in ({"none": 0} | PLACES).items():
            run = Run("wider", **pins, shard=level, offload_states=place)
            peaks[place] = measured(run)
            predicted = run.plan.predicted.peak_memory_bytes[dist.get_rank()]
            print(f"{pins}, {place}: {peaks[place]} held, {predicted / peaks[place]:.3f} predicted", flush=True)
            assert 0.99 * peaks[place] <= predicted <= 1.1 * peaks[place], (pins, place)
            run.close()
        assert peaks["parameters"] < peaks["optimizer"] < peaks["none"], peaks


def measured(run: Run) -> int:
    """The most bytes that this rank held in a step, the update included, once states are there."""
    peak = 0
    for step in range(2):
        run.optimizer.zero_grad()
        given = run.given(step)
        with tracking(held_by(run.model.runtime), run.optimizer.optimizer, given.values()) as tracker:
            train_step(run.model, given)
            run.optimizer.step()
        peak = tracker.peak_bytes()
    return peak


def the_first_update_makes_no_states_on_the_device() -> None:
    run = Run("wider", pp=2, shard=3, offload_states="parameters")
    given = run.given(0)
    train_step(run.model, given)
    sizes = [
        sum(p.nbytes for p in group.parameters.values()) for group in run.model.runtime.split_model.parts.flat.groups
    ]
    with tracking((), run.optimizer.optimizer, ()) as tracker:
        run.optimizer.step()
    # Both moments of one group, and three values for a while of its largest parameter.
    assert tracker.peak_bytes() <= 5 * max(sizes) + 2**15, (tracker.peak_bytes(), max(sizes))
    run.close()


CHECKS: tuple[Callable[[], None], ...] = (
    training_is_that_on_the_device,
    policies_for_activations_go_with_it,
    clipping_accumulation_and_frozen_parameters_go_with_it,
    steps_that_are_counted_in_a_group_count_once,
    state_dicts_go_from_the_host_to_the_device_and_back,
    memory_is_as_predicted,
    the_first_update_makes_no_states_on_the_device,
)

if __name__ == "__main__":
    run_checks(chosen(CHECKS))
