"""The ends of the model, each one autograd Function: embeddings; final norm, output layer and loss.

Their forwards and backwards are lists of the calls that the modules alone make, as those of a layer's halves are
(`transformer/layer_halves.py`), and so with the same bits. An end with a part that was replaced, or to whose calls
somebody listens, runs its modules.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.functions import Kept, apply
from megatron.core.tensor_parallel.mappings import TensorParallel, gather_vocabulary, sequence_slice
from megatron.core.tensor_parallel.parallel_layers import (
    ColumnParallelLinear,
    PositionEmbedding,
    Route,
    VocabParallelEmbedding,
    column_dgrad,
    column_forward,
    column_linear,
)
from megatron.core.tensor_parallel.random import DropoutSite, drop, drop_others, dropout
from megatron.core.tensor_parallel.sink_module import LayerFactory
from megatron.core.tensor_parallel.vocab_loss import CrossEntropy, vocab_parallel_cross_entropy
from megatron.core.transformer.layer_halves import AsBuilt
from megatron.core.transformer.model_config import SQRT_HIDDEN, TransformerConfig
from megatron.core.transformer.norm import Norm, in_dtype
from megatron.core.weight_grad import put_linear


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
        self.fp32_residual, self.tp = config.fp32_residual_connection, factory.tp
        self._as_built = AsBuilt(self)

    def forward(self, tokens: Tensor, position_ids: Tensor | None) -> Tensor:
        ids, words, positions = [tokens.t()], self.word_embeddings, self.position_embeddings
        if positions is not None:
            assert position_ids is not None, "learned positions need position_ids"
            ids.append(position_ids.t())
        if self._as_built:
            probability = self.hidden_dropout if self.training else 0.0
            held = (one.weight for one in (words, positions) if one is not None)
            return apply(_Embedding(self, probability), *ids, parameters=held)
        x = words(ids[0])
        if self.factor is not None:
            x = x * self.factor
        if positions is not None:
            x = x + positions(ids[1])
        return dropout(self.widened(x), self.hidden_dropout, self.site, self.training)

    def widened(self, x: Tensor) -> Tensor:
        """In the dtype of the residual stream."""
        return x.to(torch.promote_types(x.dtype, torch.float32)) if self.fp32_residual else x


class _Embedding(NamedTuple):
    """A `GradFunction` of ids [s, b], and of position ids [s, b] where positions are learned."""

    of: LanguageModelEmbedding
    probability: float

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Kept]:
        of, of_positions = self.of, list[Tensor]()
        x, of_words = of.word_embeddings.lookup().forward(ids)  # [s/tp, b, h]
        if of.factor is not None:
            x.mul_(of.factor)
        if of.position_embeddings is not None and position_ids is not None:
            of_positions.append(sequence_slice(position_ids, of.tp))
            x.add_(of.position_embeddings.lookup().forward(*of_positions)[0])
        x, keep = drop(of.widened(x), self.probability, of.site)
        return x, (keep, *of_positions, *of_words)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[None, None]:
        of, (keep, *ids) = self.of, kept
        words = of.word_embeddings.lookup()
        d = in_dtype(drop_others(dy, keep, self.probability), words.weight.dtype)  # [s/tp, b, h]
        if of.position_embeddings is not None:
            of.position_embeddings.lookup().backward(ids[:1], d)
            del ids[0]
        words.backward(ids, d if of.factor is None else d * of.factor)
        return None, None


def _word_factor(config: TransformerConfig, dtype: torch.dtype) -> float | None:
    """What word embeddings are multiplied by; Gemma's root of the hidden size has the precision of the weights."""
    factor = config.embedding_multiplier
    if isinstance(factor, str):
        assert factor == SQRT_HIDDEN, factor
        return torch.tensor(config.hidden_size**0.5, dtype=dtype, device="cpu").item()
    return factor


class OutputHead(nn.Module):
    """Final norm, output layer and loss: hidden states [s, b, h] (sequence parallel: [s/tp, b, h]) and labels [b, s] ->
    per-token losses [b, s]; without labels logits [b, s, v]. Communicates over tp.

    A module without parameters, so that an engine that gathers weights sees where those are needed that end the model.
    words: whose matrix a tied output layer is.
    """

    def __init__(self, tp: TensorParallel, vocab_size: int, words: VocabParallelEmbedding | None) -> None:
        super().__init__()
        self.tp, self.vocab_size = tp, vocab_size
        # In a tuple: the matrix is a parameter of the embedding only.
        self._tied = None if words is None else (words, Route(words.sink, words.key("weight"), tp=tp))

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None,
        norm: Norm,
        output: ColumnParallelLinear | None,
        as_built: bool,
    ) -> Tensor:
        """output: None where it is tied. as_built: both are those of the model, and nobody listens to them."""
        if as_built and labels is not None:
            weight, route = self._matrix(output)
            function = _HeadAndLoss(norm, weight, route, CrossEntropy(self.vocab_size, self.tp, weight.dtype))
            return apply(function, hidden, labels, parameters=(norm.weight, norm.bias, weight))
        hidden = norm(hidden)
        if output is not None:
            logits = output(hidden)  # [s, b, v/tp]
        else:
            weight, route = self._matrix(None)
            logits = column_linear(hidden, weight, sink=route.sink, key=route.key, tp=route.tp)
        if labels is None:
            return gather_vocabulary(logits, self.tp, self.vocab_size).transpose(0, 1)
        return vocab_parallel_cross_entropy(logits, labels.t(), self.tp, self.vocab_size).t()

    def _matrix(self, output: ColumnParallelLinear | None) -> tuple[Tensor, Route]:
        if output is not None:
            return output.weight, output.route
        assert self._tied is not None, "an output layer of its own, or word embeddings"
        words, route = self._tied
        return words.weight, route


class _HeadAndLoss(NamedTuple):
    """A `GradFunction` of hidden states and labels."""

    norm: Norm
    weight: Tensor
    route: Route
    loss: CrossEntropy

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Kept]:
        y, of_norm = self.norm.normalise(x.flatten(0, 1), self.norm.weight, self.norm.bias)  # [s/tp b, h]
        logits, of_y = column_forward(y, self.weight, None, self.route)  # [s b, v/tp]
        losses, of_loss = self.loss.forward(
            logits.view(-1, len(labels), logits.shape[1]), labels.t()
        )  # [s, b]
        return losses.t(), (*of_norm, of_y, self.weight, *of_loss)

    def backward(self, kept: Kept, dlosses: Tensor) -> tuple[Tensor, None]:
        *of_norm, of_y, weight = kept[:7]
        dlogits, _ = self.loss.backward(kept[7:], dlosses.t())  # [s, b, v/tp]
        batch, dlogits = dlogits.shape[1], dlogits.flatten(0, 1)
        dy, pending, y = column_dgrad(dlogits, of_y, weight, self.route)  # [s/tp b, h]
        put_linear(self.route, y, dlogits, weight, None)
        if pending is not None:
            pending.wait()
        if not self.route.sink.deferring:
            # What is kept is autograd's until this returns: as much as the logits, and the norm needs memory, too.
            dlogits.untyped_storage().resize_(0)
        return self.norm.backward(of_norm, dy).view(-1, batch, dy.shape[1]), None
