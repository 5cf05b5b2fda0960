"""Numbers in words: counts, sizes, rates; text that somebody else wrote, as it may be shown (floor 0)."""

from __future__ import annotations

import re
from typing import Any

_PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"))
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
# Control characters, which move cursors and colour screens; separators, at which a line ends; what turns the direction
# of writing round; halves of surrogate pairs, which no encoding has.
_ACTED_ON = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def counted(number: int, thing: str, things: str | None = None) -> str:
    """`1 rank`, `1,024 ranks`; things: where an s does not do."""
    return f"{number:,} {thing if number == 1 else things or thing + 's'}"


def scaled(value: float, unit: str) -> str:
    """`12.3 GFLOP/s`, `3.34 EFLOP`."""
    factor, prefix = next((one for one in _PREFIXES if value >= one[0]), (1e6, "M"))
    return f"{value / factor:.3g} {prefix}{unit}"


def size_text(size: float, unit: str = "bytes", digits: int = 4) -> str:
    """Bytes in GB of 1e9, what is small in less; anything else as it is."""
    if unit != "bytes":
        return f"{size:.{digits}g}"
    factor, name = next((one for one in _UNITS if size >= 0.1 * one[0]), (1.0, "bytes"))
    return f"{size / factor:.{digits}g} {name}"


def mib_text(size: float) -> str:
    """Bytes in MiB, what is smaller than a hundredth of one in KiB."""
    mib = size / 2**20
    return f"{mib:.2f} MiB" if mib >= 0.01 or not size else f"{size / 2**10:.2f} KiB"


def printable(text: str, keep: str = "") -> str:
    r"""The text with everything that a terminal acts on, and every end of a line, written as `\x1b`, `\n`, `\u202e`.

    keep: characters that stay.
    """

    def escaped(match: re.Match[str]) -> str:
        char = match[0]
        return char if char in keep else char.encode("unicode_escape").decode()

    return _ACTED_ON.sub(escaped, text)


def printable_json(value: Any) -> Any:
    """A JSON value all of whose texts, names of fields too, are `printable`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {printable(name): printable_json(inner) for name, inner in value.items()}
    return [printable_json(item) for item in value] if isinstance(value, list) else value
