"""Products of rows with the matrix of their expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from megatron.core.device import goes_by_fp32, product

_ALIGNED = 16  # bytes that strides of rows are a multiple of where torch groups products


def products_by_expert(x: Tensor, weight: Tensor, ends: Sequence[int], grouped: bool) -> Tensor:
    """x [rows, in] times weight [experts, in, out] -> [rows, out]; expert e's rows end at ends[e].

    grouped: as one kernel, where torch has it for this dtype and these sizes; the bits are those of one product an
    expert.
    """
    if grouped and len(x) and _is_groupable(x, weight, ends):
        offsets = torch.tensor(ends, dtype=torch.int32, device=x.device)
        return F.grouped_mm(x, weight, offs=offsets)
    out, start = x.new_empty(len(x), weight.shape[2]), 0
    for matrix, end in zip(weight.unbind(), ends, strict=True):
        if start < end:
            product(x[start:end], matrix, out[start:end])
        start = end
    return out


def _is_groupable(x: Tensor, weight: Tensor, ends: Sequence[int]) -> bool:
    if x.dtype == torch.float64 or x.is_meta:
        return False
    steps = [x.stride(0), *(step for step in weight.stride() if step != 1)]
    if any(step * x.element_size() % _ALIGNED for step in steps):
        return False
    sizes = zip((0, *ends), ends, strict=False)
    return not any(goes_by_fp32(x[start:end], weight[0]) for start, end in sizes if start < end)
