"""Colours of what a run says on a terminal: 16-colour codes, which follow the terminal's own theme (floor 0, pure)."""

from __future__ import annotations

import re

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
_SHADES = re.compile(
    r"(?P<red>\binternal error\b|\berror \([^)]*\)|(?<= )(?:nan|-?inf)\b)"
    r"|(?P<yellow>\bWARNING:|\b\d+ skipped(?: \(\d+ NaN\))?)"
    r"|(?P<green>\bsuccessfully (?:saved|loaded) checkpoint\b|█+)"
    r"|(?P<cyan>^ > [^:]{1,40}:)"
    r"|(?P<bold>(?<=  )loss +[\d.,]+)"
    r"|(?P<dim>(?<=  )(?:lr|grad norm|grad|memory|mem|bubble|ETA)(?= )|\(plan +[^)]*\)|░+)"
)


def painted(row: str) -> str:
    """One row of a screen: labels dim, the loss bold, good news green, warnings yellow, faults red; codes apart
    the same row."""
    return _SHADES.sub(lambda found: f"\x1b[{_CODES[found.lastgroup or 'bold']}m{found[0]}\x1b[0m", row)
