"""The core's graph of a JAX function or a Flax model, by tracing on shapes."""
