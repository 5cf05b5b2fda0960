"""Writes the table of Megatron's Python names in docs/megatron_compat.md from megatron/compat/names.csv."""

import importlib
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.generated import ROOT, between

DOCS = ROOT / "docs" / "megatron_compat.md"


def names_table() -> str:
    """Markdown, a line a path."""
    from megatron.compat.names import paths, rows_of

    lines = ["| import path | names | not here |", "|---|---|---|"]
    for path in sorted(paths()):
        here: list[str] = []
        refused: dict[str, list[str]] = {}
        like: list[str] = []
        for row in (row for row in rows_of("names.csv") if row["path"] == path):
            if row["home"] in paths():
                like.append(f"as `{row['home']}`")
            elif row["instead"]:
                refused.setdefault(row["instead"], []).append(row["name"])
            else:
                here += [row["name"]] if row["name"] != "*" else importlib.import_module(row["home"]).__all__
        told = "; ".join(f"{_listed(names)}: {why}" for why, names in refused.items())
        lines.append(f"| `{path}` | {', '.join(filter(None, [_listed(here), *like]))} | {told} |")
    return "\n".join(lines) + "\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def with_table(text: str) -> str:
    """The page with the table as it is now."""
    return between(text, "names", "generate_names.py", names_table())


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text()))
