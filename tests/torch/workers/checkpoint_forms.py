"""Checkpoints of models, optimizers and runs of many forms, on two ranks: each goes on to the same bits.

Usage: checkpoint_forms.py FOLDER
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import run_checks
from torch import nn

import shardwright.torch as sw
from shardwright.core.errors import CheckpointError

FOLDER = Path(sys.argv[1])
BEFORE, AFTER = 2, 2
SPLIT: dict[str, Any] = {"pipeline_parallel_degree": 2}


class Net(nn.Module):
    """Two blocks, a parameter without entries, one that is frozen, and state of a module's own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(16, 8, dtype=dtype)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8, dtype=dtype) for _ in range(4)))
        self.frozen = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(8, 1, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.blocks(self.table(ids)))
        return (self.head(self.frozen(x)).float() ** 2).mean()


class Counting(nn.Linear):
    """A linear layer with a count that no parameter holds."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scale": torch.full((2,), 0.5)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Averaged(torch.optim.Optimizer):
    """An optimizer with numbers of Python's among its states."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "scale": torch.tensor(0.5)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["t"] = state.get("t", 0) + 1
                state["decay"] = state.get("decay", 0.1) * 0.7
                assert isinstance(state["decay"], float)
                assert isinstance(state["t"], int)
                p.sub_(p.grad * group["scale"], alpha=group["lr"] * state["decay"] / state["t"])


@sw.step
def train_step(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids)
    model.backward(loss, reduction="mean")
    return loss


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def start(build: Callable[[], nn.Module], make: Any, config: dict[str, Any]) -> tuple[Any, Any]:
    sw.init({"ddp": True, "microbatches": 2, **config})
    model = sw.DistributedModel(build())
    return model, sw.DistributedOptimizer(make(list(model.parameters())))


def steps(model: Any, optimizer: Any, first: int, end: int) -> None:
    for number in range(first, end):
        optimizer.zero_grad()
        ids = torch.randint(0, 16, (4, 3), generator=torch.Generator().manual_seed(10 * number + sw.rdp_rank()))
        train_step(model, ids)
        optimizer.step()


def state(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for name, states in optimizer.state_dict()["state"].items():
        found |= {f"{key} of {name}": torch.as_tensor(value).clone() for key, value in states.items()}
    return found


def goes_on(
    name: str, config: dict[str, Any], build: Callable[[], nn.Module] = Net, make: Any = adamw, again: bool = True
) -> None:
    """Run, save and go on; then go on from that, and from what was saved ``again`` before the first step, or is
    refused then."""
    folder = FOLDER / name
    model, optimizer = start(build, make, config)
    steps(model, optimizer, 0, BEFORE)
    sw.save_checkpoint(folder, "mid")
    steps(model, optimizer, BEFORE, BEFORE + AFTER)
    expected = state(model, optimizer)
    sw.shutdown()
    for tag in ("mid", "again") if again else ("mid",):
        model, optimizer = start(build, make, config)
        sw.resume_from_checkpoint(folder, tag)
        if tag == "mid" and again:
            sw.save_checkpoint(folder, "again", partial=False)
        elif not again:
            with pytest.raises(CheckpointError, match="wait for the first step"):
                sw.save_checkpoint(folder, "again")
        steps(model, optimizer, BEFORE, BEFORE + AFTER)
        found = state(model, optimizer)
        assert found.keys() == expected.keys(), f"{name} from {tag}: {found.keys() ^ expected.keys()}"
        unlike = [key for key, value in expected.items() if not torch.equal(found[key], value)]
        assert not unlike, f"{name} from {tag}: {unlike} differ"
        sw.resume_from_checkpoint(folder, "mid")  # once more, in the middle of training
        steps(model, optimizer, BEFORE, BEFORE + AFTER)
        found = state(model, optimizer)
        assert all(torch.equal(found[key], value) for key, value in expected.items()), f"{name} from {tag}, once more"
        sw.shutdown()


def by_messages() -> None:
    goes_on("messages", {"pipeline_parallel_degree": 2, "pipeline_mode": "messages"})


def masters_of_a_model_in_16_bits() -> None:
    def half() -> nn.Module:
        return Net(torch.bfloat16)

    goes_on("masters", {"bf16": True, "shard": 2}, half, again=False)
    goes_on("plain masters", {"bf16": True}, half, again=False)


def numbers_among_states() -> None:
    goes_on("numbers", {}, make=Averaged)


def sharded_with_a_tensor_axis() -> None:
    goes_on("tensor axis", {"tensor_parallel_degree": 2})


def state_on_the_host() -> None:
    goes_on("host", {"offload_states": "parameters", "shard": 3})


def counting() -> nn.Module:
    net = Net()
    net.blocks[0], net.head = Counting(8, 8), Counting(8, 1)
    return net


def extra_state_of_modules() -> None:
    """Stages have the extra state of the modules that they run, and no other; it crosses any split."""
    folder, wanted = FOLDER / "extra", {"blocks.0": 5, "head": 7}
    for number, (saved, taken) in enumerate((({}, SPLIT), (SPLIT, SPLIT), (SPLIT, {}))):
        model, optimizer = start(counting, adamw, saved)
        steps(model, optimizer, 0, 1)
        runs_here = {path for path in wanted if f"{path}.weight" in dict(model.local_named_parameters())}
        assert runs_here == (set(wanted) if saved == {} else {("blocks.0", "head")[sw.pp_rank()]})
        for path, calls in wanted.items():
            model.module.get_submodule(path).calls = calls if path in runs_here else -1
        sw.save_checkpoint(folder, f"{number}", partial=number != 1).wait()
        whole, own = model.state_dict(), model.local_state_dict()
        assert [whole[f"{path}._extra_state"]["calls"] for path in wanted] == [5, 7]
        assert {key.removesuffix("._extra_state") for key in own if key.endswith("_extra_state")} == runs_here
        for path in wanted:
            model.module.get_submodule(path).calls = 0
        model.load_state_dict(own)
        assert all(model.module.get_submodule(path).calls == wanted[path] for path in runs_here)
        sw.shutdown()
        for after_step in (False, True):
            model, optimizer = start(counting, adamw, taken)
            if after_step:
                steps(model, optimizer, 0, 1)
            sw.resume_from_checkpoint(folder, f"{number}")
            found = model.state_dict()
            for path, calls in wanted.items():
                assert found[f"{path}._extra_state"]["calls"] == calls
                assert torch.equal(found[f"{path}._extra_state"]["scale"], torch.full((2,), 0.5))
            sw.shutdown()
    start(Net, adamw, {})
    with pytest.raises(CheckpointError, match=r"blocks\.0\._extra_state"):
        sw.resume_from_checkpoint(folder, "0")
    sw.resume_from_checkpoint(folder, "0", strict=False)
    sw.shutdown()


CHECKS = (
    by_messages,
    masters_of_a_model_in_16_bits,
    numbers_among_states,
    sharded_with_a_tensor_axis,
    state_on_the_host,
    extra_state_of_modules,
)


run_checks(check for check in CHECKS if len(sys.argv) <= 2 or check.__name__ in sys.argv[2:])
