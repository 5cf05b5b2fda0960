"""The documented path of `megatron.core.fully_shard.fully_sharded_data_parallel`."""

from megatron.core.fully_shard.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
