"""What a stage's microbatch costs before anything was measured: times by FLOPs, activations by bytes (floor 0).

Source of the form: arXiv 2401.10241, table 1: per layer F = sbh(24h+4s), B = sbh(24h+8s), W = 24sbh^2, activations
sb(34h+5as). The terms here are those of our own layers and of what they really keep.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

from megatron.core.models.gpt.parameter_count import layer_matrices
from megatron.core.models.gpt.stage_layers import StageSpec
from megatron.core.models.gpt.unit_order import layer_units
from megatron.core.pipeline_parallel.plan.costs import CostModel
from megatron.core.rectangles import even_share
from megatron.core.transformer.layer_table import LayerKind, layer_table
from megatron.core.transformer.model_config import TransformerConfig

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}  # as flags have them
# Elementwise work (norms, residuals, dropout), in FLOPs a hidden element of each layer: for stages without layers, too,
# which hand on what they get.
_ELEMENTWISE = 40
# What a device (True: a GPU) computes while a byte comes from its tensor parallel peers: A100 312 TFLOP/s beside 300
# GB/s, H100 990 beside 450; a CPU core 50 GFLOP/s beside 1 GB/s of copies in memory.
_FLOPS_OF_GATHERED_BYTE = {True: 1000, False: 50}
# And while a byte goes to the next stage: A100 312 TFLOP/s beside 25 GB/s of a network, H100 990 beside 50; a CPU core
# beside 1 GB/s through gloo.
_FLOPS_OF_SENT_BYTE = {True: 15_000, False: 50}


@dataclasses.dataclass(frozen=True)
class StageWork:
    """One microbatch of a part of the model, on one tensor parallel rank.

    f, b, w: FLOPs. saved: bytes from F to B. held: bytes from B to W.
    """

    f: float = 0.0
    b: float = 0.0
    w: float = 0.0
    saved: float = 0.0
    held: float = 0.0

    def __add__(self, other: StageWork) -> StageWork:
        return StageWork(*map(operator.add, vars(self).values(), vars(other).values()))


class _Sizes(NamedTuple):
    """tokens: of a microbatch. element, residual: bytes of an element of activations, of the residual stream. parts:
    that sequence parallel cuts hidden states into. whole_input: bytes of a column layer's gathered input."""

    tokens: int
    element: int
    residual: int
    parts: int
    whole_input: int


