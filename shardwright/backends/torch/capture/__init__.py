"""Capture of an `nn.Module` as the core's graph: the forward pass on fake tensors, op by op."""
