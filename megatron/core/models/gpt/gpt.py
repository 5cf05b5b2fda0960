"""The dense GPT: embedding, layers, output layer and loss; or the part of it that one pipeline stage holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron.core.models.gpt.ends import LanguageModelEmbedding, OutputHead
from megatron.core.models.gpt.unit_order import ONE_MATRIX, accesses_of_stage, layer_units
from megatron.core.models.gpt.vocabulary_size import leaves_ranks_empty
from megatron.core.module import MegatronModule, ModelContext, ModelUnit
from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.tensor_parallel.mappings import ALONE, TensorParallel
from megatron.core.tensor_parallel.parallel_layers import ColumnParallelLinear
from megatron.core.tensor_parallel.random import fill
from megatron.core.tensor_parallel.sink_module import LayerFactory, collect_param_meta
from megatron.core.transformer.decoder import TransformerBlock, TransformerLayer
from megatron.core.transformer.layer_halves import AsBuilt
from megatron.core.transformer.layer_table import layer_table
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transformer.rotary import RotaryEmbedding
from megatron.core.transformer.self_attention import InferenceCache
from megatron.core.unit_accesses import Accesses


class GPTModel(MegatronModule):
    """A decoder-only transformer whose gradients all go to its `context.grads`; `.grad` stays None.

    config: sizes filled in (`TransformerConfig.resolved`). seed: of initial weights and dropout. device:
    torch's default device if not given; parameters are filled there, or left empty on the meta device for an
    engine to materialise and fill (`tensor_parallel.random`). layers: global numbers of the layers held here;
    all of them by default. pre_process, post_process: this stage embeds, and computes logits or the loss. A stage
    that does neither and has no layers hands on what it is given. other_end_here: the model's other end is another
    chunk of this rank (on a V), and the matrix of tied embeddings one parameter of both: `build_engine` joins them.
    tp: the ranks that share every layer, this one alone by default; all of them must call the model alike, because its
    layers communicate over them.

    Raises ValueError where learned positions do not cover the sequence, or sizes do not divide over `tp`.
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
        other_end_here: bool = False,
        tp: TensorParallel | None = None,
        experts: ExpertRanks | None = None,
    ) -> None:
        super().__init__()
        self.tp = ALONE if tp is None else tp
        _check_sizes(config, padded_vocab_size, self.tp)
        self.config, self.layer_kinds = config, layer_table(config)
        self.vocab_size = padded_vocab_size  # ids that take part in the loss: all rows that there are
        self.context = ModelContext(seed=seed)
        self.pre_process, self.post_process = pre_process, post_process
        self.other_end_here = other_end_here
        self.tied = not config.untie_embeddings_and_output_weights
        factory = LayerFactory(
            sink=self.context.grads,
            dtype=params_dtype,
            device=torch.get_default_device() if device is None else torch.device(device),
            init_std=config.init_method_std,
            residual_std=config.init_method_std / math.sqrt(2 * config.num_layers),
            tp=self.tp,
            experts=experts,
        )
        self._input: Tensor | None = None
        self._build(factory, range(config.num_layers) if layers is None else layers, padded_vocab_size)
        self.rotary = RotaryEmbedding(config) if config.position_embedding_type == "rope" else None
        before: list[nn.Module | None] = [self.embedding, self.decoder.layers]
        self._end_as_built = AsBuilt(self, [one for one in before if one is not None])
        self.head = None
        if post_process:
            words = self.embedding.word_embeddings if self.embedding is not None and self.tied else None
            self.head = OutputHead(self.tp, padded_vocab_size, words)
        self.param_meta = collect_param_meta(self)
        if factory.device.type != "meta":
            for name, parameter in self.named_parameters():
                fill(parameter, self.param_meta[name], seed)

    def _build(self, factory: LayerFactory, layers: Sequence[int], padded_vocab_size: int) -> None:
        config, context, ends = self.config, self.context, self.post_process
        # A stage that ends the model without beginning it keeps its own copy of a tied matrix, under the
        # same name, and both stages have the gradient of their one use of it.
        both_ends = (self.pre_process and ends) or self.other_end_here
        self.embedding = None
        if self.pre_process or (ends and self.tied):
            where = {"begins": self.pre_process, "both_ends": both_ends}
            self.embedding = LanguageModelEmbedding(
                config, context, padded_vocab_size, factory.at("embedding"), **where
            )
        self.decoder = TransformerBlock(config, context, layers, factory.at("decoder"), final_norm=ends)
        self.output_layer: ColumnParallelLinear | None = None
        if ends and not self.tied:
            of_head = factory.at("output_layer")
            self.output_layer = ColumnParallelLinear(
                config.hidden_size, padded_vocab_size, of_head, bias=False, vocabulary=True
            )

    @property
    def _one_matrix(self) -> bool:
        """The matrix of this chunk's embedding is that of its output layer: it is read from first to last."""
        return self.pre_process and self.post_process and self.tied

    def units(self) -> tuple[ModelUnit, ...]:
        """`embedding`, a unit a layer and one of its experts, `head` (final norm and output layer). A matrix that
        begins and ends the model is read from its first module to its last, so both ends are one unit then,
        `embedding_and_head`."""
        layers = list[ModelUnit]()
        for number, layer in self.decoder.layers.items():
            assert isinstance(layer, TransformerLayer), type(layer)
            layers += layer.units(layer_units(number, self.layer_kinds[int(number)]))
        # Where this stage only ends the model, the tied matrix is read by `head` alone; where it begins in
        # another chunk of the rank, the matrix is that one's, which runs first.
        copy = None if self.pre_process or self.other_end_here else self.embedding
        parts = (self.decoder.final_layernorm, copy, self.output_layer)
        last = tuple(part for part in parts if part is not None)
        first = () if self.embedding is None or not self.pre_process else (self.embedding,)
        entered_by = () if self.head is None else (self.head,)
        if self._one_matrix:
            both = (*first, *entered_by)
            return ModelUnit(ONE_MATRIX, (*first, *last), begins_with_lookup=True, entered_by=both), *layers
        head = ModelUnit("head", last, entered_by=entered_by)
        units = [ModelUnit("embedding", first, backward_reads=False), *layers, head]
        return tuple(unit for unit in units if unit.modules)

    def unit_accesses(self) -> Accesses[str]:
        return accesses_of_stage(
            [int(number) for number in self.decoder.layers],
            self.layer_kinds,
            self.decoder.chunks,
            tied=self.tied,
            embeds=self.pre_process,
            ends=self.post_process,
            other_end_here=self.other_end_here,
        )

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        """What the next `forward` of a stage that does not embed begins with, from the stage before: [s, b, h], or
        under sequence parallel [s/tp, b, h]."""
        self._input = hidden

    def forward(
        self,
        tokens: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        *,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        """Per-token losses [b, s] with labels, else logits [b, s, v]; whole on every tp rank.

        A stage before the last returns hidden states [s, b, h], under sequence parallel [s/tp, b, h].
        tokens, position_ids, labels [b, s] int64; tokens where the stage embeds. attention_mask: bool [b or 1, 1,
        s, s], True = masked, None = causal. loss_mask: accepted because Megatron's callers pass it; `gpt_loss`
        applies it. inference_cache: begun with the tokens given here; logits are then [b, 1, v], see there.
        """
        if self.embedding is not None and self.pre_process:
            assert tokens is not None, "a stage that embeds needs tokens"
            hidden = self.embedding(tokens, position_ids)
        else:
            hidden, self._input = self._input, None  # used once: the model keeps no activation alive
            assert hidden is not None, (
                "a stage without the embedding needs set_input_tensor before each forward"
            )
        angles = None
        if self.rotary is not None and inference_cache is not None:
            angles = self.rotary(inference_cache.max_tokens, hidden, inference_cache.positions)
        elif self.rotary is not None:
            sharded = self.tp.size if self.tp.sequence_parallel else 1
            angles = self.rotary(hidden.shape[0] * sharded, hidden)
        hidden = self.decoder(hidden, attention_mask, angles, inference_cache)
        if not self.post_process:
            return hidden
        if inference_cache is not None:
            hidden = inference_cache.newest(hidden)
        norm = self.decoder.final_layernorm
        assert self.head is not None, "a stage that ends the model has a head"
        losses: Tensor = self.head(hidden, labels, norm, self.output_layer, bool(self._end_as_built))
        return losses

    def bind_new_grads(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Gradient buffers of the model's own, one a sink key: for use without an engine."""
        shapes = {key: meta.local_shape for meta in self.param_meta.values() for key in meta.grad_keys}
        like = next(self.parameters(), torch.empty(0))  # an empty stage has no buffers either
        self.context.grads.bind_new(shapes, dtype or like.dtype, like.device)
        return self.context.grads.main_grads

    def summed_grads(self) -> dict[str, Tensor]:
        """Gradient of this rank's part of each parameter, the uses of a tied one added up; regions whose gradient is
        `partial` are not summed over ranks."""
        buffers, grads = self.context.grads.main_grads, {}
        for name, meta in self.param_meta.items():
            first, *rest = (buffers[key] for key in meta.grad_keys)
            grads[name] = sum(rest, start=first)
        return grads


def _check_sizes(config: TransformerConfig, padded_vocab_size: int, tp: TensorParallel) -> None:
    learned, size = config.position_embedding_type == "learned_absolute", tp.size
    if learned and config.seq_length > config.max_position_embeddings:
        raise ValueError(
            f"--seq-length {config.seq_length} exceeds --max-position-embeddings "
            f"{config.max_position_embeddings}: the table of learned positions must cover the sequence"
        )
    if leaves_ranks_empty(padded_vocab_size, size):
        raise ValueError(
            f"the padded vocabulary {padded_vocab_size} (--padded-vocab-size, --make-vocab-size-divisible-by) leaves "
            f"the last of --tensor-model-parallel-size {size} ranks without a row"
        )
    flags = {
        f"--num-attention-heads {config.num_attention_heads}": config.num_attention_heads,
        f"--ffn-hidden-size {config.ffn_hidden_size}": config.ffn_hidden_size,
    }
    for kind in layer_table(config):
        if kind.experts is not None:
            flags[f"--moe-ffn-hidden-size {kind.experts.width}"] = kind.experts.width
            shared = kind.experts.shared_width
            flags[f"--moe-shared-expert-intermediate-size {shared}"] = shared
    if tp.sequence_parallel:
        flags[f"--seq-length {config.seq_length} with --sequence-parallel"] = config.seq_length
    for flag, value in flags.items():
        if value % size:
            raise ValueError(f"{flag} must be a multiple of --tensor-model-parallel-size {size}")
    groups = config.num_query_groups
    if groups % size and size % groups:
        raise ValueError(
            f"--num-query-groups {groups} must be a multiple or a divisor of --tensor-model-parallel-size {size}"
        )
