"""The base of every layer whose gradients go to a `WeightGradSink`: its name, its parameters, and which part of them a
tensor parallel rank holds.

A rank holds bands of rows (column layers, vocabularies) or of columns (row layers), or all of a parameter. Without
other ranks nothing is cut and there are no regions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.param_meta import GradRoute, InitKind, ParamMeta, Region
from megatron.core.protocols import WeightGradSink
from megatron.core.rectangles import Dims, even_share
from megatron.core.tensor_parallel.expert_ranks import ExpertRanks
from megatron.core.tensor_parallel.mappings import ALONE, TensorParallel


@dataclasses.dataclass(frozen=True)
class Band:
    """Consecutive rows (or columns) of a parameter that this rank holds.

    copies: so many consecutive ranks hold the same ones, each computing the gradient of its own use of them.
    """

    offset: int
    size: int
    copies: int = 1


def even_bands(total: int, tp: TensorParallel, parts: int = 1) -> tuple[Band, ...]:
    """This rank's share of each of `parts` equal parts of `total` rows (a gated MLP has two: gate and up)."""
    part = total // parts
    share = part // tp.size
    assert share * tp.size * parts == total, f"{total} = {parts} parts over {tp.size} ranks"
    return tuple(Band(index * part + tp.rank * share, share) for index in range(parts))


def band_regions(shape: Dims, bands: Sequence[Band], dim: int, tp: TensorParallel) -> tuple[Region, ...]:
    """Regions of a parameter of global `shape` of which this rank holds `bands` along `dim`, one after the other."""
    if tp.size == 1:
        return ()

    def start(index: int) -> Dims:
        return (*(0,) * dim, index, *(0,) * (len(shape) - dim - 1))

    regions, at = [], 0
    for band in bands:
        held = (*shape[:dim], band.size, *shape[dim + 1 :])
        partial = band.copies > 1
        regions.append(Region(start(at), start(band.offset), held, copies=band.copies, partial=partial))
        at += band.size
    return tuple(regions)


def expert_regions(shape: Dims, regions: tuple[Region, ...], own: range) -> tuple[Region, ...]:
    """Regions of a parameter of global `shape`, [experts, ...], of which this rank has `own` experts. regions: what of
    each expert it has, as if it had all."""
    if len(own) == shape[0]:
        return regions
    start = (0,) * len(shape)
    return tuple(
        dataclasses.replace(one, offset=(own.start, *one.offset[1:]), shape=(len(own), *one.shape[1:]))
        for one in regions or (Region(start, start, shape),)
    )


def vocabulary_band(vocab_size: int, tp: TensorParallel) -> Band:
    """This rank's rows of a vocabulary, which TP need not divide: as many for each rank, for the last what is left."""
    rows = even_share(vocab_size, tp.size)
    first = rows * tp.rank
    assert first < vocab_size, f"{vocab_size} rows: none for rank {tp.rank} of {tp.size}"
    return Band(first, min(rows, vocab_size - first))


def vocabulary_part(shape: Dims, tp: TensorParallel) -> dict[str, Any]:
    """Regions and padding (`ParamMeta`) of this rank's rows of a matrix of global `shape` with a row an id.

    The tensors of all ranks are equally large, as are then their buckets, plans and collectives; so where TP does not
    divide the ids, the last rank has rows of zeros behind its own. Nothing but the size of its tensor knows of them:
    they are in no whole, no norm and no checkpoint, and the loss and `gather_vocabulary` leave their logits out.
    """
    band = vocabulary_band(shape[0], tp)
    return {
        "regions": band_regions(shape, [band], 0, tp),
        "padding": even_share(shape[0], tp.size) - band.size,
        "embedding_or_output": True,
    }


def whole_region(shape: Dims, tp: TensorParallel, *, partial: bool) -> tuple[Region, ...]:
    """The one region of a parameter that every rank holds. partial: each has a part of its gradient."""
    if tp.size == 1:
        return ()
    start = (0,) * len(shape)
    return (Region(start, start, shape, copies=tp.size, partial=partial),)


@dataclasses.dataclass(frozen=True)
class LayerFactory:
    """What every layer of one model is built with.

    sink: where gradients go. dtype, device: of the parameters. init_std: of ordinary weights; residual_std:
    of the weights that write into the residual stream. tp: the ranks that share each layer. experts: those over which
    experts lie; None: as the rest. name: of the layer to be
    built, which leads to it from the model.
    """

    sink: WeightGradSink
    dtype: torch.dtype
    device: torch.device
    init_std: float = 0.02
    residual_std: float = 0.02
    tp: TensorParallel = ALONE
    experts: ExpertRanks | None = None
    name: str = ""

    def at(self, child: str) -> LayerFactory:
        """For a layer inside of the named one."""
        return dataclasses.replace(self, name=f"{self.name}.{child}" if self.name else child)


class SinkModule(nn.Module):
    """A layer that knows its global name and the facts about its parameters (`meta`, keyed by global name)."""

    def __init__(self, factory: LayerFactory) -> None:
        super().__init__()
        self.name, self.sink, self.tp = factory.name, factory.sink, factory.tp
        self.meta: dict[str, ParamMeta] = {}
        self._tensor: dict[str, Any] = {"dtype": factory.dtype, "device": factory.device}

    def key(self, local: str) -> str:
        """Global name of the parameter `local`, which is also its sink key."""
        return f"{self.name}.{local}"

    def new_parameter(
        self, local: str, shape: Dims, init: InitKind, regions: tuple[Region, ...], **facts: Any
    ) -> nn.Parameter:
        """An unfilled parameter to be assigned to `self.<local>`, with its ParamMeta filed. 1-D ones do not decay.

        shape: of the whole. regions: what of it this rank holds, () for all of it; the tensor is as large as they and
        the padding are.
        """
        facts = {"init_std": 0.0, "route": GradRoute.SINK, "decay": len(shape) > 1, **facts}
        meta = ParamMeta(self.key(local), shape, init, regions=regions, **facts)
        self.meta[meta.name] = meta
        return nn.Parameter(torch.empty(meta.local_shape, **self._tensor))


def collect_param_meta(module: nn.Module) -> dict[str, ParamMeta]:
    """The ParamMeta of every parameter under `module`, in the order of `named_parameters`."""
    meta: dict[str, ParamMeta] = {}
    for child in module.modules():
        if isinstance(child, SinkModule):
            meta.update(child.meta)
    names = [name for name, _ in module.named_parameters()]
    assert set(names) == set(meta), f"parameters without meta or the reverse: {set(names) ^ set(meta)}"
    return {name: meta[name] for name in names}
