"""Gradients, statistics and overlap over the replicas."""
