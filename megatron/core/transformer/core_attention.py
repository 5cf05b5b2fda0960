"""softmax(Q K^T / sqrt(d)) V: torch's fused kernels, and the same written out as the exact reference."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.random import DropoutSite, dropout, seeded_default_generator
from megatron.core.transformer.transformer_config import TransformerConfig


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
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))  # [b, heads, s, d]
        out = self._exact(q, k, v, mask) if self.written_out else self._fused(q, k, v, mask)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        probability = self.dropout if self.training else 0.0
        allowed, grouped = None if mask is None else ~mask, q.shape[1] != k.shape[1]
        with seeded_default_generator(q.device, self.site.seed()) if probability else nullcontext():
            return F.scaled_dot_product_attention(
                q, k, v, allowed, probability, mask is None, scale=self.scale, enable_gqa=grouped
            )

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
