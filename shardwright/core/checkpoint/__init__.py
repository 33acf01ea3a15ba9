"""Checkpoints: one logical state in safetensors files and a checked index, whatever plan and framework wrote it."""
