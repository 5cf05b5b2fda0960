"""Figures in words, for persons: counts, sizes, rates, times, shares, what is not known; others' texts, printable
(floor 0).

Whatever a person reads is made here; lines that Megatron's parsers read keep Megatron's form (`report/metrics`).

[Note: units of bytes] Bytes are counted in KiB, MiB and GiB, powers of 1024, as flags (`--rank-memory-limit 75G`),
CUDA, nvidia-smi and Megatron's memory lines count them. What a wire carries in a second is in GB/s, powers of 1000, as
makers of networks have it.

[Note: no exponents] A figure has a few significant digits, a comma between thousands, and never an exponent: what is
beyond a million millions or below a millionth has a letter (12T, 4.5n), what is below any letter is 0.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

# Control characters, which move cursors and colour screens; separators, at which a line ends; what turns the direction
# of writing round; halves of surrogate pairs, which no encoding has.
_ACTED_ON = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NOT_KNOWN = "not known"
_LETTERS = ("", *"kMGTPEZYRQ", *"qryzafpnum")  # by power of 1000; from the end: of what is below 1
_MOST_POWER = 10
_SIZES = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
FIRST = 8  # of many texts, before it is said how many more
_LONG_S = 120  # from here on a time is 0:02:00
_PLURALS = {"corpus": "corpora", "index": "indices", "entry": "entries", "is": "are", "has": "have"}


def plural(number: int, thing: str) -> str:
    """The form of `thing`, or of its last word, for so many, without the number: `rank`, `ranks`; `is`, `are`."""
    if number == 1:
        return thing
    return _PLURALS.get(thing, thing + ("es" if thing.endswith(("s", "x", "ch", "sh")) else "s"))


def counted(number: int, thing: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{number:,} {plural(number, thing)}"


def plain(value: float | None, digits: int = 4) -> str:
    """A number: `1,234.5`, `0.0003`. digits: significant ones; a whole number has all of its own."""
    if value is None:
        return NOT_KNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "-infinite" if value < 0 else "infinite"
    exponent = _exponent(value, digits)
    if -6 <= exponent < 12 or not value:
        return decimal(value, digits - 1 - exponent)
    power = exponent // 3
    if power < -_MOST_POWER:
        return "0"
    if power > _MOST_POWER:
        return f"{'-' * (value < 0)}over 999{_LETTERS[_MOST_POWER]}"
    return decimal(value / 1000.0**power, digits - 1 - exponent % 3) + _LETTERS[power]


def _exponent(value: float, digits: int) -> int:
    """The power of ten of the first digit, once the value is rounded."""
    return int(f"{value:.{digits - 1}e}".rpartition("e")[2])


def decimal(value: float, places: int) -> str:
    """With so many places behind the point, but without zeros at the end."""
    text = f"{round(value, max(0, places)) + 0.0:,.{max(0, places)}f}"  # never -0
    return text.rstrip("0").rstrip(".") if "." in text else text


def brief(value: float | None, digits: int = 4) -> str:
    """`12.5k`, `3M`; what is below ten thousand is whole."""
    if value is None or abs(value) < 1e4 or not math.isfinite(value):
        return plain(value, digits)
    return scaled(abs(value), "", digits).replace(" ", "") if value > 0 else "-" + brief(-value, digits)


def scaled(value: float | None, unit: str, digits: int = 3) -> str:
    """`12.3 GFLOP/s`, `3.34 EFLOP`; what is below 1 has no letter."""
    if value is None or not math.isfinite(value):
        return plain(value)
    power = min(max(0, _exponent(value, digits) // 3), _MOST_POWER)
    amount = min(value / 1000.0**power, 999.0) if power == _MOST_POWER else value / 1000.0**power
    return f"{plain(amount, digits)} {_LETTERS[power]}{unit}"


def size_text(size: float | None, unit: str = "bytes", digits: int = 4) -> str:
    """Bytes as [Note: units of bytes] has it; anything else as it is."""
    if unit != "bytes" or size is None or not math.isfinite(size):
        return plain(size, digits)
    factor, name = unit_of_bytes(size)
    return f"{plain(size / factor, digits)} {name if size != 1 else 'byte'}"


def unit_of_bytes(most: float) -> tuple[int, str]:
    """In which sizes up to this one are shown, and how many bytes it has. [Note: units of bytes]"""
    power = 0
    while power + 1 < len(_SIZES) and round(abs(most) / 1024**power) >= 1024:
        power += 1
    return 1024**power, _SIZES[power]


def time_text(seconds: float | None, digits: int = 4) -> str:
    """`12.34 ms`, `1.5 s`, and from two minutes on as `duration`."""
    if seconds is None or not math.isfinite(seconds):
        return plain(seconds)
    if seconds >= _LONG_S:
        return duration(seconds)
    rounded = float(f"{seconds:.{digits - 1}e}")
    least, unit = next((row for row in _TIMES if rounded >= row[0]), _TIMES[0])
    return f"{plain(seconds / least, digits)} {unit}"


def share_text(share: float | None, places: int = 1) -> str:
    """`12.3%`."""
    if share is None or not math.isfinite(share):
        return plain(share)
    if abs(share) >= 1e4:
        return f"{plain(min(max(100 * share, -1e99), 1e99))}%"
    return f"{round(100 * share, places) + 0.0:,.{places}f}%"  # never -0


def first_of(texts: Sequence[str], between: str = ", ") -> str:
    """The first of many texts, and how many more there are."""
    more = f" and {len(texts) - FIRST} more" if len(texts) > FIRST else ""
    return between.join(texts[:FIRST]) + more


def between(ascending: Sequence[str]) -> str:
    """`3 to 5` of the figures from least to most, `3` where they are the same."""
    return ascending[0] if ascending[0] == ascending[-1] else f"{ascending[0]} to {ascending[-1]}"


def duration(seconds: float | None) -> str:
    """`0:01:10`, `1 day 02:00:00`."""
    if seconds is None or not math.isfinite(seconds):
        return plain(seconds)
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days >= 100_000:
        return f"{plain(days)} days"
    return f"{counted(days, 'day')} {h:02d}:{m:02d}:{s:02d}" if days else f"{h}:{m:02d}:{s:02d}"


def brief_duration(seconds: float) -> str:
    """The same for a terminal, in at most seven characters: `0:01:10`, `12.3 h`, `4.2 d`."""
    hours = seconds / 3600
    if hours < 9.99:
        return duration(seconds)
    if hours < 99.9:
        return f"{hours:.1f} h"
    return f"{hours / 24:.1f} d" if hours < 23_990 else f"{column(hours / 24, 5, 0).strip()} d"


def age(seconds: float) -> str:
    """`12 s ago`, `3 min ago`, `2.5 h ago`."""
    if seconds < 100:
        return f"{seconds:.0f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 6000 else f"{plain(seconds / 3600, 2)} h ago"


def column(value: float | None, width: int, places: int) -> str:
    """For a column of so many characters, 4 or more, at its right: at most so many places behind the point, fewer where
    there is no room, and a letter where there is none for the digits. Of what is not known, a dash."""
    if value is None or not math.isfinite(value):
        return f"{'-' if value is None else value:>{width}}"
    for count in range(places, -1, -1):
        if len(text := f"{round(value, count) + 0.0:,.{count}f}") <= width:
            return text.rjust(width)
    power = _exponent(value, 3) // 3
    for count in (2, 1, 0) if power <= _MOST_POWER else ():
        if len(text := f"{value / 1000.0**power:.{count}f}{_LETTERS[power]}") <= width:
            return text.rjust(width)
    return f"{'-' * (value < 0)}>999Q"[:width].rjust(width)


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
