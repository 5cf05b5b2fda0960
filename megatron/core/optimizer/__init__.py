"""Optimizer, its schedules, loss scaling."""

import sys

__getattr__ = sys.modules["megatron"].names_of(__name__)  # Megatron's names
