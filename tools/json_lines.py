"""JSON objects that users write, one a line."""

from __future__ import annotations

import json
from typing import Any


def json_object(line: str | bytes) -> dict[str, Any]:
    """Raises ValueError for what is none."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError among them
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def text_in(row: dict[str, Any], *fields: str) -> str:
    """The text in the first of these fields that is there. Raises ValueError."""
    text = next((row[name] for name in fields if name in row), None)
    if not isinstance(text, str):
        named = " or ".join(f'"{name}"' for name in fields)
        raise ValueError(f"expected text in the field {named}")
    return text
