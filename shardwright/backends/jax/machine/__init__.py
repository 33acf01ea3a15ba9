"""Processes, devices, meshes, the heartbeat between processes, and agreement among them."""
