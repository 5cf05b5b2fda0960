"""Checkpoints of any layout."""

__getattr__ = __import__("megatron").names_of(__name__)  # Megatron's names
