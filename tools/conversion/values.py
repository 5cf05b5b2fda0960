"""What stored bits mean, as numpy's numbers, and the same values in another dtype; without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.dist_checkpointing.chunk_reader import Bits

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_NUMBERS = {
    "F64": "f8", "F32": "f4", "F16": "f2", "I64": "i8", "I32": "i4", "I16": "i2", "I8": "i1",
    "U64": "u8", "U32": "u4", "U16": "u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def numbers(bits: Bits, dtype: str) -> NDArray[Any]:
    """The values; of 16-bit and 8-bit formats that numpy lacks, as wider ones that hold each of them."""
    if dtype == "BF16":
        return (bits.astype("u4") << 16).view("f4")
    if dtype == "F8_E5M2":
        return (bits.astype("u2") << 8).view("f2")
    if dtype == "F8_E4M3":
        wide, magnitude = bits.astype("u4"), bits.astype("u4") & 0x7F
        values = ((wide & 0x80) << 24 | magnitude << 20).view("f4") * np.float32(2.0**120)
        return np.where(magnitude == 0x7F, np.float32("nan"), values)
    return bits.view(_NUMBERS[dtype])


def converted(bits: Bits, stored: str, wanted: str) -> Bits:
    """The values in dtype `wanted`, one of DTYPES, to the nearest, of two such to the even one."""
    if stored == wanted:
        return bits
    with np.errstate(over="ignore"):  # infinity, as torch has it
        values = numbers(bits, stored).astype("f2" if wanted == "F16" else "f4")
    if wanted != "BF16":
        return values.view(f"u{values.itemsize}")
    wide = values.view("u4")
    rounded = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("u2")
