"""What runs: ranks, models, plans, engines, checkpoints."""

import sys

# The release of megatron-core whose flags and Python names this package follows, and our own version.
__version__ = f"0.16.1+zero.{sys.modules['megatron'].__version__}"
__getattr__ = sys.modules["megatron"].names_of(__name__)  # Megatron's names
