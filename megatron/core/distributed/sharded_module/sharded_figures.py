"""Figures of sharded tensors: sums, norms, extremes, truth values of all elements, over all ranks that hold some.

Sums over ranks are made in fp64, so a norm does not depend on how a tensor is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.squared_sums import squared_sums
from megatron.core.distributed.sharded_module.flat_span import TensorPart
from megatron.core.transport import collectives
from megatron.core.transport.parallel_state import Group

Options = dict[str, Any]


def over_ranks(tensors: Sequence[Any], figures: Tensor, op: str) -> Tensor:
    """figures [len(tensors)] fp64, of each one's part -> the sums or maxima over the ranks that hold it: one message
    for all that the same ranks hold. Plain tensors' stay."""
    together: dict[tuple[int, ...], tuple[tuple[Group, ...], list[int]]] = {}
    for place, tensor in enumerate(tensors):
        if isinstance(tensor, TensorPart):
            groups = tensor.place.groups
            together.setdefault(tuple(map(id, groups)), (groups, []))[1].append(place)
    for groups, places in together.values():
        mine = figures[places]
        if op == "max":  # to which NaN means nothing
            mine = torch.stack((mine.nan_to_num(-math.inf, math.inf, -math.inf), mine.isnan().double()))
        for group in groups:
            collectives.all_reduce(mine, group, op)
        figures[places] = torch.where(mine[1] > 0, math.nan, mine[0]) if op == "max" else mine
    return figures


def _owned(tensor: Any) -> Tensor:
    return tensor.place.owned(tensor.local) if isinstance(tensor, TensorPart) else tensor


def total(tensor: Any, of: Callable[[Tensor], Tensor] = lambda one: one) -> Tensor:
    """0-d fp64"""
    return over_ranks([tensor], of(_owned(tensor).double()).sum().view(1), "sum")[0]


def _largest(tensors: Sequence[Any], of: Callable[[Tensor], Tensor]) -> Tensor:
    """[len(tensors)] fp64; -inf where there are no elements."""
    parts = [of(_owned(one).double()).view(-1) for one in tensors]
    found = torch.stack([part.max() if part.numel() else part.new_tensor(-math.inf) for part in parts])
    return over_ranks(tensors, found, "max")


def norms(tensors: Sequence[Any], order: float) -> Tensor:
    """[len(tensors)] fp64: each one's norm over all ranks."""
    if order == math.inf:
        return _largest(tensors, torch.abs).clamp(min=0)
    if order == -math.inf:
        return -_largest(tensors, lambda one: -one.abs())
    owned = [_owned(one) for one in tensors]
    if order == 2:
        return over_ranks(tensors, squared_sums(owned), "sum").sqrt()
    if order == 0:
        return over_ranks(tensors, torch.stack([one.count_nonzero().double() for one in owned]), "sum")
    powers = torch.stack([one.double().abs().pow(order).sum() for one in owned])
    return over_ranks(tensors, powers, "sum").pow(1 / order)


def _variance(tensor: Any, options: Options) -> Tensor:
    mean, correction = total(tensor) / tensor.numel(), options.get("correction")
    freedom = tensor.numel() - (1 if correction is None else correction)
    return total(tensor, lambda one: (one - mean).square()) / max(freedom, 0)


# 0-d fp64 of a tensor and an operation's named arguments.
FIGURES: dict[str, Callable[[Any, Options], Tensor]] = {
    "sum": lambda one, _: total(one),
    "mean": lambda one, _: total(one) / one.numel(),
    "count_nonzero": lambda one, _: norms([one], 0)[0],
    **dict.fromkeys(("max", "amax"), lambda one, _: _largest([one], lambda part: part)[0]),
    **dict.fromkeys(("min", "amin"), lambda one, _: -_largest([one], lambda part: -part)[0]),
    "any": lambda one, _: total(one, lambda part: part.ne(0).double()) > 0,
    "all": lambda one, _: total(one, lambda part: part.eq(0).double()) == 0,
    "linalg_vector_norm": lambda one, options: norms([one], float(options.get("ord", 2)))[0],
    "var": _variance,
    "std": lambda one, options: _variance(one, options).sqrt(),
}
