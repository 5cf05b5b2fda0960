"""Megatron-core's package, and the release of it that is followed."""

import sys

# The release of megatron-core whose flags and Python names this package follows, and our own version.
__version__ = f"0.16.1+zero.{sys.modules['megatron'].__version__}"
