"""Values written as small expressions: `[0]*3+[1]*2`, `(127,0)`, `99,1,0` (floor 0).

A parser of thirty lines with a cap on length, never `eval`: `[0]*9**9` must not cost anything.
"""

from __future__ import annotations

import math
import re

MAX_ITEMS = 4096
_TOKEN = re.compile(r"\s*(\d+|[\[\]()+*,])")


class ListExpressionError(ValueError):
    """The text is no list expression, or its list would be too long."""


def parse_list_expression(text: str, max_items: int = MAX_ITEMS) -> tuple[int, ...] | int:
    """An integer, or the list that digits, brackets, `+`, `*` and commas spell.

    `3` -> 3; `[0]*2+[1]` -> (0, 0, 1); `([1]+[0]*2)*2` -> (1, 0, 0, 1, 0, 0).
    Raises ListExpressionError for anything else.
    """
    return _Parser(text, max_items).parse()


class _Parser:
    def __init__(self, text: str, max_items: int) -> None:
        self.text, self.max_items = text, max_items
        self.words = self._words()
        self.at = 0

    def _words(self) -> list[str]:
        if len(self.text) > 4 * self.max_items:
            raise ListExpressionError(f"list expression of {len(self.text)} characters is too long")
        words, end, stripped = [], 0, self.text.rstrip()
        while end < len(stripped):
            match = _TOKEN.match(stripped, end)
            if match is None or len(match[1]) > 9:
                raise self._error(f"unexpected {stripped[end : end + 12]!r} at character {end}")
            words.append(match[1])
            end = match.end()
        return words

    def _error(self, why: str) -> ListExpressionError:
        return ListExpressionError(
            f"{self.text[:80]!r} is no list expression ({why}); expected something like ([0]*3+[1]*11)"
        )

    def _next(self) -> str:
        return self.words[self.at] if self.at < len(self.words) else ""

    def _take(self, expected: str = "") -> str:
        word = self._next()
        if not word or (expected and word != expected):
            raise self._error(f"expected {expected or 'more'!r}, found {word or 'the end'!r}")
        self.at += 1
        return word

    def parse(self) -> tuple[int, ...] | int:
        value = self._sum(0)
        if self._next():
            raise self._error(f"unexpected {self._next()!r}")
        return value

    def _sum(self, depth: int) -> tuple[int, ...] | int:
        value = self._product(depth)
        while self._next() == "+":
            self._take()
            right = self._product(depth)
            if not (isinstance(value, tuple) and isinstance(right, tuple)):
                raise self._error("+ joins lists")
            value = self._capped(value + right)
        return value

    def _product(self, depth: int) -> tuple[int, ...] | int:
        value = self._atom(depth)
        while self._next() == "*":
            self._take()
            right = self._atom(depth)
            if isinstance(value, int) and isinstance(right, tuple):
                value, right = right, value
            if not (isinstance(value, tuple) and isinstance(right, int)):
                raise self._error("* repeats a list a number of times")
            if len(value) * right > self.max_items:
                raise self._error(f"more than {self.max_items} items")
            value = value * right
        return value

    def _atom(self, depth: int) -> tuple[int, ...] | int:
        if depth > 32:
            raise self._error("too many brackets")
        word = self._take()
        if word.isdigit():
            return int(word)
        if word == "(":
            value = self._sum(depth + 1)
            if self._next() == ",":
                return self._items(depth, ")", [value])
            self._take(")")
            return value
        if word == "[":
            return self._items(depth, "]", [])
        raise self._error(f"unexpected {word!r}")

    def _items(self, depth: int, end: str, items: list[tuple[int, ...] | int]) -> tuple[int, ...]:
        """The rest of a bracketed list; `items` holds what was read of it before a comma."""
        if items:
            self._take(",")
        while self._next() != end:
            items.append(self._sum(depth + 1))
            if self._next() != ",":
                break
            self._take()
        self._take(end)
        numbers = tuple(item for item in items if isinstance(item, int))
        if len(numbers) != len(items):
            raise self._error("a list inside a list")
        return self._capped(numbers)

    def _capped(self, value: tuple[int, ...]) -> tuple[int, ...]:
        if len(value) > self.max_items:
            raise self._error(f"more than {self.max_items} items")
        return value


def parse_pair(text: str) -> tuple[int, int]:
    """Two integers: `127,0` or `(127,0)`; -1 is allowed (no limit on that side)."""
    match = re.fullmatch(r"\s*\(?\s*(-1|\d{1,9})\s*,\s*(-1|\d{1,9})\s*\)?\s*", text)
    if match is None or text.strip().startswith("(") != text.strip().endswith(")"):
        raise ListExpressionError(f"{text[:80]!r} is no pair of integers; expected 127,0 or (127,0)")
    return int(match[1]), int(match[2])


_NUMBER = re.compile(r"[0-9.]+")


def parse_split(text: str) -> tuple[float, float, float]:
    """Weights of train, valid and test, padded to three, sum 1.

    Numbers are found by pattern, so quotes and separators are harmless. Raises ListExpressionError.
    """
    error = ListExpressionError(
        f"{text[:80]!r} is no split; expected one to three decimal weights such as 969,30,1"
    )
    if re.search(r"[A-Za-z]|-\s*[0-9.]", text):
        raise error
    try:
        numbers = [float(word) for word in _NUMBER.findall(text)]
    except ValueError:
        raise error from None
    if not 1 <= len(numbers) <= 3 or not 0 < sum(numbers) < math.inf:
        raise error
    train, valid, test = ([n / sum(numbers) for n in numbers] + [0.0, 0.0])[:3]
    return train, valid, test


def strip_quotes(text: str) -> str:
    """The text without literal quote characters round it (some launch scripts pass them inside the value)."""
    return text.strip().strip("'\"")


def expand_layout(text: str, max_symbols: int = MAX_ITEMS) -> tuple[str, ...]:
    """Stages of a pipeline layout string: `Et*2|(tt|)*5t|tmL` -> ("Ett", "tt", ..., "tmL").

    `|` ends a stage, `E` embedding, `t` layer, `m` MTP block, `L` loss, `*k` repeats a symbol or a
    parenthesised group, commas and spaces are ignored, stages may be empty. Raises ListExpressionError.
    """
    text = re.sub(r"[,\s]", "", strip_quotes(text))
    flat, rest = _layout_sequence(text, 0, 0, max_symbols)
    if rest != len(text):
        raise ListExpressionError(f"layout {text[:80]!r}: unexpected {text[rest]!r} at character {rest}")
    return tuple(flat.split("|"))


def _layout_sequence(text: str, at: int, depth: int, limit: int) -> tuple[str, int]:
    out = ""
    while at < len(text) and text[at] != ")":
        if text[at] == "(" and depth < 8:
            piece, at = _layout_sequence(text, at + 1, depth + 1, limit)
            if at >= len(text):
                raise ListExpressionError(f"layout {text[:80]!r}: a bracket is not closed")
        elif text[at] in "EtmL|":
            piece = text[at]
        else:
            raise ListExpressionError(f"layout {text[:80]!r}: unexpected {text[at]!r} at character {at}")
        at += 1
        times = re.match(r"\*(\d{1,6})", text[at:])
        if times is not None:
            at += times.end()
        count = int(times[1]) if times is not None else 1
        if len(out) + len(piece) * count > limit:
            raise ListExpressionError(f"layout {text[:80]!r}: more than {limit} symbols")
        out += piece * count
    return out, at
