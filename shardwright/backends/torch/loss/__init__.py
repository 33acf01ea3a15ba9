"""The relation of a step's loss to its batch: the step body is run once more, op by op, and read by
`core.model.loss`."""
