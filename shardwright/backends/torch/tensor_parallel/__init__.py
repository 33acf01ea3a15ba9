"""Tensor parallelism by rule: captured ops run on local tensors, with the collectives that the solver chose."""
