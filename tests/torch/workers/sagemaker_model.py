"""What SageMaker's scripts ask of a distributed model: sagemaker_model.py PP TP."""

import copy
import sys
import warnings
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import torch.distributed as dist
from launched import run_checks, whole_gradients

import shardwright.compat.modelparallel as smp
import shardwright.torch as sw
from shardwright.core.errors import DisagreementError, LossError, MissingCapabilityError, PlanWarning, ShardwrightError
from tests.comparison import Comparison

PP, TP = int(sys.argv[1]), int(sys.argv[2])


@sw.step
def train_step(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    model.backward(loss)
    return loss


@sw.step
def evaluate(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


@sw.step
def summed_step(model: Any, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().sum()
    model.backward(loss)
    return loss


def begin(**keys: Any) -> None:
    sw.init({"pipeline_parallel_degree": PP, "tensor_parallel_degree": TP, "ddp": True, "microbatches": 2, **keys})


def refused(kind: type[Exception], said: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=said):
        call()


def a_hook_runs_once_between_the_split_and_the_first_step() -> None:
    begin()
    model = sw.DistributedModel(models.build("gpt2"), trace_device="gpu", gradient_as_bucket_view=True)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not model.partitioned
    calls: list[tuple[Any, Any, int]] = []
    model.register_post_partition_hook(lambda *given: calls.append((*given, len(list(model.local_parameters())))))
    model.register_post_partition_hook(lambda *given: calls.append((*given, 0))).remove()
    whole = len(list(model.parameters()))
    for step in range(2):
        train_step(model, models.batch("gpt2", step, 8))
        optimizer.step()
    ((given, known, held),) = calls
    assert given is model
    assert known is optimizer
    assert held < whole or PP == 1
    assert model.partitioned
    model.register_post_partition_hook(lambda *given: calls.append((*given, 1)))
    assert len(calls) == 2, "it is split already"
    sw.shutdown()


def a_hook_that_fails_is_told_to_all_ranks() -> None:
    begin()
    model = sw.DistributedModel(models.build("gpt2"))
    calls = []

    def hook(*given: Any) -> None:
        calls.append(given)
        if sw.rank() == 1:
            raise KeyError("a file that this rank lacks")

    model.register_post_partition_hook(hook)
    kind, said = (KeyError, "lacks") if sw.rank() == 1 else (ShardwrightError, "a file that this rank lacks")
    with pytest.raises(kind, match=said):
        train_step(model, models.batch("gpt2", 0, 8))
    assert len(calls) == 1
    sw.shutdown()


def parts_are_found_by_their_rank() -> None:
    begin()
    model = sw.DistributedModel(models.build("gpt2"))
    train_step(model, models.batch("gpt2", 0, 8))
    assert model.get_module() is model.module
    owners = {name.rpartition(".")[0] for name, _ in model.local_named_parameters()}
    owners |= {name.rpartition(".")[0] for name, _ in model.local_named_buffers()}
    assert {name for name, _ in model.local_named_modules()} == owners
    assert len(list(model.local_modules())) == len(owners)
    assert [id(buffer) for buffer in model.local_buffers()] == [id(held) for _, held in model.local_named_buffers()]
    divided = [p for p in model.parameters() if model.is_distributed_parameter(p)]
    assert bool(divided) == (TP > 1)
    assert len({id(module) for module in model.distributed_modules()}) <= len(divided)
    assert bool(list(model.distributed_modules())) == (TP > 1)
    held = dict(model.local_named_parameters())
    assert dict(model.local_named_parameters("model")) == {f"model.{name}": p for name, p in held.items()}
    assert list(model.local_parameters(recurse=False)) == list(model.local_buffers(recurse=False)) == []
    memo = {model.module.transformer.h[0].ln_1}
    found = dict(model.local_named_modules(memo, "model"))
    assert found.keys() == {f"model.{name}" for name in owners - {"transformer.h.0.ln_1"}}
    assert memo >= set(found.values())
    scaled, plain = (dict(named()) for named in (
        model.scaled_batch_reducer_named_parameters, model.default_reducer_named_parameters,
    ))  # fmt: skip
    assert (scaled, plain) == ((held, {}) if TP > 1 else ({}, held))
    assert all(model.is_scaled_batch_parameter(p) is (TP > 1) for p in held.values())
    assert not model.is_scaled_batch_parameter(torch.nn.Parameter(torch.ones(1)))
    assert model.cpu() is model
    batch = models.batch("gpt2", 1, 8)

    def unlike_numbers_of_steps() -> None:
        with model.join():
            for _ in range(1 + sw.rank()):
                train_step(model, batch)

    refused(DisagreementError, r"the end of model\.join", unlike_numbers_of_steps)
    with model.join(), model.join(enable=False):
        train_step(model, batch)
    sw.shutdown()


def losses_that_are_sums_are_said_to_be() -> None:
    x = torch.arange(32.0).reshape(8, 4) / 32
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    plain(x).square().sum().backward()
    begin()
    torch.manual_seed(0)
    layers = torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4)
    model = sw.DistributedModel(torch.nn.Sequential(*layers), average_grads_across_microbatches=False)
    summed_step(model, x)
    for own, whole in zip(model.module.parameters(), plain.parameters(), strict=True):
        if not own.is_meta and own.shape == whole.shape:
            assert own.grad is not None
            assert float((own.grad - whole.grad).abs().max()) < 1e-5
    sw.shutdown()


@smp.step
def step_of_kind(model: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
    square = model(x).square()
    loss: torch.Tensor = (square * (x > 0)).sum() / (x > 0).sum() if kind == "weighted" else getattr(square, kind)()
    model.backward(loss)
    return loss


def the_alias_averages_sums_over_ranks() -> None:
    """Of the ranks that have batches of their own, as SageMaker does, for losses that are means and sums."""
    with_batches = {"ddp": True} if PP > 1 else {"prescaled_batch": False, "tensor_parallel_degree": 2}
    for keys in (with_batches, {"partitions": 2} if PP > 1 else {"prescaled_batch": True, "tensor_parallel_degree": 2}):
        for kind in ("mean", "sum"):
            smp.init({"microbatches": 3, "log_every": 0, **keys})
            ranks = smp.dp_size() if keys is with_batches else 1
            batches = [torch.randn(6, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
            torch.manual_seed(0)
            plain = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
            model = smp.DistributedModel(copy.deepcopy(plain), average_grads_across_microbatches=False)
            step_of_kind(model, batches[smp.dp_rank() % ranks], kind)
            for microbatch in [one for x in batches for one in x.chunk(3)]:
                (getattr(plain(microbatch).square(), kind)() / ranks).backward()
            found = whole_gradients(model)
            wanted = {name: p.grad for name, p in plain.named_parameters() if name in found}
            Comparison(f"{kind} under {keys}").gradients(found, wanted).require()
            if keys is with_batches and TP > 1:
                with pytest.raises(LossError, match="set prescaled_batch=True"):
                    step_of_kind(model, batches[0], "weighted")
            sw.shutdown()


def models_are_made_as_the_configuration_says() -> None:
    for delayed in (False, True):
        begin(delayed_parameter_initialization=delayed)
        torch.manual_seed(0)
        with sw.model_creation(tensor_parallelism=TP > 1, dtype=torch.float64):
            module = torch.nn.Linear(4, 4)
        assert module.weight.dtype is torch.float64
        assert torch.get_default_dtype() is torch.float32
        if delayed:
            refused(ShardwrightError, "delay_param_initialization", lambda made=module: made.weight.sum().item())
        else:
            module.weight.sum().item()
        sw.shutdown()


def a_model_made_in_16_bits_trains_and_is_evaluated() -> None:
    """Its parameters are in float32 between steps where they are held: the other ranks know."""
    begin(bf16=True, log_every=0)
    torch.manual_seed(0)
    with sw.model_creation(dtype=torch.bfloat16):
        model = sw.DistributedModel(models.build("gpt2"))
    with pytest.warns(PlanWarning, match="loss scale has no effect: steps do not compute in float16"):
        optimizer = sw.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            static_loss_scale=None,
            dynamic_loss_scale=True,
            dynamic_loss_args={"scale_window": 1000},
        )
    torch.manual_seed(0)
    plain = models.build("gpt2")
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        reference.zero_grad()
        optimizer.zero_grad()
        expected = plain(**models.batch("gpt2", step, 8)).loss
        expected.backward()
        loss = float(train_step(model, models.batch("gpt2", step, 8)).reduce_mean())
        assert abs(loss - float(expected)) < 2e-2 * float(expected)
        reference.step()
        optimizer.step()
        with torch.no_grad():
            evaluate(model, models.batch("gpt2", 9, 8))
    sw.shutdown()


def settings_of_their_own_modules_are_known() -> None:
    begin()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with sw.model_creation(fused_softmax=True, use_alibi=True):  # not for the tensor axis: they are not used
            pass
    said = "flash_attention, zero_init of SageMaker's own modules have no effect"
    given = {"flash_attention": True, "zero_init": True, "use_alibi": False}
    with pytest.warns(PlanWarning, match=said), sw.model_creation(True, **given):
        pass
    refused(MissingCapabilityError, "use_alibi=True", lambda: sw.model_creation(True, use_alibi=True).__enter__())
    sw.shutdown()


def what_is_wrong_is_said() -> None:
    begin()
    module = torch.nn.Linear(2, 2)
    refused(
        TypeError, "'trace_devise': did you mean 'trace_device'", lambda: sw.DistributedModel(module, trace_devise=1)
    )
    refused(ShardwrightError, "trace_device='tpu'", lambda: sw.DistributedModel(module, trace_device="tpu"))
    both = {"trace_device": "cpu", "trace_execution_times": True}
    refused(ShardwrightError, "trace_execution_times=True and", lambda: sw.DistributedModel(module, **both))
    kept = {"broadcast_buffers": False}  # of one replica, or of a model without buffers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sw.DistributedModel(module, overlapping_allreduce=False, bucket_cap_mb=100, trace_memory_usage=True, **kept)
    said = [str(one.message) for one in caught if issubclass(one.category, PlanWarning)]
    assert sorted(text.partition("=")[0] for text in said) == [
        "bucket_cap_mb", "overlapping_allreduce", "trace_memory_usage",
    ], said  # fmt: skip
    with sw.model_creation():
        pass
    for given in ({"dtype": torch.int8}, {"dtype": "fp16"}, {"use_alibis": 4}):
        refused(
            ShardwrightError, f"{next(iter(given))}", lambda given=given: sw.model_creation(True, **given).__enter__()
        )
    sw.shutdown()


CHECKS = (
    a_hook_runs_once_between_the_split_and_the_first_step,
    a_hook_that_fails_is_told_to_all_ranks,
    parts_are_found_by_their_rank,
    losses_that_are_sums_are_said_to_be,
    the_alias_averages_sums_over_ranks,
    models_are_made_as_the_configuration_says,
    a_model_made_in_16_bits_trains_and_is_evaluated,
    settings_of_their_own_modules_are_known,
    what_is_wrong_is_said,
)

assert not dist.is_initialized()
run_checks(CHECKS)
