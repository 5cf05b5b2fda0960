"""Prints which package `megatron.core` is, and its version."""

import megatron.core

print(megatron.core.__file__, megatron.core.__version__)
