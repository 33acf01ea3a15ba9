"""SageMaker's ``DistributedTransformerLMHead``: embeddings, a transformer and one head over the vocabulary."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwright.compat.nn.attention import initialize
from shardwright.compat.nn.distributed_module import (
    DistributedModule,
    common,
    require_probability,
    require_size,
    tensors_in,
)
from shardwright.compat.nn.linear_and_embedding import DistributedEmbedding
from shardwright.compat.nn.transformer import (
    DistributedTransformer,
    TransformerArguments,
    TransformerVariants,
    require_layers,
)
from shardwright.core.errors import ShardwrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadVariants(TransformerVariants):
    """Forms of a language model that SageMaker's pages do not name as arguments.

    Attributes:
        tie_word_embeddings: whether the head's weight is that of the word embeddings.
        lm_head_bias: whether the head has a bias.
        embedding_dropout_prob: of the sum of the embeddings; None: ``hidden_dropout_prob``.
    """

    tie_word_embeddings: bool = True
    lm_head_bias: bool = False
    embedding_dropout_prob: float | None = None


@dataclass(frozen=True, slots=True)
class LMHeadArguments(HeadVariants):
    """The arguments of `DistributedTransformerLMHead`; the others are those of `LayerArguments`.

    Attributes:
        num_positions: the rows of the embedding of positions; 0: there is none.
        num_token_types: the rows of the embedding of token types; 0: there is none.
        add_lm_head: whether there is a head: else the hidden states are the result.
    """

    num_layers: int = 12
    num_attention_heads: int = 32
    attention_head_size: int = 32
    hidden_size: int = 1024
    intermediate_size: int = 4096
    vocab_size: int = 30522
    num_positions: int = 1024
    attention_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    activation: str = "gelu"
    layernorm_epsilon: float = 1e-5
    num_token_types: int = 0
    causal_mask_size: int | None = None
    add_cross_attention: bool = False
    add_lm_head: bool = True
    initializer_range: float = 0.02
    use_normal_initialization: bool = False
    pre_layernorm: bool = False
    post_layernorm: bool = True
    use_alibi: bool = False
    alibi_bias_max: int = 8

    def __post_init__(self) -> None:
        require_size("vocab_size", self.vocab_size)
        require_size("num_positions", self.num_positions, 0)
        require_size("num_token_types", self.num_token_types, 0)
        if self.embedding_dropout_prob is not None:
            require_probability("embedding_dropout_prob", self.embedding_dropout_prob)
        require_layers(self)


class DistributedTransformerLMHead(DistributedModule):
    """Word embeddings, embeddings of positions and of token types, a transformer, and a head over the vocabulary.

    Where layers have a layer norm before them and none after, another one follows the last layer, as in GPT-2.

    ``forward`` takes one tuple, (input_ids [N, S], attention_mask, token_type_ids, position_ids, labels), or under
    ``add_cross_attention`` (input_ids, attention_mask, token_type_ids, position_ids, cross_states, cross_mask,
    labels). All but ``input_ids`` may be None. In ``attention_mask`` [N, S] 1 is a token that is not seen, and 0 one
    that is; ``cross_mask`` is added to the scores.

    It returns the logits [N, S, vocabulary], or with ``labels`` the loss and the logits. The loss is the mean of the
    cross entropy over labels that are not -100: of the next token under ``causal_mask_size``, else of the same one.
    """

    Arguments = LMHeadArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        given: LMHeadArguments = self.arguments

        def embedding(rows: int) -> DistributedEmbedding:
            return DistributedEmbedding(rows, given.hidden_size, initializer_range=given.initializer_range)

        self.word_embedding = embedding(given.vocab_size)
        if given.num_positions:
            self.position_embedding = embedding(given.num_positions)
        if given.num_token_types:
            self.token_type_embedding = embedding(given.num_token_types)
        dropout = given.embedding_dropout_prob
        self.dropout = nn.Dropout(given.hidden_dropout_prob if dropout is None else dropout)
        self.transformer = DistributedTransformer(**common(TransformerArguments, given))
        if given.pre_layernorm and not given.post_layernorm:
            self.layernorm = nn.LayerNorm(given.hidden_size, eps=given.layernorm_epsilon)
        if given.add_lm_head:
            self.lm_head = nn.Linear(given.hidden_size, given.vocab_size, bias=given.lm_head_bias)
            initialize(self, given)
            if given.tie_word_embeddings:
                self.lm_head.weight = self.word_embedding.weight

    def forward(self, inputs: Any) -> Any:
        given: LMHeadArguments = self.arguments
        names: tuple[str, ...] = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
        if given.add_cross_attention:
            names = (*names, "cross_states", "cross_mask")
        held = tensors_in(type(self).__name__, inputs, (*names, "labels"))
        named = dict(zip((*names, "labels"), held, strict=True))
        hidden = self._embedded(named)
        states = self.transformer(self._of_layers(hidden, named))[0]
        if given.pre_layernorm and not given.post_layernorm:
            states = self.layernorm(states)
        labels = named["labels"]
        if not given.add_lm_head:
            if labels is not None:
                raise ShardwrightError("labels were given to a model with add_lm_head=False, which has no loss")
            return states
        logits = self.lm_head(states)
        return logits if labels is None else (self._loss(logits, labels), logits)

    def _embedded(self, named: dict[str, torch.Tensor | None]) -> torch.Tensor:
        given: LMHeadArguments = self.arguments
        ids, types, positions = named["input_ids"], named["token_type_ids"], named["position_ids"]
        assert ids is not None
        hidden: torch.Tensor = self.word_embedding(ids)
        if given.num_positions:
            length = ids.shape[-1]
            if length > given.num_positions and positions is None:
                raise ShardwrightError(
                    f"a sequence of {length} tokens is longer than num_positions={given.num_positions}: give a larger "
                    f"num_positions"
                )
            if positions is None:
                positions = torch.arange(length, device=ids.device)[None]
            hidden = hidden + self.position_embedding(positions)
        if types is not None:
            if not given.num_token_types:
                raise ShardwrightError("token_type_ids were given to a model with num_token_types=0: give None")
            hidden = hidden + self.token_type_embedding(types)
        embedded: torch.Tensor = self.dropout(hidden)
        return embedded

    def _of_layers(self, hidden: torch.Tensor, named: dict[str, torch.Tensor | None]) -> tuple[Any, ...]:
        """What the first layer is given."""
        mask = named["attention_mask"]
        if mask is not None:
            mask = mask[:, None, None, :].to(hidden.dtype) * torch.finfo(hidden.dtype).min
        held: tuple[torch.Tensor | None, ...] = (hidden, mask)
        if self.arguments.add_cross_attention:
            held = (hidden, named["cross_states"], mask, named["cross_mask"])
        is_turned = self.arguments.rotary_dim is not None and named["position_ids"] is not None
        return (*held, named["position_ids"]) if is_turned else held

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.arguments.causal_mask_size is not None:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
