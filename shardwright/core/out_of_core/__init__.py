"""Training past a device's memory: which blocks of a chain keep their activations, send them to the host, or compute
them again."""
