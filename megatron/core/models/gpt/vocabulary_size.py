"""How many ids a model has, by what it is padded to (floor 0)."""

from __future__ import annotations

from megatron.core.rectangles import even_share


def padded_vocabulary(vocab_size: int, make_vocab_size_divisible_by: int, tensor_parallel_size: int) -> int:
    """The vocabulary rounded up to a multiple of both arguments' product, in ids."""
    multiple = make_vocab_size_divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple


def leaves_ranks_empty(padded_vocab_size: int, tp: int) -> bool:
    """Whether there are too few ids for the last of `tp` ranks to hold any."""
    return even_share(padded_vocab_size, tp) * (tp - 1) >= padded_vocab_size
