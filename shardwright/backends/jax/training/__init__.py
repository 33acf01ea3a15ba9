"""The forms of a training step: one program, programs for each stage, one SPMD program of like stages."""
