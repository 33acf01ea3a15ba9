"""Recomputation of activations, and weight gradients put off to later actions."""
