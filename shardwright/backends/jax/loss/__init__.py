"""How the losses of microbatches and replicas make that of the batch."""
