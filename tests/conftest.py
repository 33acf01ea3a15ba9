"""What every test shares: threads, virtual JAX devices, the order of the files, the skip of GPU tests."""

import gc
import os
from pathlib import Path

import hypothesis
import pytest

TESTS = Path(__file__).parent
LONGEST = (
    "jax/test_processes.py",
    "torch/test_memory_policies.py",
    "torch/test_host_states.py",
    "jax/test_memory.py",
    "torch/test_engine.py",
    "torch/test_zoo.py",
    "torch/test_sharded_state.py",
    "jax/test_recompute.py",
    "examples/test_examples.py",
    "jax/test_tensor_parallel.py",
    "jax/test_pipeline.py",
    "torch/test_equality.py",
    "torch/test_python_values.py",
    "jax/test_pipeline_models.py",
    "jax/test_loss_semantics.py",
    "torch/test_semantics.py",
    "torch/test_deferred_init.py",
    "torch/test_faults.py",
    "torch/test_tensor_parallel_training.py",
    "torch/test_tensor_parallel_misuse.py",
    "examples/test_guides.py",
    "torch/test_tensor_parallel_zoo.py",
    "torch/test_fp8.py",
    "jax/test_precision.py",
    "jax/test_train.py",
    "torch/test_schedules.py",
    "jax/test_shard_groups.py",
    "torch/test_exchange.py",
    "conformance/test_backends.py",
    "jax/test_spmd.py",
    "jax/test_equality.py",
    "twins/test_five.py",
    "cli/test_profile.py",
    "torch/test_tensor_parallel.py",
    "torch/test_accepted.py",
    "torch/test_failure.py",
    "torch/test_foreign_formats.py",
)
"""The files that take longest, the longest first: where processes share the files, they end together then."""

THOROUGH = (
    "core/test_measure.py",
    "core/planning/test_search.py",
    "core/test_solver.py",
    "core/planning/test_bounds.py",
    "core/test_out_of_core.py",
    "core/planning/test_exchange.py",
    "core/test_cost_growth.py",
    "core/planning/test_offload.py",
    "core/planning/test_plan.py",
    "core/test_memory_over_time.py",
    "core/schedule/test_auto.py",
    "core/test_calibrated.py",
    "core/planning/test_rescore.py",
    "core/test_pins.py",
    "core/planning/test_gradients_in_memory.py",
    "core/planning/test_few_microbatches.py",
    "core/planning/test_program.py",
    "core/schedule/test_random.py",
    "core/planning/test_answer.py",
    "core/planning/test_tensor_parallel.py",
    "core/planning/test_least_counted.py",
)
"""The core's files that take longest: three quarters of its time. `make test-core` leaves them out, `make test` does
not."""

# Read by the frameworks when they are first imported, so they are set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # virtual devices, whatever else a machine has
XLA_FLAGS = (  # quicker to compile
    "--xla_force_host_platform_device_count=8 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)  # `test_compiled_training` runs what users run
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network should fail, not wait

# How long a machine takes says nothing of what is tested.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Set aside what the test modules have imported, half a million objects among which no collection of garbage would
    find any. Collections come as often as they would: some tests say when an object is freed."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before those are left out that are not asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the core's tests first, then the longest files; skip tests marked ``gpu`` where there is no CUDA device."""
    for item in items:
        if item.path.relative_to(TESTS).as_posix() in THOROUGH:
            item.add_marker(pytest.mark.thorough)
    items.sort(key=lambda item: _place(item.path.relative_to(TESTS)))  # a stable sort: nothing else moves
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or _cuda_device_exists():  # torch is asked only when such a test exists
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in gpu_items:
        item.add_marker(skip)


def _place(file: Path) -> int:
    """Where among the files it runs."""
    if file.parts[0] == "core":
        return -1
    return LONGEST.index(file.as_posix()) if file.as_posix() in LONGEST else len(LONGEST)


def _cuda_device_exists() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
