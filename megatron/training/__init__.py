"""The trainer; its public names are those of Megatron's, rows of `compat/names.csv`."""

__getattr__ = __import__("megatron").names_of(__name__)  # Megatron's names
