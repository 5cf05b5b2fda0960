"""The base of every layer whose gradients go to a `WeightGradSink`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from megatron.core.param_meta import GradRoute, InitKind, ParamMeta, Region
from megatron.core.protocols import WeightGradSink
from megatron.core.tensor_parallel.mappings import ALONE, TensorParallel


@dataclasses.dataclass(frozen=True)
class LayerFactory:
    """What every layer of one model is built with.

    sink: where gradients go. dtype, device: of the parameters. init_std: of ordinary weights; residual_std:
    of the weights that write into the residual stream. tp: the ranks that share each layer.
    """

    sink: WeightGradSink
    dtype: torch.dtype
    device: torch.device
    init_std: float = 0.02
    residual_std: float = 0.02
    tp: TensorParallel = ALONE


class SinkModule(nn.Module):
    """A layer that knows its global name and the facts about its parameters (`meta`, keyed by global name)."""

    def __init__(self, name: str, factory: LayerFactory) -> None:
        super().__init__()
        self.name = name
        self.sink = factory.sink
        self.tp = factory.tp
        self.meta: dict[str, ParamMeta] = {}
        self._factory = factory

    def key(self, local: str) -> str:
        """Global name of the parameter `local`, which is also its sink key."""
        return f"{self.name}.{local}"

    def new_parameter(
        self,
        local: str,
        shape: tuple[int, ...],
        *,
        regions: tuple[Region, ...] = (),
        init: InitKind,
        init_std: float = 0.0,
        **facts: Any,
    ) -> nn.Parameter:
        """An unfilled parameter to be assigned to `self.<local>`, with its ParamMeta filed. 1-D ones do not decay.

        shape: of the whole. regions: what of it this rank holds, () for all of it; the tensor is as large as they are.
        """
        name = self.key(local)
        meta = ParamMeta(
            name=name,
            global_shape=shape,
            init=init,
            init_std=init_std,
            route=GradRoute.SINK,
            decay=len(shape) > 1,
            regions=regions,
            **facts,
        )
        self.meta[name] = meta
        factory = self._factory
        return nn.Parameter(torch.empty(meta.local_shape, dtype=factory.dtype, device=factory.device))


def collect_param_meta(module: nn.Module) -> dict[str, ParamMeta]:
    """The ParamMeta of every parameter under `module`, in the order of `named_parameters`."""
    meta: dict[str, ParamMeta] = {}
    for child in module.modules():
        if isinstance(child, SinkModule):
            meta.update(child.meta)
    names = [name for name, _ in module.named_parameters()]
    assert set(names) == set(meta), f"parameters without meta or the reverse: {set(names) ^ set(meta)}"
    return {name: meta[name] for name in names}
