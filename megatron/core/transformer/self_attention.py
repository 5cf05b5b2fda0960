"""Self-attention: QKV projection, norm and rotation of heads, softmax(Q K^T / sqrt(d)) V, output projection.

Attention proper (arXiv 1706.03762, 3.2; groups of query heads: arXiv 2305.13245) is torch's fused kernels, or the same
written out as the exact reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.core.device import goes_by_fp32, kind_of
from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.functions import Kept, apply, direct
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.tensor_parallel.parallel_layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import DropoutSite, dropout, seeded_default_generator
from megatron.core.tensor_parallel.sink_module import Band, LayerFactory
from megatron.core.transformer.fused_attention import fused_attention
from megatron.core.transformer.model_config import TransformerConfig
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rotary import apply_rope

_kernel = torch._scaled_dot_product_flash_attention_for_cpu
_kernel_backward = direct(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default)

Angles = tuple[Tensor, Tensor]  # cos and sin, each [s, b or 1, 1, rotated dims / 2]


class InferenceCache:
    """Keys and values of a batch of sequences of unequal lengths: buffers [max_tokens, b, groups, d] a layer.

    Whoever generates calls `begin` before each forward, in which the model reads and writes the cache; its logits are
    then those behind each sequence's newest token alone.

    [Note: sequences of unequal lengths] Every sequence is filled from its own position 0. A forward that adds unequal
    numbers of tokens is given them filled up at the end: the filling lies behind all that the tokens of its sequence
    may look at, and the sequence's next tokens are written over it.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._filled: list[int] = []  # tokens of each sequence, those of the present forward among them
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def begin(self, new_tokens: Sequence[int], device: torch.device) -> None:
        """The next forward adds so many tokens to each sequence. Sets what the layers read: `positions` [b, s] of the
        new tokens; `end`, above all of them; `mask` [b, 1, s, end], True = masked, None where plain causal attention
        says the same."""
        starts = self._filled or [0] * len(new_tokens)
        self._filled = [start + new for start, new in zip(starts, new_tokens, strict=True)]
        longest = max(new_tokens)
        self.end = max(starts) + longest
        assert self.end <= self.max_tokens, f"cache of {self.max_tokens} tokens, asked for {self.end}"
        first = torch.tensor(starts, device=device)[:, None]
        self.positions = first + torch.arange(longest, device=device)
        rows = torch.arange(len(starts), device=device)
        self._places = self.positions.t(), rows
        self._newest = torch.tensor(new_tokens, device=device) - 1, rows
        self.mask = None
        if any(starts):
            self.mask = (torch.arange(self.end, device=device) > self.positions[:, :, None])[:, None]

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Files new keys and values [s, b, groups, d] of a layer; returns all of them, [end, b, groups, d]."""
        if layer not in self._layers:  # zeros: what is masked is multiplied by 0
            shape = (self.max_tokens, *key.shape[1:])
            self._layers[layer] = (key.new_zeros(shape), value.new_zeros(shape))
        keys, values = self._layers[layer]
        keys[self._places], values[self._places] = key, value
        return keys[: self.end], values[: self.end]

    def newest(self, hidden: Tensor) -> Tensor:
        """Of hidden states [s, b, h] those of each sequence's newest token, [1, b, h]."""
        return hidden[self._newest][None]

    def keep(self, sequences: list[int]) -> None:
        """Only these sequences of the batch go on, in this order."""
        self._filled = [self._filled[one] for one in sequences]
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = keys[:, sequences], values[:, sequences]


