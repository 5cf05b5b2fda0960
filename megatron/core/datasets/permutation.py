"""A shuffled order that is computed, not kept: where number i of a range goes, for any i by itself (pure).

A Feistel network over the smallest even number of bits that holds the range is a bijection of these bits whatever its
rounds compute; a result outside the range goes through it again, until one is inside ("cycle walking", less than four
times on average), which makes it a bijection of the range. Source: M. Luby, C. Rackoff, SIAM J. Comput. 17 (1988);
J. Black, P. Rogaway, CT-RSA 2002; the rounds mix with the finaliser of SplitMix64 (G. Steele et al., OOPSLA 2014).
"""

from __future__ import annotations

import hashlib

ROUNDS = 8
_WORD = (1 << 64) - 1


class Permutation:
    """A bijection of 0 .. size - 1, another one for each key.

    Calling it takes tens of microseconds and no memory. The same on every machine.
    """

    def __init__(self, size: int, *key: int) -> None:
        assert size > 0, f"a permutation of {size} numbers"
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        digests = (hashlib.sha256(repr((key, size, number)).encode()).digest() for number in range(ROUNDS))
        self._keys = [int.from_bytes(digest[:8], "little") for digest in digests]

    def __call__(self, i: int) -> int:
        assert 0 <= i < self._size, f"number {i} of {self._size}"
        while (i := self._mixed(i)) >= self._size:
            pass
        return i

    def _mixed(self, i: int) -> int:
        bits = self._half_bits
        mask = (1 << bits) - 1
        left, right = i >> bits, i & mask
        for key in self._keys:
            x = right ^ key
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _WORD
            x = (x ^ x >> 27) * 0x94D049BB133111EB & _WORD
            left, right = right, left ^ (x ^ x >> 31) & mask
        return left << bits | right
