"""Meshes of named axes, placements of tensors on them, and conversions between placements."""
