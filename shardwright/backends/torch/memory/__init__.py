"""Recomputation of activations, and weight gradients deferred to later actions."""
