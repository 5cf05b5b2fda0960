"""Sums and norms of all elements of sharded tensors, over all ranks that hold some: of sums over ranks in fp64, so that
no norm depends on how a tensor is cut. Other figures are those of the whole tensor, which is gathered for them."""

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


def over_ranks(tensors: Sequence[Any], figures: Tensor) -> Tensor:
    """figures [len(tensors)] fp64, of each one's part -> their sums over the ranks that hold it: one message for all
    that the same ranks hold. Plain tensors' stay."""
    together: dict[tuple[Group, ...], list[int]] = {}
    for place, tensor in enumerate(tensors):
        together.setdefault(tensor.place.groups if isinstance(tensor, TensorPart) else (), []).append(place)
    for groups, places in together.items():
        mine = figures[places]
        for group in groups:
            collectives.all_reduce(mine, group)
        figures[places] = mine
    return figures


def _owned(tensor: Any) -> Tensor:
    return tensor.place.owned(tensor.local) if isinstance(tensor, TensorPart) else tensor


def sums(tensors: Sequence[Any], of: Callable[[Tensor], Tensor] = lambda one: one) -> Tensor:
    """[len(tensors)] fp64"""
    return over_ranks(tensors, torch.stack([of(_owned(one).double()).sum() for one in tensors]))


def norms(tensors: Sequence[Any], order: float) -> Tensor:
    """[len(tensors)] fp64: each one's norm over all ranks."""
    if order == 2:
        return over_ranks(tensors, squared_sums([_owned(one) for one in tensors])).sqrt()
    if 0 < order < math.inf:
        return sums(tensors, lambda one: one.abs().pow(order)).pow(1 / order)
    whole = (one.full_tensor() if isinstance(one, TensorPart) else one for one in tensors)
    return torch.stack([torch.linalg.vector_norm(one.double(), order) for one in whole])


# [1] fp64 of a tensor, and an operation's other arguments.
FIGURES: dict[str, Callable[..., Tensor]] = {
    "sum": lambda one, *_, **__: sums([one]),
    "mean": lambda one, *_, **__: sums([one]) / one.numel(),
    "linalg_vector_norm": lambda one, ord=2, *_, **__: norms([one], float(ord)),
}
