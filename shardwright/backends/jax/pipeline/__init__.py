"""The compiled functions of stages, run under a schedule."""
