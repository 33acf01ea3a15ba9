"""The framework-neutral core: it plans, and imports neither PyTorch nor JAX."""
