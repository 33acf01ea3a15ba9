"""What the loss of a step is to its batch: the step body is run once more, op by op, and read by `core.model.loss`."""
