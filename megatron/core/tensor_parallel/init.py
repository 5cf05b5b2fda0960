"""Initial weights that any shard can draw alone.

[Note: initial weights] A parameter's values depend on the seed and its global name only. Rows are drawn in
blocks of `ROW_BLOCK`, each from a CPU generator keyed by (seed, name, block), always in fp32 and always a
full block, so that a longer (padded) table starts with the same rows. fp64 parameters hold the same fp32
numbers, bf16 and fp16 parameters the rounded ones. Any device and any degree of parallelism therefore start
from the same model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.core.param_meta import InitKind, ParamMeta
from megatron.core.tensor_parallel.random import stable_seed

ROW_BLOCK = 128


def _blocks(meta: ParamMeta, seed: int, row_start: int, rows: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, end row, values [end - first, columns]) covering the rows asked for, block by block."""
    columns = math.prod(meta.global_shape[1:])
    for block in range(row_start // ROW_BLOCK, -(-(row_start + rows) // ROW_BLOCK)):
        generator = torch.Generator(device="cpu").manual_seed(stable_seed(seed, meta.name, block))
        values = torch.empty(ROW_BLOCK, columns, dtype=torch.float32).normal_(
            0.0, meta.init_std, generator=generator
        )
        first = max(row_start, block * ROW_BLOCK)
        end = min(row_start + rows, (block + 1) * ROW_BLOCK)
        yield first, end, values[first - block * ROW_BLOCK : end - block * ROW_BLOCK]


def fill(tensor: Tensor, meta: ParamMeta, seed: int) -> None:
    """Fills `tensor`, this rank's part of a parameter (`ParamMeta.regions`), with initial values."""
    assert tuple(tensor.shape) == meta.local_shape, (
        f"{meta.name}: {tuple(tensor.shape)} != {meta.local_shape}"
    )
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
    if meta.init is InitKind.ZEROS:
        tensor.zero_()
        return
    if meta.init is InitKind.ONES:
        tensor.fill_(1.0)
        return
    rows = tensor.shape[0]
    columns = math.prod(tensor.shape[1:])
    all_columns = math.prod(meta.global_shape[1:])
    assert row_start + rows <= meta.global_shape[0], (
        f"{meta.name}: rows {row_start}+{rows} of {meta.global_shape}"
    )
    assert col_start + columns <= all_columns, f"{meta.name}: columns {col_start}+{columns} of {all_columns}"
    for first, end, values in _blocks(meta, seed, row_start, rows):
        part = tensor[first - row_start : end - row_start]
        part.copy_(values[:, col_start : col_start + columns].reshape(part.shape))
