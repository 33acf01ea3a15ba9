"""What runs that cross from one framework to the other share: twins, their maps of names, and batches.

Imports neither framework until a model is asked for.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.core.checkpoint.name_map import NameMap

SAMPLES = 8
RATE, DECAY, EPSILON = 1e-3, 0.1, 1e-6
BETAS = 0.9, 0.99
OPTIONS_CROSS = ("ncf",)
"""The models whose optimizer is made with other options where a run goes on, and takes those of the checkpoint."""
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 64, 12, 32, 4, 2
USERS, ITEMS, FACTORS, DEPTH = 24, 40, 8, 2
LINEAR = "weight[out, in]", "kernel[in, out]"
_LAYER, _TWIN = "bert.encoder.layer.{layer}", "layers.{layer}"
PARTS = ("query", "key", "value")
BERT = {
    "bert.embeddings.word_embeddings.weight": "word.embedding",
    "bert.embeddings.position_embeddings.weight": "position.embedding",
    "bert.embeddings.token_type_embeddings.weight": "kind.embedding",
    "bert.embeddings.LayerNorm.weight": "embedded.scale",
    "bert.embeddings.LayerNorm.bias": "embedded.bias",
    f"{_LAYER}.attention.self.{{part}}.weight[(head size), d]": f"{_TWIN}.attention.{{part}}.kernel[d, head, size]",
    f"{_LAYER}.attention.self.{{part}}.bias[(head size)]": f"{_TWIN}.attention.{{part}}.bias[head, size]",
    f"{_LAYER}.attention.output.dense.weight[d, (head size)]": f"{_TWIN}.attention.out.kernel[head, size, d]",
    f"{_LAYER}.attention.output.dense.bias": f"{_TWIN}.attention.out.bias",
    f"{_LAYER}.attention.output.LayerNorm.weight": f"{_TWIN}.attention_norm.scale",
    f"{_LAYER}.attention.output.LayerNorm.bias": f"{_TWIN}.attention_norm.bias",
    f"{_LAYER}.intermediate.dense.{LINEAR[0]}": f"{_TWIN}.up.{LINEAR[1]}",
    f"{_LAYER}.intermediate.dense.bias": f"{_TWIN}.up.bias",
    f"{_LAYER}.output.dense.{LINEAR[0]}": f"{_TWIN}.down.{LINEAR[1]}",
    f"{_LAYER}.output.dense.bias": f"{_TWIN}.down.bias",
    f"{_LAYER}.output.LayerNorm.weight": f"{_TWIN}.norm.scale",
    f"{_LAYER}.output.LayerNorm.bias": f"{_TWIN}.norm.bias",
    f"cls.predictions.transform.dense.{LINEAR[0]}": f"transform.{LINEAR[1]}",
    "cls.predictions.transform.dense.bias": "transform.bias",
    "cls.predictions.transform.LayerNorm.weight": "transformed.scale",
    "cls.predictions.transform.LayerNorm.bias": "transformed.bias",
    "cls.predictions.bias": "bias",
}
NCF = {
    "{side}_{kind}.weight": "{side}_{kind}.embedding",
    f"tower.{{layer}}.0.{LINEAR[0]}": f"tower.{{layer}}.linear.{LINEAR[1]}",
    "tower.{layer}.0.bias": "tower.{layer}.linear.bias",
    f"head.{LINEAR[0]}": f"head.{LINEAR[1]}",
    "head.bias": "head.bias",
}
NAMES: dict[str, Any] = {"gpt2": "gpt2", "bert": NameMap.of(BERT, values={"part": PARTS}), "ncf": NCF}


def batch(name: str, step: int) -> dict[str, NDArray[Any]]:
    """A batch of a step, the same in both frameworks."""
    rng = np.random.default_rng([len(name), step])
    if name == "ncf":
        user, item = rng.integers(0, USERS, SAMPLES), rng.integers(0, ITEMS, SAMPLES)
        return {"user": user, "item": item, "label": ((user + item) % 2).astype(np.float32)}
    ids = rng.integers(1, VOCABULARY, (SAMPLES, LENGTH))
    return {"ids": ids} if name == "gpt2" else {"ids": ids, "labels": (ids * 5) % VOCABULARY}


def torch_model(name: str) -> Any:
    """The model in PyTorch, without dropout."""
    import torch

    from tests.models.own import NeuMF

    torch.manual_seed(0)
    if name == "ncf":
        model = NeuMF(USERS, ITEMS, FACTORS, DEPTH)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        return model
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if name == "gpt2":
        config = GPT2Config(
            n_positions=LENGTH, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False, **sizes,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    return BertForMaskedLM(
        BertConfig(
            hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, intermediate_size=4 * WIDTH,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=LENGTH, **sizes,
        )
    )  # fmt: skip


def torch_inputs(name: str, step: int) -> dict[str, Any]:
    """What the model in PyTorch is called with."""
    import torch

    given = {key: torch.from_numpy(values) for key, values in batch(name, step).items()}
    if name == "ncf":
        return given
    return {"input_ids": given["ids"], "labels": given.get("labels", given["ids"])}


def flax_model(name: str, seed: int = 1) -> tuple[Any, Any]:
    """A function that makes the twin in Flax, with other weights, and its loss function."""
    from flax import nnx

    from examples import gpt2_flax
    from tests.twins import flax_models as flax

    if name == "ncf":
        return lambda: flax.NCF(USERS, ITEMS, FACTORS, DEPTH, nnx.Rngs(seed)), flax.ncf_loss
    if name == "bert":
        return lambda: flax.Bert(VOCABULARY, LENGTH, LAYERS, WIDTH, HEADS, nnx.Rngs(seed)), flax.bert_loss
    config = gpt2_flax.Config(LAYERS, HEADS, WIDTH, VOCABULARY, LENGTH)
    return lambda: gpt2_flax.create(config, seed), gpt2_flax.next_token_loss


def flax_inputs(name: str, step: int) -> dict[str, Any]:
    """A batch for the twin's loss function."""
    import jax.numpy as jnp

    given = {key: jnp.asarray(values) for key, values in batch(name, step).items()}
    return {"input_ids": given["ids"]} if name == "gpt2" else given
