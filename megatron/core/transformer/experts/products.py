"""Products of rows with the matrix of their expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.device import SHORT, even_rows, kind_of, product

_ALIGNED = 16  # bytes that strides of rows are a multiple of where torch groups products


def products_by_expert(x: Tensor, weight: Tensor, ends: Sequence[int], grouped: bool) -> Tensor:
    """x [rows, in] times weight [experts, in, out] -> [rows, out]; expert e's rows end at ends[e].

    grouped: as one kernel, where torch has it for this dtype and these sizes; the bits are those of one product an
    expert.
    """
    if grouped and len(x) and _is_groupable(x, weight):
        offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, weight, offs=offsets)
    out, start = x.new_empty(len(x), weight.shape[2]), 0
    for matrix, end in zip(weight.unbind(), ends, strict=True):
        if start < end:
            rows, of_rows = even_rows(x[start:end], matrix.shape[1]), out[start:end]
            if len(rows) == len(of_rows):
                product(rows, matrix, of_rows)
            else:
                of_rows.copy_(product(rows, matrix)[: len(of_rows)])
        start = end
    return out


def _is_groupable(x: Tensor, weight: Tensor) -> bool:
    """On CPU 16-bit numbers are not: torch's kernel is a product an expert there too, without `even_rows`."""
    if x.dtype == torch.float64 or x.is_meta or (x.dtype in SHORT and kind_of(x.device) == "cpu"):
        return False
    steps = [x.stride(0), *(step for step in weight.stride() if step != 1)]
    return not any(step * x.element_size() % _ALIGNED for step in steps)
