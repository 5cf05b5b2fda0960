"""Word and learned position embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.layers import PositionEmbedding, VocabParallelEmbedding
from megatron.core.tensor_parallel.random import DropoutSite, dropout
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.transformer.transformer_config import SQRT_HIDDEN, TransformerConfig


class LanguageModelEmbedding(nn.Module):
    """tokens and position_ids [b, s] -> [s, b, h], in fp32 with `--fp32-residual-connection`.

    Words are multiplied by `--embedding-multiplier`, positions and a tied output layer are not.

    Under sequence parallel [s/tp, b, h]. begins: of a stage that begins the model; one that only ends it keeps the
    matrix as its output layer, and no positions. both_ends: a tied matrix is used at both ends of the model as one
    parameter of this rank; else another stage has a copy of it. Communicates over tp.
    """

    def __init__(
        self,
        config: TransformerConfig,
        context: ModelContext,
        padded_vocab_size: int,
        factory: LayerFactory,
        *,
        begins: bool,
        both_ends: bool,
    ) -> None:
        super().__init__()
        hidden, tied = config.hidden_size, not config.untie_embeddings_and_output_weights
        self.hidden_dropout = config.hidden_dropout
        self.site = DropoutSite(context, -1, "embedding", factory.tp.sequence_rank)
        self.word_embeddings = VocabParallelEmbedding(
            padded_vocab_size,
            hidden,
            factory.at("word_embeddings"),
            two_uses=tied and both_ends,
            shared=tied and not both_ends,
        )
        self.factor = _word_factor(config, factory.dtype)
        self.position_embeddings = None
        if config.position_embedding_type == "learned_absolute" and begins:
            positions = factory.at("position_embeddings")
            self.position_embeddings = PositionEmbedding(config.max_position_embeddings, hidden, positions)
        self.fp32_residual = config.fp32_residual_connection

    def forward(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        x = self.word_embeddings(tokens.t())
        if self.factor is not None:
            x = x * self.factor
        if self.position_embeddings is not None:
            assert position_ids is not None, "learned positions need position_ids"
            x = x + self.position_embeddings(position_ids.t())
        if self.fp32_residual:
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        return dropout(x, self.hidden_dropout, self.site, self.training)


def _word_factor(config: TransformerConfig, dtype: torch.dtype) -> float | None:
    """What word embeddings are multiplied by; Gemma's root of the hidden size has the precision of the weights."""
    factor = config.embedding_multiplier
    if isinstance(factor, str):
        assert factor == SQRT_HIDDEN, factor
        return torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
    return factor
