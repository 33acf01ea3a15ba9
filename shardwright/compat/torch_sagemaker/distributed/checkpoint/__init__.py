"""``torch.sagemaker.distributed.checkpoint``: `torch.distributed.checkpoint` under the second version's names."""
