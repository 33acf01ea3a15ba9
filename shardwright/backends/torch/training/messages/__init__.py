"""Pipelines of programs whose control flow depends on values: modules are served by the ranks that own them.

The step body runs as a real program on the first rank of the pipeline, once for each microbatch. A call of a module
that another rank owns becomes a message to it; gradients go back the same way. This is the module server of arXiv
2111.05972, section 3, on torch.distributed.
"""
