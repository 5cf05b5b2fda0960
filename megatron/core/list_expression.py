"""Values written as small expressions: `[0]*3+[1]*2`, `(127,0)`, `99,1,0` (floor 0).

Python's own parser reads them, and nothing is evaluated: `[0]*9**9` must not cost anything.
"""

from __future__ import annotations

import ast
import math
import re

MAX_ITEMS = 4096
_MAX_NUMBER = 10**9
_SYMBOL = re.compile(r"([EtmL|()])(?:(?<!\()\*(\d{1,6}))?")  # of a layout, and how often


class ListExpressionError(ValueError):
    """The text is no list expression, or its list would be too long."""


def parse_list_expression(text: str) -> tuple[int, ...] | int:
    """An integer, or the list that digits, brackets, `+`, `*` and commas spell.

    `3` -> 3; `[0]*2+[1]` -> (0, 0, 1); `([1]+[0]*2)*2` -> (1, 0, 0, 1, 0, 0).
    Raises ListExpressionError for anything else.
    """
    if len(text) > 4 * MAX_ITEMS:
        raise ListExpressionError(f"list expression of {len(text)} characters is too long")
    try:
        if re.fullmatch(r"[\d\s\[\]()+*,]*", text, re.ASCII) is None:
            raise ValueError("unexpected characters")
        return _list_value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        why = error.msg if isinstance(error, SyntaxError) else str(error) or "too many brackets"
        raise ListExpressionError(
            f"{text[:80]!r} is no list expression ({why}); expected something like ([0]*3+[1]*11)"
        ) from None


def _list_value(node: ast.expr) -> tuple[int, ...] | int:
    """Raises ValueError for what is neither a number nor a list of numbers."""
    value: object = None
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value < _MAX_NUMBER:
        return node.value
    if isinstance(node, ast.List | ast.Tuple):
        value = tuple(_list_value(item) for item in node.elts)
    elif isinstance(node, ast.BinOp):
        left, right = _list_value(node.left), _list_value(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, tuple) and isinstance(right, tuple):
            value = left + right
        elif isinstance(node.op, ast.Mult) and isinstance(left, tuple) != isinstance(right, tuple):
            numbers, times = (left, right) if isinstance(left, tuple) else (right, left)
            assert isinstance(numbers, tuple)
            assert isinstance(times, int)
            if len(numbers) * times > MAX_ITEMS:
                raise ValueError(f"more than {MAX_ITEMS} items")
            value = numbers * times
    if not isinstance(value, tuple) or not all(isinstance(item, int) for item in value):
        raise ValueError("+ joins lists of numbers, * repeats one")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items")
    return value


def parse_pair(text: str) -> tuple[int, int]:
    """Two integers: `127,0` or `(127,0)`; -1 is allowed (no limit on that side)."""
    match = re.fullmatch(r"\s*\(?\s*(-1|\d{1,9})\s*,\s*(-1|\d{1,9})\s*\)?\s*", text)
    if match is None or text.strip().startswith("(") != text.strip().endswith(")"):
        raise ListExpressionError(f"{text[:80]!r} is no pair of integers; expected 127,0 or (127,0)")
    return int(match[1]), int(match[2])


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
        numbers = [float(word) for word in re.findall(r"[0-9.]+", text)]
    except ValueError:
        raise error from None
    if not 1 <= len(numbers) <= 3 or not 0 < sum(numbers) < math.inf:
        raise error
    a, b, c = (*numbers, 0.0, 0.0)[:3]
    total = a + b + c  # in this order: the last bit moves borders between splits
    return a / total, b / total, c / total


def strip_quotes(text: str) -> str:
    """The text without literal quote characters round it (some launch scripts pass them inside the value)."""
    return text.strip().strip("'\"")


def expand_layout(text: str) -> tuple[str, ...]:
    """Stages of a pipeline layout string: `Et*2|(tt|)*5t|tmL` -> ("Ett", "tt", ..., "tmL").

    `|` ends a stage, `E` embedding, `t` layer, `m` MTP block, `L` loss, `*k` repeats a symbol or a
    parenthesised group, commas and spaces are ignored, stages may be empty. Raises ListExpressionError.
    """
    text = re.sub(r"[,\s]", "", strip_quotes(text))
    open_groups, at = [""], 0  # the whole first
    while at < len(text):
        match = _SYMBOL.match(text, at)
        if match is None or (match[1] == ")" and len(open_groups) == 1):
            raise ListExpressionError(f"layout {text[:80]!r}: unexpected {text[at]!r} at character {at}")
        at = match.end()
        if match[1] == "(":
            open_groups.append("")
            continue
        piece, count = open_groups.pop() if match[1] == ")" else match[1], int(match[2] or 1)
        if len(open_groups[-1]) + len(piece) * count > MAX_ITEMS:
            raise ListExpressionError(f"layout {text[:80]!r}: more than {MAX_ITEMS} symbols")
        open_groups[-1] += piece * count
    if len(open_groups) > 1:
        raise ListExpressionError(f"layout {text[:80]!r}: a bracket is not closed")
    return tuple(open_groups[0].split("|"))
