"""Shardwright plans model-parallel training once and runs the plan in PyTorch or in JAX."""
