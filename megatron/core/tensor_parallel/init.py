"""Initial weights that any shard can draw alone.

[Note: initial weights] A parameter's values depend on the seed and its global name only. Rows are drawn in
blocks of `ROW_BLOCK`, each from a CPU generator keyed by (seed, name, block), always in fp32 and always a
full block, so that a longer (padded) table starts with the same rows. fp64 parameters hold the same fp32
numbers, bf16 and fp16 parameters the rounded ones. Any device and any degree of parallelism therefore start
from the same model.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron.core.param_meta import InitKind, ParamMeta
from megatron.core.tensor_parallel.random import stable_seed

ROW_BLOCK = 128


def fill(tensor: Tensor, meta: ParamMeta, seed: int) -> None:
    """Fills `tensor`, this rank's part of a parameter (`ParamMeta.regions`), with initial values."""
    assert tuple(tensor.shape) == meta.local_shape, f"{meta.name}: {tensor.shape}, not {meta.local_shape}"
    for part in meta.parts:
        row_start, col_start = (*part.offset, 0, 0)[:2]
        assert not any(part.offset[2:]), f"{meta.name}: cut along a dim after the second: {part}"
        fill_rectangle(part.view(tensor), meta, seed, row_start, col_start * math.prod(meta.global_shape[2:]))


@torch.no_grad()
def fill_rectangle(
    tensor: Tensor, meta: ParamMeta, seed: int, row_start: int = 0, col_start: int = 0
) -> None:
    """Fills `tensor`, the rectangle of a parameter that begins at (row_start, col_start), with initial values.

    tensor: [rows, columns], or of the parameter's own number of dims when it holds whole rows; any float
    dtype and device. A 1-D tensor is one column.
    """
    if meta.init is not InitKind.NORMAL:
        tensor.fill_(1.0 if meta.init is InitKind.ONES else 0.0)
        return
    row_end, col_end = row_start + tensor.shape[0], col_start + math.prod(tensor.shape[1:])
    all_rows, all_columns = meta.global_shape[0], math.prod(meta.global_shape[1:])
    assert row_end <= all_rows, f"{meta.name}: rows {row_start} to {row_end} of {meta.global_shape}"
    assert col_end <= all_columns, f"{meta.name}: columns {col_start} to {col_end} of {all_columns}"
    for block in range(row_start // ROW_BLOCK, -(-row_end // ROW_BLOCK)):
        generator = torch.Generator(device="cpu").manual_seed(stable_seed(seed, meta.name, block))
        values = torch.empty(ROW_BLOCK, all_columns, dtype=torch.float32)
        values.normal_(0.0, meta.init_std, generator=generator)
        start = block * ROW_BLOCK
        first, end = max(row_start, start), min(row_end, start + ROW_BLOCK)
        part = tensor[first - row_start : end - row_start]
        part.copy_(values[first - start : end - start, col_start:col_end].reshape(part.shape))
