"""``smp.nn.huggingface``: state dicts of Hugging Face's models in SageMaker's names, and the models' distributed forms.

A model made of Hugging Face's classes keeps its names here under any plan. What `translate_state_dict_to_hf_…` is given
of it has Hugging Face's names already, and is returned as it is.
"""

from shardwright.compat.names import refused
from shardwright.compat.nn.huggingface import bert, gpt2, gptj, gptneo, gptneox, roberta
from shardwright.compat.nn.huggingface.forms import distributed_form

__all__ = ["bert", "distributed_form", "gpt2", "gptj", "gptneo", "gptneox", "roberta"]


def __getattr__(name: str) -> object:
    raise refused(f"nn.huggingface.{name}")
