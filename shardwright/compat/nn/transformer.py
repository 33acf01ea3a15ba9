"""SageMaker's transformer: ``DistributedTransformerOutputLayer``, ``DistributedTransformerLayer`` and
``DistributedTransformer``."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.compat.nn.attention import (
    AttentionArguments,
    AttentionVariants,
    DistributedAttentionLayer,
    initialize,
    require_layer_norms,
)
from shardwright.compat.nn.distributed_module import (
    DistributedModule,
    common,
    require_probability,
    require_size,
    tensors_in,
)
from shardwright.core.errors import MissingCapabilityError, ShardwrightError

ACTIVATIONS = {"gelu": "none", "relu": None, "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
"""The activations of the output layer, and how torch computes the normal distribution in those of them that have it.
SageMaker's are gelu and relu; the others are Hugging Face's names of the approximation by tanh."""


@dataclass(frozen=True, slots=True)
class OutputArguments:
    """The arguments of `DistributedTransformerOutputLayer`; see `TransformerArguments`.

    Attributes:
        add_residual: whether what it is given is added to what it gives.
    """

    hidden_size: int = 1024
    intermediate_size: int = 4096
    hidden_dropout_prob: float = 0.1
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    fp32_residual_addition: bool = False
    add_residual: bool = True

    def __post_init__(self) -> None:
        require_size("hidden_size", self.hidden_size)
        require_size("intermediate_size", self.intermediate_size)
        require_probability("hidden_dropout_prob", self.hidden_dropout_prob)
        require_activation(self.activation)
        require_layer_norms(self.pre_layernorm, self.post_layernorm, self.add_residual)
        if self.fp32_residual_addition:
            raise MissingCapabilityError(
                "fp32_residual_addition=True is not carried out: take bf16, which has the range of fp32, and leave it "
                "False"
            )


def require_activation(name: str) -> None:
    """Raise ShardwrightError for the name of another activation than `ACTIVATIONS`."""
    if name not in ACTIVATIONS:
        raise ShardwrightError(f"activation={name!r}: expected one of {', '.join(map(repr, ACTIVATIONS))}")


class DistributedTransformerOutputLayer(DistributedModule):
    """Two linear layers with an activation between, dropout, the residual connection, and layer norms before or after.

    ``forward`` takes and returns one tensor [N, S, H].
    """

    Arguments = OutputArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given: OutputArguments = self.arguments
        self.dense1 = nn.Linear(given.hidden_size, given.intermediate_size)
        self.dense2 = nn.Linear(given.intermediate_size, given.hidden_size)
        self.dropout = nn.Dropout(given.hidden_dropout_prob)
        if given.pre_layernorm:
            self.pre_layernorm = nn.LayerNorm(given.hidden_size, eps=given.layernorm_epsilon)
        if given.post_layernorm:
            self.layernorm = nn.LayerNorm(given.hidden_size, eps=given.layernorm_epsilon)
        initialize(self, given)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        given: OutputArguments = self.arguments
        states = self.dense1(self.pre_layernorm(hidden) if given.pre_layernorm else hidden)
        approximate = ACTIVATIONS[given.activation]
        states = F.relu(states) if approximate is None else F.gelu(states, approximate=approximate)
        output = self.dropout(self.dense2(states))
        if given.add_residual:
            output = output + hidden
        found: torch.Tensor = self.layernorm(output) if given.post_layernorm else output
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerVariants(AttentionVariants):
    """Forms of a layer that models have and SageMaker's pages do not name as arguments.

    Attributes:
        parallel_residual: whether the output layer is given what the attention is given, and both are added to it
            (GPT-J, GPT-NeoX), in the place of one after the other.
        shared_layernorm: whether both have one layer norm before them (GPT-J), under ``parallel_residual``.
    """

    parallel_residual: bool = False
    shared_layernorm: bool = False


@dataclass(frozen=True, slots=True)
class LayerArguments(LayerVariants):
    """The arguments of `DistributedTransformerLayer`.

    Attributes:
        num_attention_heads, attention_head_size: the heads of the whole layer, and the channels of each.
        hidden_size: the last dim of ``hidden_states``.
        intermediate_size: the channels between the two linear layers of the output layer.
        attention_dropout_prob: of the attention's probabilities.
        hidden_dropout_prob: of all other places.
        activation: of the output layer: one of `ACTIVATIONS`.
        initializer_range: the standard deviation of the normal distribution that weights begin with, under
            ``use_normal_initialization``; else they begin as torch's.
        causal_mask_size: the greatest length of a sequence in which tokens see no later ones; None: they see all.
        add_cross_attention: whether attention to ``cross_states`` follows the self-attention.
        pre_layernorm, post_layernorm: whether there are layer norms before and after. At least one is True.
        use_alibi, alibi_bias_max: whether scores fall linearly with the distance, and how steeply (ALiBi).
        layer_idx: the number of the layer, from 0, of ``scale_attn_by_layer_idx``.
        attention_window: how many tokens each one sees, itself and those before it; None: all before it.
    """

    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    causal_mask_size: int | None = None
    add_cross_attention: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    use_alibi: bool = False
    alibi_bias_max: int = 8
    layer_idx: int | None = None
    attention_window: int | None = None

    def __post_init__(self) -> None:
        require_layer(self)


def require_layer(given: Any) -> None:
    """Raise ShardwrightError for arguments of a layer that do not go together."""
    require_layer_norms(given.pre_layernorm, given.post_layernorm, True)
    require_activation(given.activation)
    if given.shared_layernorm and not given.parallel_residual:
        raise ShardwrightError("shared_layernorm=True needs parallel_residual=True")
    if given.parallel_residual and (given.post_layernorm or given.add_cross_attention):
        wrong = "post_layernorm" if given.post_layernorm else "add_cross_attention"
        raise ShardwrightError(f"parallel_residual=True goes with pre_layernorm=True and {wrong}=False")


class DistributedTransformerLayer(DistributedModule):
    """Attention, attention to other states if it is asked for, and the output layer.

    ``forward`` takes and returns one tuple: (hidden_states [N, S, H], attention_mask), or under
    ``add_cross_attention`` (hidden_states, cross_states [N, S2, H], attention_mask, cross_mask); all but the first are
    returned as they were given. Masks are added to the scores: [N, 1, 1, S], or None. Under ``rotary_dim`` the tuple
    may end with position_ids.
    """

    Arguments = LayerArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given: LayerArguments = self.arguments
        own: dict[str, Any] = {}
        if given.parallel_residual:
            own = {"add_residual": False, "pre_layernorm": not given.shared_layernorm}
            if given.shared_layernorm:
                self.pre_layernorm = nn.LayerNorm(given.hidden_size, eps=given.layernorm_epsilon)
        self.attention = DistributedAttentionLayer(**common(AttentionArguments, given, **own))
        self.output = DistributedTransformerOutputLayer(**common(OutputArguments, given, **own))
        if given.add_cross_attention:
            own = {"cross_attention": True, "fused_qkv": False, "rotary_dim": None}
            self.cross_attention = DistributedAttentionLayer(**common(AttentionArguments, given, **own))

    def forward(self, inputs: Any) -> tuple[torch.Tensor | None, ...]:
        given: LayerArguments = self.arguments
        names: tuple[str, ...] = ("hidden_states", "attention_mask")
        if given.add_cross_attention:
            names = ("hidden_states", "cross_states", "attention_mask", "cross_mask")
        optional = () if given.rotary_dim is None else ("position_ids",)
        held = tensors_in(type(self).__name__, inputs, (*names, *optional), optional=len(optional))
        hidden, rest = held[0], held[1 : len(inputs)]
        named = dict(zip((*names, *optional), held, strict=True))
        own = (named["attention_mask"], *(held[len(names) :]))
        assert hidden is not None
        if given.parallel_residual:
            states = self.pre_layernorm(hidden) if given.shared_layernorm else hidden
            return hidden + self.attention((states, *own)) + self.output(states), *rest
        states = self.attention((hidden, *own))
        if given.add_cross_attention:
            states = self.cross_attention((states, named["cross_states"], named["cross_mask"]))
        return self.output(states), *rest


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerVariants(LayerVariants):
    """Forms of a row of layers that models have and SageMaker's pages do not name as arguments.

    Attributes:
        attention_windows: the ``attention_window`` of each layer; none: that of no layer (GPT-Neo has them).
    """

    attention_windows: tuple[int | None, ...] = ()


def require_layers(given: Any) -> None:
    """Raise ShardwrightError for arguments of a row of layers that do not go together."""
    require_size("num_layers", given.num_layers)
    if len(given.attention_windows) not in (0, given.num_layers):
        raise ShardwrightError(f"attention_windows has {len(given.attention_windows)} entries: expected one a layer")
    require_layer(given)


@dataclass(frozen=True, slots=True)
class TransformerArguments(TransformerVariants):
    """The arguments of `DistributedTransformer`: the number of layers, and those of each (`LayerArguments`)."""

    num_layers: int = 12
    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    causal_mask_size: int | None = None
    add_cross_attention: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    use_alibi: bool = False
    alibi_bias_max: int = 8

    def __post_init__(self) -> None:
        require_layers(self)


class DistributedTransformer(DistributedModule):
    """A row of layers, ``seq_layers``; it takes and returns what each of them does (`DistributedTransformerLayer`)."""

    Arguments = TransformerArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given: TransformerArguments = self.arguments
        layers = (
            DistributedTransformerLayer(**common(LayerArguments, given, layer_idx=index, attention_window=window))
            for index, window in enumerate(given.attention_windows or (None,) * given.num_layers)
        )
        self.seq_layers = nn.Sequential(*layers)

    def forward(self, inputs: Any) -> Any:
        return self.seq_layers(inputs)
