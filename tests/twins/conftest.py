"""What the tests of twins share with those of JAX."""

from tests.jax.conftest import quick_compilation

__all__ = ["quick_compilation"]
