"""The FLOPs of a loss function's matrix products in one training step, by its traces on shapes."""

from collections.abc import Collection

import jax

from shardwright.backends.jax.capture.model import Source, read
from shardwright.backends.jax.capture.samples import FlatBatch, batch_size
from shardwright.backends.jax.capture.tree import Parts, abstract
from shardwright.backends.jax.loss.microbatches import LossFunction
from shardwright.core.cost.training_flops import TrainingFlops, training_flops


def step_flops(loss: LossFunction, parts: Parts, given: FlatBatch, fp8: Collection[str]) -> TrainingFlops:
    """The FLOPs of a global batch of this form. ``fp8``: the names of the weights whose products are in fp8.

    Raises CaptureError where the function's traces at two batch sizes do not hold the same ops.
    """
    arrays = jax.tree.map(abstract, parts)
    beside = len(jax.tree.leaves((arrays.random, arrays.other)))
    names = (*arrays.names, *(f"beside {number}" for number in range(beside)))
    trained = (*loss.trained.mask(arrays.params), *[None] * beside)
    source = Source(loss.name, arrays, names, trained, {}, lambda held, batch, _: loss.plain(held, batch).loss)
    batch = given.resized(batch_size(jax.tree.unflatten(given.structure, list(given.leaves)), given.dims))
    graph, _ = read(source, batch, given.dims, lambda found: found)
    return training_flops(graph, graph.sample_batch, fp8=fp8)
