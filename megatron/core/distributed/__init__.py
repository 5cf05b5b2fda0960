"""Data parallelism: sharding, engines, flat buffers."""

import sys

__getattr__ = sys.modules["megatron"].names_of(__name__)  # Megatron's names
