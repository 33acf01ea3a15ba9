"""Scripts of SageMaker's second version, on two ranks: with torch's own FSDP, or split by `transform`."""

import math
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from launched import run_checks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import shardwright.compat
import shardwright.torch as sw
from shardwright.core.errors import CheckpointError, MissingCapabilityError, PlanWarning, ShardwrightError
from tests.comparison import Comparison

shardwright.compat.install()
import torch.sagemaker as tsm  # noqa: E402
from torch.sagemaker.delayed_param import DelayedParamIniter  # noqa: E402
from torch.sagemaker.distributed.checkpoint import state_dict_loader, state_dict_saver  # noqa: E402
from torch.sagemaker.grad_norm import clip_grad_norm_  # noqa: E402
from torch.sagemaker.utils.module_utils import empty_module_params, move_buffers_to_device  # noqa: E402
from torch.sagemaker.utils.process_group_utils import get_global_ranks  # noqa: E402

STEPS = 3
CPU = torch.device("cpu")


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss)
    return loss


def batch(step: int, replica: int = 0, replicas: int = 1) -> dict[str, torch.Tensor]:
    return {key: tensor.chunk(replicas)[replica] for key, tensor in models.batch("gpt2", step, 8).items()}


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model = models.build("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**batch(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.item())
    return found


def split_losses(model: Any, replicas: int) -> list[float]:
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        found.append(float(train_step(model, batch(step, sw.rdp_rank(), replicas)).all_reduce_mean()))
        clip_grad_norm_(model, 1.0)
        optimizer.step()
    return found


def with_the_scripts_own_fsdp() -> None:
    tsm.init({"random_seed": 3})
    assert (tsm.state.rank, tsm.state.world_size, tsm.state.tp_size) == (dist.get_rank(), 2, 1)
    assert tsm.state.tp_process_group is tsm.state.rep_rank_process_group is None
    torch.manual_seed(0)
    model = models.build("gpt2")
    assert tsm.transform(model, dtype=torch.float32, device=CPU) is model
    wrapped = FSDP(model, device_id=CPU, use_orig_params=True)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = wrapped(**batch(step, dist.get_rank(), 2)).loss
        loss.backward()
        clip_grad_norm_(wrapped, 1.0)
        optimizer.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        found.append(whole.item() / 2)
    Comparison("losses of FSDP").losses(found, plain_losses(), moving=1e-3).require()


def values_for_models_on_the_meta_device() -> None:
    tsm.init()
    for own in (None, custom_init):
        with torch.device("meta"):
            model = models.build("gpt2")
        delayed = DelayedParamIniter(model, init_method_using_config=own)
        with (
            pytest.raises(AssertionError, match="parameters and buffers have no values"),
            delayed.validate_params_and_buffers_inited(),
        ):
            pass
        with delayed.validate_params_and_buffers_inited():
            wrapped = FSDP(model, device_id=CPU, param_init_fn=delayed.get_param_init_fn())
        assert delayed.initialised >= sum(p.numel() for p in models.build("gpt2").parameters())
        held = torch.cat([p.detach().flatten() for p in wrapped.parameters()])
        assert 0.0 < held.std().item() < 1.0
        assert held.isfinite().all()

    apart = models.build("gpt2")
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight.detach().clone())
    DelayedParamIniter(apart).get_post_param_init_fn()(apart)
    assert apart.lm_head.weight is apart.transformer.wte.weight


def custom_init(module: torch.nn.Module) -> None:
    empty_module_params(module, device=CPU)
    for parameter in module.parameters(recurse=False):
        parameter.data.normal_(0.0, 0.02)
    move_buffers_to_device(module, device=CPU)


def over_the_tensor_axis() -> None:
    """Weights that rank 0 alone has, and a checkpoint of torch's, which any plan reads."""
    tsm.init({"tensor_parallel_degree": 2, "sm_activation_offloading": True, "activation_loading_horizon": 1})
    assert sw.session.current().config.offload_activations
    assert (tsm.state.tp_size, tsm.state.tensor_parallel_degree) == (2, 2)
    assert tsm.state.hybrid_shard_degree == 0
    assert get_global_ranks(tsm.state.tp_process_group) == get_global_ranks(tsm.state.rep_rank_process_group) == [0, 1]
    torch.manual_seed(0)
    with torch.device("meta" if dist.get_rank() else "cpu"):
        whole = models.build("gpt2")
    model = tsm.transform(whole, load_state_dict_from_rank0=True)
    with pytest.raises(ShardwrightError, match="sharded already, and trains in a step: leave FSDP out"):
        model(**batch(0))
    Comparison("losses over tp").losses(split_losses(model, 1), plain_losses(), moving=1e-3).require()
    state = {"model": model.state_dict(), "note": "text", "steps": STEPS}
    state_dict_saver.save(state, checkpoint_id=FOLDER / "saved")
    state_dict_saver.async_save(state, checkpoint_id=FOLDER / "later")
    assert state_dict_saver.maybe_finalize_async_calls() == [0]
    assert state_dict_saver.maybe_finalize_async_calls(blocking=False) == []
    for folder in ("saved", "later"):
        found = {"model": {key: value * 0 for key, value in state["model"].items()}, "note": "", "steps": 0}
        state_dict_loader.load(found, checkpoint_id=FOLDER / folder)
        Comparison(folder).equal(found["model"], state["model"]).require()
        assert (found["note"], found["steps"]) == ("text", STEPS)
    with pytest.warns(PlanWarning, match="force_check_all_plans=…. has no effect"):
        state_dict_saver.save(state, checkpoint_id=FOLDER / "warned", force_check_all_plans=False)
    with pytest.raises(MissingCapabilityError, match="s3_region"):
        state_dict_saver.save(state, checkpoint_id=FOLDER, s3_region="here")
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        state_dict_loader.load(state, checkpoint_id=FOLDER / "nothing")


def sharded_over_replicas() -> None:
    tsm.init({"hybrid_shard_degree": 2, "random_seed": 5})
    config = sw.session.current().config
    assert (config.shard_level, config.sharing_replicas, config.seed) == (3, 2, 5)
    assert get_global_ranks(tsm.state.rep_rank_process_group) == [0, 1]
    torch.manual_seed(0)
    model = tsm.transform(models.build("gpt2"))
    Comparison("losses of shards").losses(split_losses(model, 2), plain_losses(), moving=1e-3).require()
    with torch.no_grad():
        assert model(**batch(0)).loss.isfinite()
    sw.shutdown()
    tsm.init({"hybrid_shard_degree": 1})
    assert get_global_ranks(tsm.state.rep_rank_process_group) == [dist.get_rank()]
    with torch.device("meta"):
        empty = models.build("gpt2")
    model = tsm.transform(empty)  # its own initialisation
    assert DelayedParamIniter(model).get_param_init_fn()(model) is None
    with pytest.raises(ShardwrightError, match="has its initialisation already"):
        DelayedParamIniter(model, init_method_using_config=custom_init)
    losses = split_losses(model, 2)
    assert abs(losses[0] - math.log(empty.config.vocab_size)) < 0.3, losses


def main() -> None:
    def ended(check: Any) -> Any:
        def run() -> None:
            check()
            sw.shutdown()

        run.__name__ = check.__name__
        return run

    checks = (
        with_the_scripts_own_fsdp, values_for_models_on_the_meta_device, over_the_tensor_axis, sharded_over_replicas,
    )  # fmt: skip
    run_checks(map(ended, checks))


FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()

if __name__ == "__main__":
    main()
