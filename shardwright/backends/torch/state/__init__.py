"""Parameters, buffers and optimizer states: their ownership, initial weights, whole state dicts."""
