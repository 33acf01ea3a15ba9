"""The plan: the decision, its predicted costs, its file, and questions about it."""
