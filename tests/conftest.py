"""What every test shares: one thread per process, eight virtual JAX devices, the core first, the skip of GPU tests."""

import os
from pathlib import Path

import pytest

CORE = Path(__file__).parent / "core"

# Read by the frameworks when they are first imported, so they are set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that needs the network should fail, not wait


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the core's tests first, and skip tests marked ``gpu`` where there is no CUDA device."""
    items.sort(key=lambda item: not item.path.is_relative_to(CORE))  # a stable sort: nothing else moves
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items or _cuda_device_exists():  # torch is asked only when such a test exists
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in gpu_items:
        item.add_marker(skip)


def _cuda_device_exists() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
