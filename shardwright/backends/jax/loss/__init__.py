"""The rules by which the losses of microbatches and replicas combine to that of the batch."""
