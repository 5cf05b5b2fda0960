"""Megatron-LM's Python names over this framework's own parts, for trainers that import them. Nothing inside does.

`names.csv` says which paths and names there are, and where they live; `names` makes them importable."""
