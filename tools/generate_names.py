"""Writes the table of Megatron's Python names in docs/megatron_compat.md from megatron/compat/names.csv."""

import importlib
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs" / "megatron_compat.md"
BEGIN, END = "<!-- names: tools/generate_names.py -->\n", "<!-- end of names -->\n"


def names_table() -> str:
    """Markdown, a line a path."""
    from megatron.compat.names import table

    lines = ["| import path | names | not here |", "|---|---|---|"]
    for path, rows in itertools.groupby(sorted(table(), key=_by_path), key=_by_path):
        here: list[str] = []
        refused: dict[str, list[str]] = {}
        like: set[str] = set()
        for row in rows:
            if row["like"] != path:
                like.add(f"as `{row['like']}`")
            elif row["instead"]:
                refused.setdefault(row["instead"], []).append(row["name"])
            else:
                here += [row["name"]] if row["name"] != "*" else importlib.import_module(row["home"]).__all__
        told = "; ".join(f"{_listed(names)}: {why}".lstrip(": ") for why, names in refused.items())
        lines.append(f"| `{path}` | {', '.join(filter(None, [_listed(here), *like]))} | {told} |")
    return "\n".join(lines) + "\n"


def _by_path(row: dict[str, str]) -> str:
    return row["path"]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names) if name)


def with_table(text: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + names_table() + END + after


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    DOCS.write_text(with_table(DOCS.read_text()))
