"""Parameters, buffers and optimizer states: who holds them, initial weights, whole state dicts."""
