"""The trainer; its public names are those of Megatron's, rows of `compat/names.csv`."""

import sys

__getattr__ = sys.modules["megatron"].names_of(__name__)  # Megatron's names
