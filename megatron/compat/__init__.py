"""Megatron-LM's Python names over this framework's own parts: what a trainer written for Megatron imports.

A facade that nothing inside imports. `names.csv` says which of Megatron's import paths and names there are and where
they live here; `finder` makes these paths importable, and says of every other name what to use instead.
"""
