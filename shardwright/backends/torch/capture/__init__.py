"""From an `nn.Module` to the core's graph: the forward pass on fake tensors, op by op."""
