"""The dense GPT: embedding, layers, output layer and loss; or the part of it that one pipeline stage holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.core.models.gpt.embedding import LanguageModelEmbedding
from megatron.core.module import MegatronModule, ModelContext
from megatron.core.protocols import WeightGradSink
from megatron.core.sink_module import LayerFactory, collect_param_meta
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.init import fill
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.linear import linear
from megatron.core.transformer.inference_cache import InferenceCache
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig


class GPTModel(MegatronModule):
    """A decoder-only transformer whose gradients all go to a sink; `.grad` stays None.

    config: sizes filled in (`TransformerConfig.resolved`). seed: of initial weights and dropout. device:
    torch's default device if not given; parameters are filled there, or left empty on the meta device for an
    engine to materialise and fill (`tensor_parallel.init`). layers: global numbers of the layers held here;
    all of them by default. pre_process, post_process: this stage embeds, and computes logits or the loss.
    sink: where gradients go instead of `context.grads` (a pipeline that defers weight gradients).

    Raises ValueError where learned positions do not cover the sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        padded_vocab_size: int,
        seed: int,
        params_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        layers: Sequence[int] | None = None,
        sink: WeightGradSink | None = None,
    ) -> None:
        super().__init__()
        _check_positions(config)
        self.config = config
        self.context = ModelContext(seed=seed)
        self.sink: WeightGradSink = self.context.grads if sink is None else sink
        self.pre_process, self.post_process = pre_process, post_process
        self.padded_vocab_size = padded_vocab_size
        self.tied = not config.untie_embeddings_and_output_weights
        factory = LayerFactory(
            sink=self.sink,
            dtype=params_dtype,
            device=torch.get_default_device() if device is None else torch.device(device),
            init_std=config.init_method_std,
            residual_std=config.init_method_std / math.sqrt(2 * config.num_layers),
        )
        self._build(factory, range(config.num_layers) if layers is None else layers)
        self.rotary = RotaryEmbedding(config) if config.position_embedding_type == "rope" else None
        self.param_meta = collect_param_meta(self)
        if factory.device.type != "meta":
            for name, parameter in self.named_parameters():
                fill(parameter, self.param_meta[name], seed)

    def _build(self, factory: LayerFactory, layers: Sequence[int]) -> None:
        config = self.config
        # A stage that ends the model without beginning it keeps its own copy of a tied matrix, under the
        # same name.
        self.embedding = None
        if self.pre_process or (self.post_process and self.tied):
            self.embedding = LanguageModelEmbedding(
                config,
                self.context,
                padded_vocab_size=self.padded_vocab_size,
                tied=self.tied,
                name="embedding",
                factory=factory,
            )
            if not self.pre_process:
                self.embedding.position_embeddings = None
        self.decoder = TransformerBlock(
            config, self.context, layers, name="decoder", factory=factory, final_norm=self.post_process
        )
        self.output_layer = None
        if self.post_process and not self.tied:
            self.output_layer = ColumnParallelLinear(
                config.hidden_size,
                self.padded_vocab_size,
                name="output_layer",
                factory=factory,
                init_std=factory.init_std,
                bias=False,
                embedding_or_output=True,
            )

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        *,
        hidden: Tensor | None = None,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        """Per-token losses [b, s] with labels, else logits [b, s, v]; a middle stage returns hidden states [s, b, h].

        tokens, position_ids, labels [b, s] int64. attention_mask: bool [b or 1, 1, s, s], True = masked,
        None = causal. loss_mask: accepted because Megatron's callers pass it; `gpt_loss` applies it.
        hidden: [s, b, h] from the stage before, where this one does not embed.
        """
        if self.pre_process:
            assert self.embedding is not None
            hidden = self.embedding(tokens, position_ids)
        assert hidden is not None, "a stage without the embedding needs hidden states"
        angles = None
        if self.rotary is not None:
            start = 0 if inference_cache is None else inference_cache.length
            angles = self.rotary(start, hidden.shape[0], hidden)
        hidden = self.decoder(hidden, attention_mask, angles, inference_cache)
        if not self.post_process:
            return hidden
        logits = self._logits(hidden)  # [s, b, v]
        if labels is None:
            return logits.transpose(0, 1)
        return vocab_parallel_cross_entropy(logits, labels.t()).t()

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.output_layer is not None:
            return self.output_layer(hidden)
        assert self.embedding is not None
        words = self.embedding.word_embeddings
        return linear(hidden, words.weight, sink=self.sink, key=words.key("weight"))

    def bind_new_grads(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Gradient buffers of the model's own, one a sink key: for use without an engine."""
        parameter = next(self.parameters())
        shapes = {key: meta.global_shape for meta in self.param_meta.values() for key in meta.grad_keys}
        self.context.grads.bind_new(shapes, dtype or parameter.dtype, parameter.device)
        return self.context.grads.main_grads

    def summed_grads(self) -> dict[str, Tensor]:
        """Gradient of each parameter, the uses of a tied one added up."""
        buffers = self.context.grads.main_grads
        grads: dict[str, Tensor] = {}
        for name, meta in self.param_meta.items():
            first, *rest = (buffers[key] for key in meta.grad_keys)
            grads[name] = sum(rest, start=first)
        return grads


def _check_positions(config: TransformerConfig) -> None:
    learned = config.position_embedding_type == "learned_absolute"
    if learned and config.seq_length > config.max_position_embeddings:
        raise ValueError(
            f"--seq-length {config.seq_length} exceeds --max-position-embeddings "
            f"{config.max_position_embeddings}: the table of learned positions must cover the sequence"
        )
