"""Data parallelism: sharding, engines, flat buffers."""

__getattr__ = __import__("megatron").names_of(__name__)  # Megatron's names
