"""What is left of a gradient once it is summed over data parallel ranks: sums over the ranks that share a parameter.

Two kinds, both rare, both found in `ParamMeta` and fixed when the engine is built:

- partial regions (norms under sequence parallel, replicated key and value rows): each of the tensor parallel ranks
  that hold a region has the gradient of its own tokens or heads. All of them, of all parameters, travel in one
  collective.
- shared parameters (tied embeddings): the first and the last pipeline stage each have the gradient of their own use.
  A sum of two has one order, so it is, bit for bit, what one process gets from adding the uses (`combine_uses`).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from megatron.core import collectives
from megatron.core.distributed.flat_buffer import FlatBuffer
from megatron.core.parallel_state import Group
from megatron.core.param_meta import Region


@dataclasses.dataclass(frozen=True)
class _Packed:
    """A partial region's place in the packed buffer: elements [start, start + numel) are this rank's block's."""

    name: str
    region: Region
    start: int


class PartialSums:
    """Adds the parts of gradients that several tensor parallel ranks hold.

    Ranks that hold another rectangle must not be added: a region of c copies has one slot for each block of c ranks,
    a rank fills its own block's and leaves the others zero. Communicates over tp.
    """

    def __init__(self, buffer: FlatBuffer, group: Group) -> None:
        self._buffer = buffer
        self._group = group
        self._packed: dict[torch.dtype, list[_Packed]] = {}
        self._numel: dict[torch.dtype, int] = {}
        for name in buffer.names:
            for region in buffer.param_meta[name].parts:
                if region.partial:
                    self._add_region(name, region)
        plan = [
            [str(dtype), [[p.name, list(p.region.shape), p.region.copies] for p in packed]]
            for dtype, packed in self._packed.items()
        ]
        _assert_agreed(plan, group, "partial regions")

    def _add_region(self, name: str, region: Region) -> None:
        copies, size = region.copies, self._group.size
        assert size % copies == 0, f"{name}: {copies} copies of {region} over {size} tensor parallel ranks"
        dtype = self._buffer.main_grad(name).dtype
        used = self._numel.get(dtype, 0)
        start = used + self._group.rank // copies * region.numel
        self._packed.setdefault(dtype, []).append(_Packed(name, region, start))
        self._numel[dtype] = used + size // copies * region.numel

    def add(self) -> None:
        """Every partial region holds the sum over its copies. Raises PeerLostError."""
        for dtype, packed in self._packed.items():
            views = [item.region.view(self._buffer.main_grad(item.name)) for item in packed]
            flat = torch.zeros(
                _round_up(self._numel[dtype], self._group.size), dtype=dtype, device=views[0].device
            )
            for item, view in zip(packed, views, strict=True):
                _part(flat, item).copy_(view)
            collectives.sum_gradients(flat, self._group).wait()
            for item, view in zip(packed, views, strict=True):
                view.copy_(_part(flat, item))


class SharedSums:
    """Adds the gradients of parameters that the first and the last stage share. Communicates over embedding."""

    def __init__(self, buffer: FlatBuffer, group: Group) -> None:
        self._buffer = buffer
        self._group = group
        self._names = tuple(name for name in buffer.names if buffer.param_meta[name].shared)
        assert group.size > 1 or not self._names, (
            f"{self._names} are shared with another stage, and group {group.purpose!r} has one rank"
        )
        plan = [[name, list(buffer.param_meta[name].local_shape)] for name in sorted(self._names)]
        _assert_agreed(plan, group, "shared parameters")

    def add(self) -> None:
        """Every shared parameter's gradient holds the sum over its uses. Raises PeerLostError."""
        for name in sorted(self._names):  # places in their stages' lists differ, names do not
            grad = self._buffer.main_grad(name).view(-1)
            padded = _round_up(grad.numel(), self._group.size)
            if padded == grad.numel():
                collectives.sum_gradients(grad, self._group).wait()
                continue
            flat = torch.zeros(padded, dtype=grad.dtype, device=grad.device)
            flat[: grad.numel()].copy_(grad)
            collectives.sum_gradients(flat, self._group).wait()
            grad.copy_(flat[: grad.numel()])


def _part(flat: Tensor, item: _Packed) -> Tensor:
    return flat[item.start : item.start + item.region.numel].view(item.region.shape)


def _round_up(numel: int, unit: int) -> int:
    return math.ceil(numel / unit) * unit


def _assert_agreed(plan: list[Any], group: Group, what: str) -> None:
    """A collective whose ranks mean different things mixes up gradients without a word: look once, at the start."""
    for rank, other in zip(group.ranks, collectives.all_gather_json(plan, group), strict=True):
        assert other == plan, f"{what}: {plan} here, {other} on rank {rank}"
