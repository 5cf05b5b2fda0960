"""The documented path of `megatron.core.fully_shard.sharded_grad_scaler`."""

from megatron.core.fully_shard.sharded_grad_scaler import sharded_grad_scaler

__all__ = ["sharded_grad_scaler"]
