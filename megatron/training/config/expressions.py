"""Tables in files: their rows, and conditions and messages in them (floor 0).

A condition is a small expression, read by Python's parser and never executed:

    context_parallel_size > 1 and seq_length % (2 * context_parallel_size) != 0

A name is a setting or a fact; a call asks a function for one. What is computed from an unset value (None) is unset, and
a comparison with one is false (`is` tells it). In a message `{name}` stands for the flag of a setting and its value,
`{=expression}` for a value, `{=found}` for that of the condition.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.safe_files import read_rows

Names = Callable[[str], Any]  # the value of a name, or the function that is called by it
_OPERATORS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda one, several: one in several,
    ast.NotIn: lambda one, several: one not in several,
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


@functools.cache
def rows(name: str) -> list[dict[str, str]]:
    """A table beside this file, by its column names."""
    return read_rows(Path(__file__).with_name(name))


@functools.cache
def parsed(text: str) -> ast.expr:
    """Raises SyntaxError."""
    return ast.parse(text, mode="eval").body


def value_of(node: ast.expr, names: Names) -> Any:
    """What an expression comes to. Asserts that it is one of those above."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return names(node.id)
        case ast.Tuple():
            return tuple(value_of(item, names) for item in node.elts)
        case ast.Call(func=ast.Name(id=function)):
            return names(function)(*(value_of(item, names) for item in node.args))
        case ast.UnaryOp(op=ast.Not()):
            return not value_of(node.operand, names)
        case ast.BinOp():
            return _applied(node.op, value_of(node.left, names), value_of(node.right, names))
        case ast.Compare():
            sides = [value_of(side, names) for side in (node.left, *node.comparators)]
            return all(map(_applied, node.ops, sides, sides[1:]))
    assert isinstance(node, ast.BoolOp), f"{ast.unparse(node)!r} is no expression of a table"
    value = None
    for part in node.values:  # the value that decides, as in Python
        value = value_of(part, names)
        if bool(value) is isinstance(node.op, ast.Or):
            break
    return value


def _applied(op: ast.AST, left: Any, right: Any) -> Any:
    unset = (left is None or right is None) and not isinstance(op, ast.Is | ast.IsNot)
    return None if unset else _OPERATORS[type(op)](left, right)


def filled(message: str, names: Names, told: Callable[[str], str], found: Any = None) -> str:
    """A message with its words. told: the flag of a setting and its value. found: of the condition."""

    def words(match: re.Match[str]) -> str:
        if not match[1]:
            return told(match[2])
        return str(found if match[2] == "found" else value_of(parsed(match[2]), names))

    return re.sub(r"\{(=?)([^}]*)\}", words, message)