@dataclasses.dataclass(frozen=True)
class ModelCosts:
    """The facts that costs follow from.

    config: resolved. params_dtype: a key of DTYPE_BYTES. keeps_gathered: F keeps what sequence parallel has gathered
    for column layers, so that W does not gather it again.
    """

    config: TransformerConfig
    padded_vocab_size: int
    micro_batch_size: int
    params_dtype: str
    tp: int = 1
    sequence_parallel: bool = False
    has_gpu: bool = False
    keeps_gathered: bool = False

    def of_stages(self, stages: Sequence[StageSpec]) -> CostModel:
        """Times in units of one layer's F; activations in bytes, of a rank of the stage. A transfer takes what it would
        between machines."""
        unit, works = self.layer().f, [self.stage(spec) for spec in stages]
        f, b, w, saved, held = zip(*(vars(work).values() for work in works), strict=True)
        f, b, w = (tuple(time / unit for time in column) for column in (f, b, w))
        comm = self._hidden(self._sizes.residual) * _FLOPS_OF_SENT_BYTE[self.has_gpu] / unit
        return CostModel(f, b, w, saved, held, comm)

    def stage(self, spec: StageSpec) -> StageWork:
        """All that a stage holds; of one without anything, handing on."""
        ends = [self.embedding()] * spec.embedding, [self.head()] * spec.loss
        return sum([*ends[0], *self.of_layers(spec.layers).values(), *ends[1]], self.handed_on(spec))

    def handed_on(self, spec: StageSpec) -> StageWork:
        """What a stage gets, keeps of that and hands on, whatever it holds."""
        inputs = (bool(spec.layers) or not spec.embedding) + (bool(spec.layers) and spec.loss)
        return StageWork(f=self._moved, b=self._moved, saved=inputs * self._hidden(self._sizes.residual))

    def of_layers(self, layers: Sequence[int]) -> dict[str, StageWork]:
        """Of each unit of a stage's layers, without the input of the first, which the stage has."""
        table, hidden = layer_table(self.config), self._hidden(self._sizes.residual)
        works: dict[str, StageWork] = {}
        for first, end, recomputed in self.config.recompute_chunks(len(layers)):
            for place, number in enumerate(layers[first:end], first):
                kind = table[number]
                units = [self.layer(kind), *([] if kind.experts is None else [self.experts(kind)])]
                if recomputed:  # only the chunk's input is kept
                    units = [dataclasses.replace(one, b=one.b + one.f, saved=0.0) for one in units]
                known = hidden * (bool(first) if recomputed else -(not place)) * (place == first)
                units[0] = dataclasses.replace(units[0], saved=units[0].saved + known)
                works |= zip(layer_units(number, kind), units, strict=True)
        return works

    def experts(self, kind: LayerKind) -> StageWork:
        """Those that a layer routes tokens to, each as busy as the others. A rank has all rows, and a share of their
        width."""
        c, z, of = self.config, self._sizes, kind.experts
        assert of is not None, "a layer without experts"
        rows, (into, out_of) = z.tokens * of.topk, layer_matrices(c, self.tp, of.width)[2:]
        (h, fc1), width, routes = into, out_of[0], 8 * (2 * z.tokens * of.topk + z.tokens)
        products = 2 * rows * (h * fc1 + width * h)
        moved = 8 * rows * h  # there and back
        saved = rows * (fc1 * z.element + max(4, z.element)) + routes
        held = rows * z.element * (fc1 + width + h) + z.tokens * h * z.element / z.parts
        return StageWork(products + moved, products + moved, products + 2 * rows * h, saved, held)

    def layer(self, kind: LayerKind | None = None) -> StageWork:
        """One decoder layer, without the experts that it routes tokens to. kind: that of the first layer if not
        given."""
        c, z = self.config, self._sizes
        kind = layer_table(c)[0] if kind is None else kind
        width = kind.mlp_width if kind.experts is None else kind.experts.shared_width
        matrices = layer_matrices(c, self.tp, width)
        matrices = matrices if width else (*matrices[:2], (0, 0), (0, 0))
        products = 2.0 * z.tokens * sum(into * out for into, out in matrices)
        if kind.experts is not None:
            products += 2 * z.tokens * c.hidden_size * kind.experts.num_experts / z.parts  # the router
        (_, qkv), (query, _), (_, fc1), (width, _) = matrices
        scores = 4 * z.tokens * c.seq_length * query
        again = scores if self._recomputes_core else 0.0
        masks = 2 * self._hidden(1) if c.hidden_dropout else 0.0
        saved = (
            2 * self._hidden(z.residual)  # inputs of both norms
            + 2 * self._column_input  # and what they hand on
            + self._norms(2)
            + self._attention(query, (qkv - query) / 2)
            + z.tokens * (fc1 + width * c.keep_activation_output) * z.element
            + masks
        )
        held = (
            2 * self._column_input
            + z.tokens * z.element * (qkv + fc1)  # gradients of the column layers' outputs
            + z.tokens * z.element * (query + width)  # inputs of the row layers
            + 2 * z.whole_input
        )
        f, b = products + scores + self._moved, products + 2 * scores + again + self._moved
        return StageWork(f, b, products + 2 * self._gathered_again, saved, held)

    def embedding(self) -> StageWork:
        """Lookup and dropout; W adds rows."""
        z = self._sizes
        ids = z.tokens * 8 * (2 if self.config.position_embedding_type == "learned_absolute" else 1)
        masks = self._hidden(1) if self.config.hidden_dropout else 0.0
        # Hidden states enter here: the stage takes none from another.
        return StageWork(self._moved, 0.0, self._moved, ids + masks, ids + self._hidden(z.residual))

    def head(self) -> StageWork:
        """Final norm, output layer, loss."""
        z, columns = self._sizes, even_share(self.padded_vocab_size, self.tp)
        product, logits = 2 * z.tokens * self.config.hidden_size * columns, z.tokens * columns
        saved = self._column_input + self._norms(1) + logits * max(4, z.element) + z.tokens * 8
        held = self._column_input + logits * z.element
        w = product + self._gathered_again
        return StageWork(product + 5 * logits, product + 3 * logits, w, saved, held)

    def _attention(self, query: float, key: float) -> float:
        """Bytes that attention keeps, up to the input of its output projection. query, key: widths on this rank."""
        c, e, tokens = self.config, self._sizes.element, self._sizes.tokens
        kept = tokens * (query + 2 * key) * e
        turned = c.position_embedding_type == "rope" or c.qk_layernorm
        heads = tokens * (query + key) * e if turned else 0.0
        if c.num_attention_heads // max(c.num_query_groups, 1) > 1 and (c.qk_layernorm or not turned):
            heads += tokens * query * e  # queries of a group lie between keys: a copy
        if c.qk_layernorm:
            heads += tokens * (query + key) / c.kv_channels * 4 * self._numbers_of_norm
        kept = kept + heads + tokens * query * e
        if self._recomputes_core:
            return kept
        scores = self.micro_batch_size * c.num_attention_heads / self.tp * c.seq_length**2
        if c.attention_backend in ("unfused", "local"):
            wide = max(e, 4) if c.attention_softmax_in_fp32 or c.apply_query_key_layer_scaling else e
            each = wide + (1 + e if c.attention_dropout else e if wide != e else 0)
            return kept + tokens * query * e + each * scores
        if c.attention_dropout and not self.has_gpu:
            # torch's kernel for CPUs writes the scores out where it drops some: fp32, their mask, and what is left
            return kept + tokens * 2 * query * max(e, 4) + 12 * scores
        return kept + tokens * (c.num_attention_heads / self.tp) * 4

    def _norms(self, count: int) -> float:
        return count * self._numbers_of_norm * 4 * self._sizes.tokens / self._sizes.parts

    def _hidden(self, element: int) -> float:
        """Hidden states of a microbatch, under sequence parallel this rank's part, in elements of so many bytes."""
        return self._sizes.tokens * self.config.hidden_size * element / self._sizes.parts

    @functools.cached_property
    def _sizes(self) -> _Sizes:
        tokens, element = self.config.seq_length * self.micro_batch_size, DTYPE_BYTES[self.params_dtype]
        residual = max(4, element) if self.config.fp32_residual_connection else element
        whole = tokens * self.config.hidden_size * element
        return _Sizes(tokens, element, residual, self.tp if self.sequence_parallel else 1, whole)

    @property
    def _column_input(self) -> float:
        """What is kept of the input of a column layer."""
        return self._sizes.whole_input / (1 if self.keeps_gathered else self._sizes.parts)

    @property
    def _gathered_again(self) -> float:
        """What W waits for a column layer's input, in FLOPs."""
        if self.keeps_gathered or self._sizes.parts == 1:
            return 0.0
        missing = self._sizes.whole_input * (1 - 1 / self._sizes.parts)
        return missing * _FLOPS_OF_GATHERED_BYTE[self.has_gpu]

    @property
    def _numbers_of_norm(self) -> int:
        """Kept of each row."""
        return 1 if self.config.normalization == "RMSNorm" else 2

    @property
    def _recomputes_core(self) -> bool:
        c = self.config
        return c.recompute_granularity == "selective" and "core_attn" in c.recompute_modules

    @property
    def _moved(self) -> float:
        """FLOPs that elementwise work is counted as."""
        return _ELEMENTWISE * self._sizes.tokens * self.config.hidden_size / self._sizes.parts
