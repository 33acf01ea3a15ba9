"""Devices, the links between them, collectives over them, and hardware profiles."""