class CoreAttention(nn.Module):
    """Attention proper of one layer; no parameters.

    query [s, b, heads, d], key and value [s_all, b, groups, d] -> [s, b, heads * d]. mask: bool, True = may
    not be seen, broadcastable to [b, heads, s, s_all]; None = causal. tp_rank: where heads are sharded.
    """

    def __init__(
        self, config: TransformerConfig, context: ModelContext, layer: int, tp_rank: int | None = None
    ) -> None:
        super().__init__()
        self.written_out = config.attention_backend in ("unfused", "local")
        self.dropout = config.attention_dropout
        self.site = DropoutSite(context, layer, "attention", tp_rank)
        self.scale = 1.0 / math.sqrt(config.kv_channels)
        # `--apply-query-key-layer-scaling` keeps fp16 products small and is undone in an fp32 softmax; fused
        # kernels hold scores in fp32 and need neither.
        self.layer_scaling = float(layer + 1) if config.apply_query_key_layer_scaling else 1.0
        self.softmax_in_fp32 = config.attention_softmax_in_fp32 or config.apply_query_key_layer_scaling

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        attended = self.attend(by_head(query), by_head(key), by_head(value), mask)
        return by_position(attended).flatten(2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """The same by heads: q [b, heads, s, d], k and v [b, groups, s_all, d] -> [b, heads, s, d]."""
        return self._exact(q, k, v, mask) if self.written_out else self._fused(q, k, v, mask)

    # --- torch's kernel for CPUs without autograd: causal, without dropout, as many heads of keys as of queries

    def is_one_kernel(self, x: Tensor) -> bool:
        """Whether that is all of it, causally, for heads like x."""
        in_pieces = self.written_out or (self.dropout and self.training)
        return kind_of(x.device) == "cpu" and not in_pieces and torch.backends.cuda.flash_sdp_enabled()

    def kernel_forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept]:
        """As `attend`, and what is kept."""
        attended, logsumexp = _kernel(q, k, v, 0.0, True, scale=self.scale)
        return attended, (q, k, v, attended, logsumexp)

    def kernel_backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradient of what was attended -> of q, k and v. Where 16-bit products are emulated, in fp32, which takes a
        ninth of the time of the kernel for 16 bits at 32 tokens and a third at 512; a sequence at a time."""
        if not goes_by_fp32(dy):
            dq, dk, dv = _kernel_backward(dy, *kept, 0.0, True, scale=self.scale)
            return dq, dk, dv
        grads = [torch.empty_like(one) for one in kept[:3]]
        for sequence in range(len(dy)):
            *wide, logsumexp = (one[sequence : sequence + 1] for one in (dy, *kept))
            found = _kernel_backward(*(one.float() for one in wide), logsumexp, 0.0, True, scale=self.scale)
            for grad, one in zip(grads, found, strict=True):
                grad[sequence] = one[0]
        return grads[0], grads[1], grads[2]

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        probability = self.dropout if self.training else 0.0
        if goes_by_fp32(q) and mask is None and not probability and has_one_kernel(q, k):
            return apply(_Kernel(self), q, k, v)
        allowed = None if mask is None else ~mask
        with seeded_default_generator(q.device, self.site.seed()) if probability else nullcontext():
            return fused_attention(q, k, v, allowed, probability, self.scale)

    def _exact(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        heads_per_group = q.shape[1] // k.shape[1]
        if heads_per_group > 1:
            k, v = k.repeat_interleave(heads_per_group, dim=1), v.repeat_interleave(heads_per_group, dim=1)
        scores = torch.matmul(q * (self.scale / self.layer_scaling), k.transpose(-1, -2))
        if self.softmax_in_fp32:
            scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.layer_scaling != 1.0:
            scores = scores * self.layer_scaling
        if mask is None:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        probabilities = scores.masked_fill(mask, -math.inf).softmax(-1).to(v.dtype)
        return torch.matmul(dropout(probabilities, self.dropout, self.site, self.training), v)


class _Kernel(NamedTuple):
    """A `GradFunction` of q, k and v: torch's kernel for CPUs."""

    core: CoreAttention

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept]:
        return self.core.kernel_forward(q, k, v)

    def backward(self, kept: Kept, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.core.kernel_backward(kept, dy)


def has_one_kernel(q: Tensor, k: Tensor) -> bool:
    """Whether torch takes its kernel for CPUs, as it is, for causal attention without dropout: q, k by heads."""
    return kind_of(q.device) == "cpu" and q.shape == k.shape and torch.backends.cuda.flash_sdp_enabled()


def by_head(t: Tensor) -> Tensor:
    """[s, b, heads, d] -> [b, heads, s, d], a view; as the kernels take it."""
    return t.permute(1, 2, 0, 3)


def by_position(t: Tensor) -> Tensor:
    """[b, heads, s, d] -> [s, b, heads, d], a view."""
    return t.permute(2, 0, 1, 3)


def joined_heads(t: Tensor) -> Tensor:
    """[b, heads, s, d] -> [s b, heads * d]."""
    b, heads, s, d = t.shape
    return t.permute(2, 0, 1, 3).reshape(s * b, heads * d)


def parted_heads(rows: Tensor, batch: int, head_dim: int) -> Tensor:
    """[s b, heads * d] -> [b, heads, s, d], a view."""
    return rows.view(-1, batch, rows.shape[1] // head_dim, head_dim).permute(1, 2, 0, 3)


def qkv_bands(heads: int, groups: int, head_dim: int, tp: TensorParallel) -> tuple[Band, ...]:
    """The rows of `linear_qkv` that this rank holds: heads/tp query heads, and the keys and values they look at.

    Rows of the whole are grouped by KV group: the group's query heads, its key head, its value head. With at least
    as many groups as ranks a rank holds whole groups. With fewer, tp/groups consecutive ranks share a group: each
    holds its own query heads of it and a copy of its key and value rows.
    """
    per_group = heads // groups
    group_rows = (per_group + 2) * head_dim
    if groups % tp.size == 0:
        rows = groups // tp.size * group_rows
        return (Band(tp.rank * rows, rows),)
    assert tp.size % groups == 0, f"{groups} query groups over {tp.size} ranks"
    copies = tp.size // groups
    group, place = divmod(tp.rank, copies)
    query_rows = per_group // copies * head_dim
    start = group * group_rows
    shared = Band(start + per_group * head_dim, 2 * head_dim, copies)
    return Band(start + place * query_rows, query_rows), shared


class SelfAttention(nn.Module):
    """[s, b, h] -> [s, b, h] (sequence parallel: [s/tp, b, h]).

    Rows of `linear_qkv` are grouped by KV group: the group's query heads, its key head, its value head. Each tensor
    parallel rank attends with its own query heads (`qkv_bands`). Communicates over tp.
    """

    def __init__(
        self, config: TransformerConfig, context: ModelContext, layer: int, factory: LayerFactory
    ) -> None:
        super().__init__()
        self.layer, self.context = layer, context
        tp, hidden = factory.tp, config.hidden_size
        heads, groups, dim = config.num_attention_heads, config.num_query_groups, config.kv_channels
        self.groups, self.head_dim = max(groups // tp.size, 1), dim  # of this rank
        self.heads_per_group = heads // tp.size // self.groups
        self.interleaved = config.rotary_interleaved
        self.linear_qkv = ColumnParallelLinear(
            hidden,
            (heads + 2 * groups) * dim,
            factory.at("linear_qkv"),
            bias=config.add_bias_linear or config.add_qkv_bias,
            bands=qkv_bands(heads, groups, dim, tp),
        )
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            self.q_layernorm = Norm(config, dim, factory.at("q_layernorm"), over_heads=True)
            self.k_layernorm = Norm(config, dim, factory.at("k_layernorm"), over_heads=True)
        self.core_attention = CoreAttention(config, context, layer, tp.shard_rank)
        bias = config.attention_output_bias
        self.linear_proj = RowParallelLinear(heads * dim, hidden, factory.at("linear_proj"), bias=bias)
        self.recompute_core = config.recomputes("core_attn")
        # Whether nothing but `core_attention` happens between heads of a plain causal pass and what is attended.
        self.is_plain = self.heads_per_group == 1 and not config.qk_layernorm and not self.recompute_core

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        angles: Angles | None = None,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        """mask: as `CoreAttention`. angles: by which queries and keys are rotated, if at all. inference_cache: keys and
        values of the tokens before; then there is no mask."""
        heads = self.heads_of(self.linear_qkv(x).flatten(0, 1), x.shape[1])
        query, key, value, mask = self._turned(*heads, mask, angles, inference_cache)
        by_positions = by_position(query), by_position(key), by_position(value)
        return self.linear_proj(self._maybe_recomputed(self.core_attention, *by_positions, mask))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        angles: Angles | None,
        cache: InferenceCache | None,
    ) -> Tensor:
        """Between the projections, by autograd: heads as `heads_of` returns them -> [b, heads, s, d]."""
        query, key, value, mask = self._turned(query, key, value, mask, angles, cache)
        return self._maybe_recomputed(self.core_attention.attend, query, key, value, mask)

    def heads_of(self, rows: Tensor, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """`linear_qkv`'s [s b, rows] -> query [b, heads, s, d], key and value [b, groups, s, d], of this rank."""
        r, d = self.heads_per_group, self.head_dim
        rows = rows.view(-1, batch, self.groups, r + 2, d)
        if r == 1:
            query, key, value = rows.permute(3, 1, 2, 0, 4).unbind()
            return query, key, value
        query, key, value = rows.split([r, 1, 1], dim=3)
        return by_head(query.flatten(2, 3)), by_head(key.squeeze(3)), by_head(value.squeeze(3))

    def rows_of(self, dquery: Tensor, dkey: Tensor, dvalue: Tensor) -> Tensor:
        """The backward of `heads_of`."""
        heads = by_position(dquery), by_position(dkey), by_position(dvalue)  # [s, b, heads or groups, d]
        if self.heads_per_group == 1:
            together = torch.cat(heads, dim=3)
        else:
            together = torch.cat([d.unflatten(2, (self.groups, -1)) for d in heads], dim=3)
        return together.view(dquery.shape[0] * dquery.shape[2], -1)

    def _turned(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        angles: Angles | None,
        cache: InferenceCache | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Heads normed and rotated, with those of the tokens before."""
        if self.q_layernorm is None and angles is None and cache is None:
            return query, key, value, mask
        query, key, value = by_position(query), by_position(key), by_position(value)  # [s, b, heads, d]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if angles is not None:
            query = apply_rope(query, *angles, self.interleaved)
            key = apply_rope(key, *angles, self.interleaved)
        if cache is not None:
            assert mask is None, "generation with a cache is causal; it takes no mask of its own"
            mask = cache.mask
            key, value = cache.extend(self.layer, key, value)
        return by_head(query), by_head(key), by_head(value), mask

    def _maybe_recomputed(self, core: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        return recomputed(core, self.context, *inputs) if self.recompute_core else core(*inputs)
