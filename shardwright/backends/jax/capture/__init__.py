"""From a JAX function or a Flax model to the core's graph, by tracing on shapes."""
