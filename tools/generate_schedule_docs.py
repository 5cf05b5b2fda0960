#!/usr/bin/env python3
"""Write what docs/pipelines.md says of every schedule, from the table of schedules: figures and pictures.

`--check` exits 1 when something is stale. Schedules that the page has no words for get those of their row.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.pipeline_parallel.plan.schedules import SCHEDULES
from tools import generated, show_schedule
from tools.generated import ROOT

PAGE = ROOT / "docs" / "pipelines.md"
PICTURES = ROOT / "docs" / "img" / "schedules"


def page(text: str) -> str:
    """The page with its table, and with the pictures that its paragraphs do not have."""
    command = re.search(r"^`(python tools/show_schedule\.py .*--format table)`", text, re.MULTILINE)
    assert command is not None, f"{PAGE} does not say how its table is made"
    text = _replaced(text, "figures", _said(shlex.split(command[1])[2:]))
    said = text.partition("<!-- pictures: ")[0]
    new = [one for one in SCHEDULES.values() if f"(img/schedules/{one.name}.svg)" not in said]
    more = "".join(
        f"\n**{one.name}**: {one.about}.\n![{one.name}](img/schedules/{one.name}.svg)\n" for one in new
    )
    return _replaced(text, "pictures", more)


def pictures(text: str) -> dict[str, str]:
    """By file name. text: the page, which says how they are made."""
    command = re.search(
        r"^`(python tools/show_schedule\.py .*) --pictures docs/img/schedules`", text, re.MULTILINE
    )
    assert command is not None, f"{PAGE} does not say how its pictures are made"
    with tempfile.TemporaryDirectory() as folder:
        _said([*shlex.split(command[1])[2:], "--pictures", folder])
        return {path.name: path.read_text() for path in Path(folder).iterdir()}


def _said(words: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.redirect_stderr(io.StringIO()):
        status = show_schedule.main(words)
    assert not status, f"show_schedule {shlex.join(words)} ends with {status}"
    return told.getvalue()


def _replaced(text: str, part: str, content: str) -> str:
    return generated.between(text, part, "generate_schedule_docs.py", content)


def main() -> int:
    """0, or 1 with --check when something is not what it should be."""

    def pages() -> dict[Path, str | None]:
        text = PAGE.read_text()
        made = {PICTURES / name: svg for name, svg in pictures(text).items()}
        return {**dict.fromkeys(PICTURES.iterdir()), **made, PAGE: page(text)}

    return generated.main(__doc__, pages)


if __name__ == "__main__":
    sys.exit(main())
