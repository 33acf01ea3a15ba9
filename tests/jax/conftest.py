"""What the tests of JAX share."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture
def quick_compilation() -> Iterator[None]:
    """For tests that compile much and run little; `test_equality` and others run what users run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
