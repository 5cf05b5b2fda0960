"""Pages of docs that scripts write, whole or between two marks; `--check` only compares."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def between(text: str, begin: str, end: str, content: str) -> str:
    """A page with this content between its marks."""
    assert begin in text, f"the page has no place for what is behind {begin.strip()!r}"
    before, _, rest = text.partition(begin)
    return before + begin + content + end + rest.partition(end)[2]


def main(about: str | None, pages: Callable[[], Mapping[Path, str | None]]) -> int:
    """Write the pages, None for those that are to go; 0, or 1 with --check when one is not what it should be."""
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare only")
    check, stale = parser.parse_args().check, []
    for path, content in pages().items():
        if content == (path.read_text() if path.exists() else None):
            continue
        stale.append(os.path.relpath(path, ROOT))
        if check:
            continue
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
    if check and stale:
        told = f"{stale[0]} is stale" if len(stale) == 1 else f"stale: {', '.join(sorted(stale))}"
        print(f"{told}: run make docs", file=sys.stderr)
    return int(check and bool(stale))
