"""Gradients over replicas, outside of what `jax.jit` sums by itself."""
