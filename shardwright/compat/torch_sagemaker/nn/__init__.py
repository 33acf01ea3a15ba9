"""``torch.sagemaker.nn``."""
