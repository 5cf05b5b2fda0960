"""The documented path of `megatron.core.fully_shard.fully_shard`."""

from megatron.core.fully_shard.fully_shard import FullyShardedModule, fully_shard

__all__ = ["FullyShardedModule", "fully_shard"]
