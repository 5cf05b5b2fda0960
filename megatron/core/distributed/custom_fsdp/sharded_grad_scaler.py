"""Loss scaling of sharded modules: an overflow in one rank's shard is one for all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.custom_fsdp.fully_shard import FullyShardedModule
from megatron.core.distributed.custom_fsdp.step_driver import driver_of
from megatron.core.transport import collectives


def sharded_grad_scaler(model: FullyShardedModule, **kwargs: Any) -> ShardedGradScaler:
    """A `torch.amp.GradScaler` for optimizers of `model.parameters()`. kwargs: of GradScaler; `device` is the model's
    if not given."""
    ps = driver_of(model).engine.ps
    return ShardedGradScaler(model, **{"device": ps.device.torch_device.type, **kwargs})


class ShardedGradScaler(torch.amp.GradScaler):
    """All ranks skip a step, and change the scale, where the gradients of one of them are not finite.

    Every rank calls `unscale_` or `step` alike. Communicates there, over dp and tp: one number.
    """

    def __init__(self, model: FullyShardedModule, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        ps = driver_of(model).engine.ps
        self._groups = ps.dp_reduce_group, ps.dp_outer_group, ps.tp_group

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """All of GradScaler's looks at gradients come through here: `unscale_`, and `step` of optimizers that unscale
        by themselves."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found = found or {found_inf.device: found_inf}  # a rank without gradients is told too
        for flag in found.values():
            for group in self._groups:
                collectives.all_reduce(flag, group, "max")
        return found
