"""Self-attention: QKV projection, norm and rotation of heads, attention, output projection."""

from __future__ import annotations

from torch import Tensor, nn

from megatron.core.module import ModelContext
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import TensorParallel
from megatron.core.tensor_parallel.sink_module import Band, LayerFactory
from megatron.core.transformer.core_attention import CoreAttention
from megatron.core.transformer.inference_cache import InferenceCache
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.recompute import recomputed
from megatron.core.transformer.rotary import apply_rope
from megatron.core.transformer.transformer_config import TransformerConfig

Angles = tuple[Tensor, Tensor]  # cos and sin, each [s, 1, 1, rotated dims / 2]


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
    return (
        Band(start + place * query_rows, query_rows),
        Band(start + per_group * head_dim, 2 * head_dim, copies),
    )


class SelfAttention(nn.Module):
    """[s, b, h] -> [s, b, h].

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
        self.groups = max(groups // tp.size, 1)  # of this rank
        self.heads_per_group = heads // tp.size // self.groups
        self.head_dim = dim
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
        selective = config.recompute_granularity == "selective"
        self.recompute_core = selective and "core_attn" in config.recompute_modules

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        angles: Angles | None = None,
        inference_cache: InferenceCache | None = None,
    ) -> Tensor:
        """mask: as `CoreAttention`. angles: by which queries and keys are rotated, if at all. inference_cache: keys and
        values of the tokens before; then there is no mask."""
        query, key, value = self._heads(x)
        if angles is not None:
            query = apply_rope(query, *angles, self.interleaved)
            key = apply_rope(key, *angles, self.interleaved)
        if inference_cache is not None:
            assert mask is None, "generation with a cache is causal; it takes no mask of its own"
            mask = inference_cache.causal_mask(key.shape[0], key.device)
            new = (t.permute(1, 2, 0, 3) for t in (key, value))
            key, value = (t.permute(2, 0, 1, 3) for t in inference_cache.extend(self.layer, *new))
        if self.recompute_core:
            core = recomputed(self.core_attention, self.context, query, key, value, mask)
        else:
            core = self.core_attention(query, key, value, mask)
        return self.linear_proj(core)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [s, b, heads, d], keys and values [s, b, groups, d], of this rank."""
        rows = self.linear_qkv(x)
        s, b, _ = rows.shape
        rows = rows.view(s, b, self.groups, self.heads_per_group + 2, self.head_dim)
        query, key, value = rows.split([self.heads_per_group, 1, 1], dim=3)
        query = query.reshape(s, b, self.groups * self.heads_per_group, self.head_dim)
        key, value = key.squeeze(3), value.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        return query, key, value
