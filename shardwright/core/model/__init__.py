"""The captured graph: ops on tensors whose sizes are linear in the batch, its blocks, folding, and what its loss is."""
