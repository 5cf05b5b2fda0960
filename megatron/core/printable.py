"""Text that somebody else wrote, as a terminal and a log may show it (floor 0)."""

from __future__ import annotations

import re
from typing import Any

# Control characters, which move cursors and colour screens; separators, at which a line ends; what turns the direction
# of writing round; halves of surrogate pairs, which no encoding has.
_ACTED_ON = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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
